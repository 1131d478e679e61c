"""The state that the loop publishes to the training thread, behind one lock.

One lock; values cross, objects with state do not. The loop writes anchors, decided commits and
discarded offers; the training thread reads them at apply points. The other way goes through
`HostInterface`-posted events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field

from torch import Tensor

from mend.consensus.log import mitigations_after
from mend.consensus.records import (
    Commit,
    Genesis,
    Last,
    Lineage,
    Mark,
    Mitigation,
    Record,
    Roster,
    Snapshot,
)
from mend.coordination.messages import FailSlow
from mend.engine.numerics import Anchor
from mend.engine.training_state import Mirror, Mirrored, Received
from mend.engine.turnout import Turnout
from mend.errors import JobLost, MendError
from mend.types import Member


@dataclass
class PublishedFragment:
    """One fragment: versions that are here, decided commits, own offers that died in the rack."""

    anchors: dict[int, Anchor] = field(default_factory=dict)
    commits: dict[int, Commit] = field(default_factory=dict)
    discarded: dict[int, str] = field(default_factory=dict)
    """seq -> why it was not fit to be merged, or empty."""
    digests: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """version -> digests of all rails, as decided; none older than the applied one."""
    decided: int = 0
    restored: int = -1
    """Up to this version commits may be missing: a snapshot came in their place."""
    last: dict[Member, Last] = field(default_factory=dict)
    """What it says of the newest offers of each member."""

    def fate(self, mine: tuple[Member, int], base: int, version: int) -> str:
        """What became of an offer in the versions (base, version]: "named", "dropped" or ""."""
        member, seq = mine
        known = self.last.get(member)
        if base < self.restored <= version and known is not None and seq <= known.ended:
            return "named" if seq == known.named else "dropped"
        stretch = [self.commits[v] for v in range(max(base, self._whole(version)) + 1, version + 1)]
        return next((fate for commit in stretch if (fate := fate_in(commit, mine))), "")

    def _whole(self, version: int) -> int:
        """From behind here on no commit up to `version` is missing."""
        return self.restored if version >= self.restored else -1


@dataclass(frozen=True, slots=True)
class Sent:
    """What this rank's offers come to so far."""

    bytes: int = 0
    """Of their payloads; each goes to every other rack."""
    fp32_bytes: int = 0
    """That they would have been without a codec."""
    residual: float = 0.0
    """Of the newest: the share (length over length) that the codec left for a later round."""

    def plus(self, size: int, fp32_bytes: int, residual: float) -> Sent:
        return Sent(self.bytes + size, self.fp32_bytes + fp32_bytes, residual)


class PublishedState:
    """Shared by the loop (writes) and the training thread (reads, waits)."""

    room_B: Tensor | None = None
    """Memory for a copy of the training state, every page of it touched."""

    def __init__(self, fragments: int) -> None:
        self.changed = threading.Condition()
        self.panels = [PublishedFragment() for _ in range(fragments)]
        self.failure: MendError | None = None
        self.begun = False
        self.trains = False
        """Whether the training thread is out of `begin`; written by it."""
        self.finished = False
        self.last_error = ""
        self.commits = 0
        self.members_last: tuple[int, ...] = ()
        self.reason_last = ""
        self.sent = Sent()
        """Of weights."""
        self.moment_bytes = 0
        """Of the payloads of moments so far."""
        self.outer_last = (0.0, 0.0)
        """Of the newest round: how many its fragment had merged before, its momentum."""
        self.turnout = Turnout()
        self.tokens_merged = 0
        self.live: tuple[int, ...] = ()
        self.why: tuple[str, ...] = ()
        self.slow: tuple[FailSlow, ...] = ()
        self.settled: tuple[int, ...] = ()
        self.opened: Mapping[int, int] = {}
        """fragment -> version of which a round is open: offers arrive, members are not fixed."""
        self.seats: tuple[int, ...] = ()
        self.founders: frozenset[Member] = frozenset()
        """Who began together."""
        self.first: tuple[int, ...] = ()
        """On which version of every fragment they did."""
        self.mark: tuple[Mark, tuple[int, ...]] | None = None
        """The newest checkpoint, and what was decided of every fragment before it."""
        self.written: Mark | None = None
        """The newest that all its racks have written."""
        self.mitigations: Mapping[int, Mitigation] = {}
        """By slow rack: what is done about it."""
        self.members: frozenset[Member] = frozenset()
        self.asked: tuple[Member, ...] = ()
        """Racks that join and wait for a copy of this rack's training state."""
        self.given: set[Member] = set()
        """For which of them it was copied, or refused; the loop takes them out when it frees it."""
        self.copied: Received | str | None = None
        """What a donor has copied for this rack, or why there is nothing."""
        self.pulling = False
        """Whether it is on its way."""
        self.mirrors: tuple[Mirror, ...] = ()
        """What other racks keep of this one, of those that have answered so far."""
        self.unheard: tuple[int, ...] = ()
        """Racks that were asked for that and have not answered, or cannot."""
        self.sought = False
        """Whether no answer is awaited any more."""
        self.wanted: Mirror | None = None
        """The one of them that this rank gets back."""
        self.mirrored: Mirrored | str | None = None
        """The wanted one with its bytes, or why it is not there."""
        self.mirror_bytes = 0
        """Kept here of another rack; written by the loop alone."""
        self.fresh = False
        """Something was published since the training thread last looked; read without the lock."""

    # -------------------------------------------------------------- loop

    def publish(self, fragment: int, anchor: Anchor) -> None:
        with self.changed:
            self.panels[fragment].anchors[anchor.version] = anchor
            self.fresh = True
            self.changed.notify_all()

    def forget(self, fragment: int, version: int) -> None:
        with self.changed:
            self.panels[fragment].anchors.pop(version, None)

    def told(self, record: Record, outer: tuple[float, float] | None = (0.0, 0.0)) -> None:
        """`outer`: of a commit, see `outer_last`; None: it is of moments, which have no outer
        step, and whose tokens are those of the weights."""
        with self.changed:
            if isinstance(record, Commit):
                panel = self.panels[record.fragment]
                panel.commits[record.version] = record
                panel.decided = record.version
                panel.digests[record.version] = record.digests
                self.commits += 1
                self.members_last = tuple(share.member.rack for share in record.members)
                self.reason_last = record.reason
                # Who lives now says nothing of rounds that closed before this rack was there.
                live = set(self.live) & set(self.seats) if self.trains else set[int]()
                self.turnout.add(self.members_last, live)
                if outer is not None:
                    self.outer_last = outer
                    self.tokens_merged += sum(share.tokens for share in record.members)
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
                self._seat(frozenset(seat.member for seat in record.members))
            elif isinstance(record, Mitigation):
                self.mitigations = mitigations_after(self.mitigations, record)
            elif isinstance(record, Mark) and record.written:
                self.written = record
            elif isinstance(record, Mark):
                self.mark = record, tuple(panel.decided for panel in self.panels)
            self.changed.notify_all()

    def receive(self, found: Received | str) -> None:
        """A donor's training state is here, or will not come, for this reason."""
        with self.changed:
            self.copied, self.pulling = found, False
            self.changed.notify_all()

    def find(
        self, mirrors: tuple[Mirror, ...], unheard: tuple[int, ...] = (), *, complete: bool = True
    ) -> None:
        """What the racks that were asked for mirrors of this one have answered so far."""
        with self.changed:
            self.mirrors, self.unheard, self.sought = mirrors, unheard, complete
            self.changed.notify_all()

    def take_back(self, mirror: Mirror, found: Mirrored | str) -> None:
        """This mirror is here, or will not come, for this reason. One that is not wanted any more
        is dropped: the ranks of this rack have agreed on another."""
        with self.changed:
            if mirror == self.wanted:
                self.mirrored = found
                self.changed.notify_all()

    def ask(self, racks: tuple[Member, ...]) -> None:
        """These racks join, and wait for a copy of this rank's training state."""
        with self.changed:
            self.asked = racks

    def make_room(self, room_B: Tensor) -> None:
        """Memory for a copy of the training state is ready."""
        with self.changed:
            self.room_B = room_B

    def free(self, to: Member) -> None:
        """The copy for this rack is gone; should it be asked for again, it is made again."""
        with self.changed:
            self.given.discard(to)

    def restore(self, snapshot: Snapshot) -> None:
        """Everything up to some record is decided; the records will not be told."""
        with self.changed:
            self.begun = True
            self._seat(frozenset(seat.member for seat in snapshot.members))
            self.mitigations = {one.rack: one for one in snapshot.mitigations}
            for p, panel in enumerate(self.panels):
                panel.decided = panel.restored = snapshot.versions[p]
                panel.digests[panel.decided] = snapshot.digests[p]
                panel.last = {last.member: last for last in snapshot.last if last.fragment == p}
            if snapshot.mark is not None:
                self._restore_mark(snapshot.mark, snapshot.mark_versions)
            self.changed.notify_all()

    def _restore_mark(self, mark: Mark, versions: tuple[int, ...]) -> None:
        """The newest checkpoint. Of one that all have written the first record may be known."""
        if self.mark is None or self.mark[0].number != mark.number:
            self.mark = mark, versions
        if mark.written:
            self.written = mark

    def _seat(self, members: frozenset[Member]) -> None:
        stay = {member.rack for member in members & self.members}
        self.mitigations = {r: one for r, one in self.mitigations.items() if r in stay}
        self.members, self.seats = members, tuple(sorted(member.rack for member in members))

    def _begin_anew(self, record: Lineage) -> None:
        """Commits whose bytes only dead racks had are undone; nobody here trains on them."""
        self._seat(frozenset(seat.member for seat in record.members))
        for panel, version, digests in zip(
            self.panels, record.versions, record.digests, strict=True
        ):
            panel.decided, panel.digests[version] = version, digests
            for undone in [v for v in panel.commits if v > version]:
                del panel.commits[undone], panel.digests[undone]

    def turned_out(self) -> tuple[dict[int, int], tuple[tuple[int, int], ...]]:
        """Rounds by the number of racks that they merged; and of the recent ones, in order, how
        many they merged and how many lived."""
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
        """What the coordinator said last: who is live, why rounds wait, what all of them hold,
        which rounds are open, who is slow."""
        with self.changed:
            self.live, self.why, self.opened, self.slow = live, why, opened or {}, slow
            if settled != self.settled:
                self.settled = settled
                self.changed.notify_all()

    def discard(self, fragment: int, seq: int, bad: str = "") -> None:
        with self.changed:
            self.panels[fragment].discarded.setdefault(seq, bad)
            self.changed.notify_all()

    def fail(self, error: MendError) -> None:
        """The first failure stays; whoever waits raises it."""
        with self.changed:
            if not (self.trains and isinstance(error, JobLost)):
                self.failure = self.failure or error
            self.changed.notify_all()

    def begin_to_train(self) -> None:
        """All bytes are here: that the job was lost without them is out of date."""
        with self.changed:
            self.trains = True
            if isinstance(self.failure, JobLost):
                self.failure = None

    def finish(self) -> None:
        with self.changed:
            self.finished = True
            self.changed.notify_all()

    # -------------------------------------------------------------- training thread

    def want(self, mirror: Mirror) -> None:
        """Before it is fetched: from now on no other one is taken back."""
        with self.changed:
            self.wanted, self.mirrored = mirror, None

    def applied(self, fragment: int, version: int) -> None:
        """Commits up to here are read, older digests are not asked for any more."""
        with self.changed:
            panel = self.panels[fragment]
            for old in [v for v in panel.commits if v <= version]:
                del panel.commits[old]
            for old in [v for v in panel.digests if v < version]:
                del panel.digests[old]

    def digest(self, fragment: int, version: int) -> tuple[str, ...]:
        """Of all rails; empty before it is decided."""
        with self.changed:
            return self.panels[fragment].digests.get(version, ())

    def disown(self) -> None:
        """In a process that was forked: a thread that held the lock then is not here."""
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


def fate_in(commit: Commit, mine: tuple[Member, int]) -> str:
    if any((share.member, share.seq) == mine for share in commit.members):
        return "named"
    return "dropped" if any((ended.member, ended.seq) == mine for ended in commit.dropped) else ""
