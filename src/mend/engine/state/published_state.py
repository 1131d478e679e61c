"""The state that the loop publishes to the training thread, under one lock.

Values cross the threads. The loop writes anchors, decided commits and discarded offers; the
training thread reads them at apply points. In the other direction the training thread posts events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from mend.consensus.records import Commit, Drop, Genesis, Last, Lineage, Record, Roster, Snapshot
from mend.coordination.messages import FailSlow, Pulled
from mend.engine.compute.anchor import Anchor
from mend.engine.state.job_members import JobMembers
from mend.engine.state.participation import LastRounds, Participation
from mend.engine.state.pulls import Transfers
from mend.errors import Evicted, JobLost, MendError, ensure
from mend.types import Member

OfferFate = Literal["", "named", "dropped"]
"""What the commits say of an offer; empty: it is still open."""


@dataclass
class PublishedFragment:
    """One fragment: the versions that this rank holds, decided commits, discarded own offers."""

    anchors: dict[int, Anchor] = field(default_factory=dict)
    commits: dict[int, Commit] = field(default_factory=dict)
    discarded: dict[int, str] = field(default_factory=dict)
    """seq of the newest one -> why the log refuses to merge it; empty: it was too old, or this rank
    declined it. Replaced, never changed."""
    digests: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """version -> digests of all rails, as decided; none older than the applied version."""
    decided: int = 0
    restored: int = -1
    """The version of the newest snapshot; commits up to it may be missing. -1: no snapshot."""
    last: dict[Member, Last] = field(default_factory=dict)
    """By member, what that snapshot says of its newest offers."""
    tails_dropped: set[int] = field(default_factory=set)
    """Racks whose newest offer that ended was dropped."""
    copy_failed: str = ""
    """Error of the newest pull of a decided version; empty: it succeeded."""

    def fate(self, mine: tuple[Member, int], base: int, version: int) -> OfferFate:
        """The fate of an offer in the versions (base, version]: "named", "dropped" or ""."""
        member, seq = mine
        known = self.last.get(member)
        if base < self.restored <= version and known is not None and seq <= known.ended:
            return "named" if seq == known.named else "dropped"
        # No commit up to this version is missing after the newest snapshot that it includes.
        begin = max(base, self.restored if version >= self.restored else -1) + 1
        stretch = [self.commits[v] for v in range(begin, version + 1)]
        return next((fate for commit in stretch if (fate := fate_in(commit, mine))), "")

    def begin(self, version: int, digests: tuple[str, ...]) -> None:
        """The job begins with this version, or goes back to it."""
        self.decided, self.digests[version] = version, digests
        for undone in [v for v in self.commits if v > version]:
            del self.commits[undone], self.digests[undone]

    def take(self, commit: Commit) -> None:
        self.commits[commit.version] = commit
        self.decided = commit.version
        self.digests[commit.version] = commit.digests
        self.tails_dropped -= {share.member.rack for share in commit.members}
        self.drop(commit)

    def drop(self, record: Commit | Drop) -> None:
        self.tails_dropped |= {ended.member.rack for ended in record.dropped}

    def restore(self, snapshot: Snapshot, fragment: int) -> None:
        """Take a snapshot in place of the records before it."""
        self.decided = self.restored = snapshot.versions[fragment]
        self.digests[self.decided] = snapshot.digests[fragment]
        self.last = {last.member: last for last in snapshot.last if last.fragment == fragment}
        ended = self.last.values()
        self.tails_dropped = {last.member.rack for last in ended if last.named < last.ended}


@dataclass(frozen=True, slots=True)
class Sent:
    """Totals of this rank's offers."""

    bytes: int = 0
    """Of the payloads; each goes to every other rack."""
    fp32_bytes: int = 0
    """The same offers without a codec."""
    residual: float = 0.0
    """The share (length over length) that the codec left out of the newest offer."""
    moment_bytes: int = 0
    """Of the payloads of moments, which are not in the others."""


@dataclass(frozen=True, slots=True)
class NewestOrders:
    """The newest orders of the coordinator."""

    live: tuple[int, ...] = ()
    """The live racks."""
    why: tuple[str, ...] = ()
    """The reasons why rounds wait."""
    settled: tuple[int, ...] = ()
    """The version of every fragment that all racks hold."""
    opened: Mapping[int, int] = field(default_factory=dict)
    """fragment -> version whose round is open: offers arrive, and its members are not fixed yet."""
    slow: tuple[FailSlow, ...] = ()
    ending: frozenset[int] = frozenset()
    """Racks whose newest offers are the last ones of their fragments: they train no more."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The decided rounds."""

    count: int = 0
    members: tuple[int, ...] = ()
    """Racks merged in the newest one."""
    reason: str = ""
    """Why the newest one was closed."""
    outer: tuple[float, float] = (0.0, 0.0)
    """(rounds that the fragment had merged before, momentum) of the newest round of weights."""


class PublishedSlice:
    """What one feature publishes, under the same lock. Its constructor takes no further argument;
    `PublishedState.of` makes it."""

    def __init__(self, published: PublishedState) -> None:
        self._published = published

    @property
    def changed(self) -> threading.Condition:
        return self._published.changed

    def training_begins(self) -> None:
        """The training thread leaves `begin`. Under the lock."""

    def decided(self, record: Record) -> None:
        """Take a committed record. Loop thread, under the lock."""

    def restored(self, snapshot: Snapshot) -> None:
        """Take a snapshot in place of the records before it. Loop thread, under the lock."""


Slice = TypeVar("Slice", bound=PublishedSlice)


class PublishedState:
    """Shared by the loop (writes) and the training thread (reads, waits). Only its own methods
    change it."""

    def __init__(self, fragments: int) -> None:
        self.changed = threading.Condition()
        self._slices: dict[type[PublishedSlice], Any] = {}
        self._on_anchor: Callable[[int], None] = lambda fragment: None
        self.fragments = [PublishedFragment() for _ in range(fragments)]
        self.failure: MendError | Evicted | None = None
        self.trains = False
        """Whether the training thread has left `begin`; it writes this itself."""
        self.finished = False
        """Whether this rack has no seat any more."""
        self.last_error = ""
        self.looks = 0
        """How often to ask the other ranks of this rack: this one has all bytes, but another may
        lack some that no rack has."""
        self.orders, self.rounds, self.sent = NewestOrders(), Rounds(), Sent()
        """Immutable values: each change replaces the whole value."""
        self.job, self.transfers = JobMembers(), Transfers()
        self.participation, self.last_rounds = Participation(), LastRounds()

    def of(self, kind: type[Slice]) -> Slice:
        """The slice of a feature. The first call makes it; for a slice that takes records, it must
        come before the first record."""
        with self.changed:
            if kind not in self._slices:
                late = self.job.begun and kind.decided is not PublishedSlice.decided
                ensure(not late, "a slice is made after the first record", slice=kind.__name__)
                self._slices[kind] = kind(self)
            found: Slice = self._slices[kind]
            return found

    def on_anchor(self, call: Callable[[int], None]) -> None:
        """Have the loop call this with the fragment of every anchor that it publishes from now
        on."""
        self._on_anchor = call

    # -------------------------------------------------------------- loop

    def publish(self, fragment: int, anchor: Anchor) -> None:
        with self.changed:
            self.fragments[fragment].anchors[anchor.version] = anchor
            self.changed.notify_all()
        self._on_anchor(fragment)

    def forget(self, fragment: int, version: int) -> None:
        with self.changed:
            self.fragments[fragment].anchors.pop(version, None)

    def on_decided(self, record: Record, outer: tuple[float, float] | None = (0.0, 0.0)) -> None:
        """Take a committed record. `outer`: of a commit, see `Rounds`; None: the commit is of
        moments, which have no outer step and count the same tokens as the weights."""
        with self.changed:
            if isinstance(record, Commit):
                self._take(record, outer)
            elif isinstance(record, Genesis):
                self.job.begin(record)
                self._begin(record.first(), record.digests)
            elif isinstance(record, Lineage):
                # It undoes commits whose bytes only dead racks had, so this rack trains on none.
                self.job.take(record)
                self._begin(record.versions, record.digests)
            elif isinstance(record, Roster):
                self.job.take(record)
            elif isinstance(record, Drop):
                self.fragments[record.fragment].drop(record)
            for each in self._slices.values():
                each.decided(record)
            self.changed.notify_all()

    def _begin(self, versions: Sequence[int], digests: Sequence[tuple[str, ...]]) -> None:
        for known, version, of_rails in zip(self.fragments, versions, digests, strict=True):
            known.begin(version, of_rails)

    def _take(self, record: Commit, outer: tuple[float, float] | None) -> None:
        self.fragments[record.fragment].take(record)
        members = tuple(share.member.rack for share in record.members)
        newest = outer or self.rounds.outer
        self.rounds = Rounds(self.rounds.count + 1, members, record.reason, newest)
        # The racks that live now say nothing of rounds before this rack trained.
        live = set(self.orders.live) & set(self.job.seats) if self.trains else set[int]()
        self.participation.add(members, live)
        if outer is not None:
            self.last_rounds.add(record)

    def restore(self, snapshot: Snapshot) -> None:
        """Take a snapshot in place of the records before it."""
        with self.changed:
            self.job.restore(snapshot)
            for fragment, known in enumerate(self.fragments):
                known.restore(snapshot, fragment)
            for each in self._slices.values():
                each.restored(snapshot)
            self.changed.notify_all()

    def rounds_by_racks(self) -> tuple[dict[int, int], tuple[tuple[int, int], ...]]:
        """(racks merged -> number of rounds; of the recent rounds, in order, the numbers of racks
        merged and live)."""
        with self.changed:
            seen = self.participation
            return dict(sorted(seen.by_racks.items())), tuple(seen.recent)

    def heard(self, orders: NewestOrders) -> None:
        """Take the newest orders."""
        with self.changed:
            before, self.orders = self.orders, orders
            if orders.settled != before.settled:
                self.changed.notify_all()

    def moves(self, moving: tuple[Pulled, ...], taken: int, now_ns: int) -> None:
        """Take the progress of the racks' pulls (`moving`), and the bytes that others have pulled
        from this rack (`taken`)."""
        with self.changed:
            self.transfers.take(moving, taken, now_ns)

    def pulled(self, moved: int) -> None:
        """Take the number of bytes that this rank has pulled."""
        with self.changed:
            self.transfers.pulled = moved

    def copied(self, fragment: int, error: str) -> None:
        """Take the end of a pull of a decided version."""
        with self.changed:
            self.fragments[fragment].copy_failed = error

    def offered(self, size: int, fp32_bytes: int, residual: float, *, moments: bool) -> None:
        """Count an own offer."""
        with self.changed:
            sent = self.sent
            if moments:
                self.sent = replace(sent, moment_bytes=sent.moment_bytes + size)
            else:
                sums = sent.bytes + size, sent.fp32_bytes + fp32_bytes
                self.sent = Sent(*sums, residual, sent.moment_bytes)

    def erred(self, error: str) -> None:
        """Take an error that does not stop this rank. Any thread."""
        with self.changed:
            self.last_error = error

    def arrived(self, *, of_all: bool = True) -> dict[int, int]:
        """See `Transfers.arrived`."""
        with self.changed:
            return self.transfers.arrived(of_all=of_all)

    def discard(self, fragment: int, seq: int, bad: str = "") -> None:
        with self.changed:
            known = self.fragments[fragment]
            if seq > max(known.discarded, default=0):
                known.discarded = {seq: bad}
            self.changed.notify_all()

    def fail(self, error: MendError | Evicted) -> None:
        """Publish a failure, which waiting threads raise. The first one stays."""
        with self.changed:
            if not (self.trains and isinstance(error, JobLost)):
                self.failure = self.failure or error
            self.changed.notify_all()

    def look_again(self) -> None:
        """Wake the training thread in `begin`, so that it asks the other ranks of its rack."""
        with self.changed:
            self.looks += 1
            self.changed.notify_all()

    def begin_to_train(self) -> None:
        """The training thread leaves `begin`: clear a JobLost, as all bytes are here."""
        with self.changed:
            self.trains = True
            for each in self._slices.values():
                each.training_begins()
            if isinstance(self.failure, JobLost):
                self.failure = None

    def finish(self, member: Member | None = None, reason: str = "") -> None:
        """This rack has no seat any more; `member`: this life of it. The reason replaces the
        orders: no coordinator sends this rack live racks and reasons to wait from now on."""
        with self.changed:
            self.finished = True
            if member is not None and reason:
                self.job.removed[member] = reason
            why = (self.job.why_out(member),) if member is not None else ()
            before = self.orders
            self.orders = NewestOrders(why=why, settled=before.settled, ending=before.ending)
            self.changed.notify_all()

    def lost_seat(self, member: Member) -> bool:
        """Whether the job goes on without this member, which had a seat."""
        return self.finished and not self.job.over and member in self.job.removed

    # -------------------------------------------------------------- training thread

    def applied(self, fragment: int, version: int) -> None:
        """A version was applied: drop the commits up to it, which have been read, and the digests
        of older versions."""
        with self.changed:
            known = self.fragments[fragment]
            for old in [v for v in known.commits if v <= version]:
                del known.commits[old]
            for old in [v for v in known.digests if v < version]:
                del known.digests[old]

    def digest(self, fragment: int, version: int) -> tuple[str, ...]:
        """Digests of all rails; empty before the version is decided."""
        with self.changed:
            return self.fragments[fragment].digests.get(version, ())

    def disown(self) -> None:
        """Renew the lock in a forked process: a thread that held it does not exist here."""
        self.changed = threading.Condition()

    def look(self) -> PublishedState:
        """A shallow copy: the immutable values in it are all of one moment. Any thread."""
        with self.changed:
            return copy(self)

    @property
    def error(self) -> str:
        """The failure, or else the last error that did not stop this rank; empty: none."""
        return str(self.failure or "") or self.last_error

    def wait(self, ready: Callable[[], bool], limit_s: float) -> bool:
        """Block until `ready()`, a failure or the limit; returns whether it is ready."""
        with self.changed:
            self.changed.wait_for(lambda: self.failure is not None or ready(), limit_s)
            return ready()


def fate_in(commit: Commit, mine: tuple[Member, int]) -> OfferFate:
    """What this commit says of the offer `mine`, (member, seq)."""
    if any((share.member, share.seq) == mine for share in commit.members):
        return "named"
    return "dropped" if any((ended.member, ended.seq) == mine for ended in commit.dropped) else ""
