"""The state that the loop publishes to the training thread, under one lock.

Values cross the threads, objects with state do not. The loop writes anchors, decided commits and
discarded offers; the training thread reads them at apply points. In the other direction the
training thread posts events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from mend.consensus.records import (
    Commit,
    Drop,
    Genesis,
    Last,
    Lineage,
    Record,
    Roster,
    Snapshot,
)
from mend.coordination.messages import FailSlow, Pulled
from mend.engine.compute.anchor import Anchor
from mend.engine.state.participation import LastRounds, Participation
from mend.engine.state.pulls import Transfers
from mend.errors import Evicted, JobLost, MendError, ensure
from mend.types import WITNESS, Member

OWN, TAKEN = -1, -2
"""Keys of `arrived`: what this rank has pulled, and what others have of its rack."""


OfferFate = Literal["", "named", "dropped"]
"""Of an offer in the commits; empty: it is still open."""


@dataclass
class PublishedFragment:
    """One fragment: the versions that are here, decided commits, discarded own offers."""

    anchors: dict[int, Anchor] = field(default_factory=dict)
    commits: dict[int, Commit] = field(default_factory=dict)
    discarded: dict[int, str] = field(default_factory=dict)
    """seq -> why the offer was not fit to be merged, or empty."""
    digests: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """version -> digests of all rails, as decided; none older than the applied one."""
    decided: int = 0
    restored: int = -1
    """The version of the newest snapshot; commits up to it may be missing. -1: no snapshot."""
    last: dict[Member, Last] = field(default_factory=dict)
    """What that snapshot says of the newest offers of each member."""

    def fate(self, mine: tuple[Member, int], base: int, version: int) -> OfferFate:
        """The fate of an offer in the versions (base, version]: "named", "dropped" or ""."""
        member, seq = mine
        known = self.last.get(member)
        if base < self.restored <= version and known is not None and seq <= known.ended:
            return "named" if seq == known.named else "dropped"
        stretch = [self.commits[v] for v in range(max(base, self._whole(version)) + 1, version + 1)]
        return next((fate for commit in stretch if (fate := fate_in(commit, mine))), "")

    def _whole(self, version: int) -> int:
        """The version after which no commit up to `version` is missing."""
        return self.restored if version >= self.restored else -1


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

    def plus(self, size: int, fp32_bytes: int, residual: float) -> Sent:
        sums = self.bytes + size, self.fp32_bytes + fp32_bytes
        return Sent(*sums, residual, self.moment_bytes)

    def plus_moments(self, size: int) -> Sent:
        return replace(self, moment_bytes=self.moment_bytes + size)


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds that are decided."""

    count: int = 0
    members: tuple[int, ...] = ()
    """Racks merged in the newest one."""
    reason: str = ""
    """Why the newest one was closed."""
    outer: tuple[float, float] = (0.0, 0.0)
    """Of the newest one of weights: the rounds that its fragment had merged before, its
    momentum."""


class PublishedSlice:
    """What one feature publishes, under the same lock. Its constructor takes no further argument;
    `PublishedState.of` makes it."""

    def __init__(self, published: PublishedState) -> None:
        self._published = published

    @property
    def changed(self) -> threading.Condition:
        return self._published.changed

    def decided(self, record: Record) -> None:
        """Take a committed record. Loop thread, under the lock."""

    def restored(self, snapshot: Snapshot) -> None:
        """Take a snapshot in place of the records before it. Loop thread, under the lock."""


Slice = TypeVar("Slice", bound=PublishedSlice)


class PublishedState:
    """Shared by the loop (writes) and the training thread (reads, waits)."""

    pulled = taken = 0
    """Bytes that this rank has pulled and verified; bytes of its rack's that others have."""

    missing: tuple[int, ...] = ()
    """Racks that were not heard when the job ended."""

    begun = over = False
    """Whether the log says that the job has begun, and that it has ended."""

    looks_again = False
    """Whether another rank of this rack may lack bytes that no rack has; this one has all."""

    def __init__(self, fragments: int) -> None:
        self.changed = threading.Condition()
        self._slices: dict[type[PublishedSlice], Any] = {}
        self._on_anchor: Callable[[int], None] = lambda fragment: None
        self.panels = [PublishedFragment() for _ in range(fragments)]
        self.failure: MendError | Evicted | None = None
        self.trains = False
        """Whether the training thread is out of `begin`; written by it."""
        self.finished = False
        self.last_error = ""
        self.rounds, self.sent = Rounds(), Sent()
        """Replaced as a whole."""
        self.turnout, self.last_rounds = Participation(), LastRounds()
        self.live: tuple[int, ...] = ()
        self.why: tuple[str, ...] = ()
        self.slow: tuple[FailSlow, ...] = ()
        self.settled: tuple[int, ...] = ()
        self.opened: Mapping[int, int] = {}
        """fragment -> version whose round is open: offers arrive, members are not fixed."""
        self.seats: tuple[int, ...] = ()
        self.founders: frozenset[Member] = frozenset()
        """The members that began the job."""
        self.first: tuple[int, ...] = ()
        """The version of every fragment that they began with."""
        self.members: frozenset[Member] = frozenset()
        self.removed: dict[Member, str] = {}
        """Members that lost their seats or left -> why; empty: a snapshot does not say."""
        self.tails_dropped: set[tuple[int, int]] = set()
        """(rack, fragment) whose newest offer that ended was dropped."""
        self.copies_failed: dict[int, str] = {}
        """Fragment -> error of the newest pull of a decided version; empty: it succeeded."""
        self.transfers = Transfers()

    def of(self, kind: type[Slice]) -> Slice:
        """The slice of a feature. The first call makes it; if it takes records, before the first
        record."""
        with self.changed:
            if kind not in self._slices:
                late = self.begun and kind.decided is not PublishedSlice.decided
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
            self.panels[fragment].anchors[anchor.version] = anchor
            self.changed.notify_all()
        self._on_anchor(fragment)

    def forget(self, fragment: int, version: int) -> None:
        with self.changed:
            self.panels[fragment].anchors.pop(version, None)

    def on_decided(self, record: Record, outer: tuple[float, float] | None = (0.0, 0.0)) -> None:
        """Take a committed record. `outer`: of a commit, see `Rounds`; None: the commit is of
        moments, which have no outer step and count the same tokens as the weights."""
        with self.changed:
            if isinstance(record, Commit):
                self._take(record, outer)
            elif isinstance(record, Genesis):
                self.begun, self.first = True, record.first()
                firsts = zip(self.panels, record.first(), record.digests, strict=True)
                for panel, version, digests in firsts:
                    panel.decided, panel.digests[version] = version, digests
                self.founders = frozenset(seat.member for seat in record.roster)
                self._seat(self.founders)
            elif isinstance(record, Lineage):
                self._begin_anew(record)
            elif isinstance(record, Roster):
                members = frozenset(seat.member for seat in record.members)
                self._seat(members, record.reason)
                self._end(members, record.non_voters)
            elif isinstance(record, Drop):
                self._drop(record)
            for each in self._slices.values():
                each.decided(record)
            self.changed.notify_all()

    def _take(self, record: Commit, outer: tuple[float, float] | None) -> None:
        panel = self.panels[record.fragment]
        panel.commits[record.version] = record
        panel.decided = record.version
        panel.digests[record.version] = record.digests
        self.tails_dropped -= {(share.member.rack, record.fragment) for share in record.members}
        self._drop(record)
        members = tuple(share.member.rack for share in record.members)
        newest = outer or self.rounds.outer
        self.rounds = Rounds(self.rounds.count + 1, members, record.reason, newest)
        # The racks that live now say nothing of rounds before this rack trained.
        live = set(self.live) & set(self.seats) if self.trains else set[int]()
        self.turnout.add(members, live)
        if outer is not None:
            self.last_rounds.add(record)

    def restore(self, snapshot: Snapshot) -> None:
        """Take a snapshot in place of the records before it."""
        with self.changed:
            self.begun = True
            members = frozenset(seat.member for seat in snapshot.members)
            self._seat(members)
            self._end(members, snapshot.non_voters)
            self.tails_dropped = {
                (last.member.rack, last.fragment)
                for last in snapshot.last
                if last.named < last.ended
            }
            for p, panel in enumerate(self.panels):
                panel.decided = panel.restored = snapshot.versions[p]
                panel.digests[panel.decided] = snapshot.digests[p]
                panel.last = {last.member: last for last in snapshot.last if last.fragment == p}
            for each in self._slices.values():
                each.restored(snapshot)
            self.changed.notify_all()

    def _drop(self, record: Commit | Drop) -> None:
        racks = {(ended.member.rack, record.fragment) for ended in record.dropped}
        self.tails_dropped |= racks

    def _end(self, members: frozenset[Member], missing: tuple[int, ...]) -> None:
        """After a roster of these members, of which an empty one ends the job without `missing`."""
        self.over = not members
        self.missing = () if members else tuple(rack for rack in missing if rack != WITNESS)

    def _seat(self, members: frozenset[Member], why: str = "") -> None:
        self.removed |= dict.fromkeys(self.members - members, why)
        self.members, self.seats = members, tuple(sorted(member.rack for member in members))

    def _begin_anew(self, record: Lineage) -> None:
        """Undo the commits whose bytes only dead racks had; this rack does not train on them."""
        self._seat(frozenset(seat.member for seat in record.members), record.reason)
        for panel, version, digests in zip(
            self.panels, record.versions, record.digests, strict=True
        ):
            panel.decided, panel.digests[version] = version, digests
            for undone in [v for v in panel.commits if v > version]:
                del panel.commits[undone], panel.digests[undone]

    def turned_out(self) -> tuple[dict[int, int], tuple[tuple[int, int], ...]]:
        """Number of rounds by the number of racks merged; and for the recent rounds, in order, the
        number of racks merged and live."""
        with self.changed:
            return dict(sorted(self.turnout.by_racks.items())), tuple(self.turnout.recent)

    def heard(
        self,
        live: tuple[int, ...],
        why: tuple[str, ...],
        settled: tuple[int, ...],
        opened: Mapping[int, int] | None = None,
        slow: tuple[FailSlow, ...] = (),
    ) -> None:
        """Take the newest orders: the live racks, why rounds wait, the versions that all racks
        hold, the open rounds, the slow racks."""
        with self.changed:
            self.live, self.why, self.opened, self.slow = live, why, opened or {}, slow
            if settled != self.settled:
                self.settled = settled
                self.changed.notify_all()

    def moves(self, moving: tuple[Pulled, ...], taken: int, now_ns: int) -> None:
        """Take how far the racks are with what they pull."""
        with self.changed:
            self.transfers.take(moving, now_ns)
            self.taken = taken

    def arrived(self, *, of_all: bool = True) -> dict[int, int]:
        """Verified bytes so far of what this rack waits for, by rack; its own under OWN and TAKEN.
        `of_all`: also what other racks pull. Waits end when none of these numbers grows."""
        with self.changed:
            others = {p.rack: p.moved for p in self.transfers.moving} if of_all else {}
            return {OWN: self.pulled, TAKEN: self.taken, **others}

    def discard(self, fragment: int, seq: int, bad: str = "") -> None:
        with self.changed:
            self.panels[fragment].discarded.setdefault(seq, bad)
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
            self.looks_again = True
            self.changed.notify_all()

    def begin_to_train(self) -> None:
        """The training thread leaves `begin`: clear a JobLost, as all bytes are here."""
        with self.changed:
            self.trains = True
            if isinstance(self.failure, JobLost):
                self.failure = None

    def finish(self, member: Member | None = None) -> None:
        """`member`, this rack, has no seat any more. That takes the place of the live racks and of
        the reasons why rounds wait, which no coordinator sends it from now on."""
        with self.changed:
            self.finished = True
            self.live, self.slow, self.opened = (), (), {}
            self.why = (self.why_out(member),) if member is not None else ()
            self.changed.notify_all()

    def lost_seat(self, member: Member) -> bool:
        """Whether the job goes on without this member, which had a seat."""
        return self.finished and not self.over and member in self.removed

    def why_out(self, member: Member) -> str:
        """Why a member that had a seat has none, in words."""
        if self.over:
            return "the job is over: every rack that was heard has left"
        why = self.removed.get(member) or "the other racks went on while it was silent"
        return f"rack {member.rack} has lost its seat: {why}"

    # -------------------------------------------------------------- training thread

    def applied(self, fragment: int, version: int) -> None:
        """Drop commits up to this version, which are read, and older digests."""
        with self.changed:
            panel = self.panels[fragment]
            for old in [v for v in panel.commits if v <= version]:
                del panel.commits[old]
            for old in [v for v in panel.digests if v < version]:
                del panel.digests[old]

    def digest(self, fragment: int, version: int) -> tuple[str, ...]:
        """Digests of all rails; empty before the version is decided."""
        with self.changed:
            return self.panels[fragment].digests.get(version, ())

    def disown(self) -> None:
        """Renew the lock in a forked process: a thread that held it does not exist here."""
        self.changed = threading.Condition()

    def look(self) -> PublishedState:
        """A copy whose plain values are all of one moment. Any thread."""
        with self.changed:
            return copy(self)

    @property
    def error(self) -> str:
        """The failure, or else the last error that did not stop this rank; empty: none."""
        return str(self.failure or "") or self.last_error

    def wait(self, ready: Callable[[], bool], limit_s: float) -> bool:
        """Block until `ready()` or a failure or the limit; returns whether ready."""
        with self.changed:
            return (
                self.changed.wait_for(lambda: self.failure is not None or ready(), limit_s)
                and ready()
            )


def fate_in(commit: Commit, mine: tuple[Member, int]) -> OfferFate:
    if any((share.member, share.seq) == mine for share in commit.members):
        return "named"
    return "dropped" if any((ended.member, ended.seq) == mine for ended in commit.dropped) else ""
