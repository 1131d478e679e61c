"""The state that the loop publishes to the training thread, under one lock.

Values cross the threads, objects with state do not. The loop writes anchors, decided commits and
discarded offers; the training thread reads them at apply points. In the other direction the
training thread posts events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from mend.consensus.log import mitigations_after
from mend.consensus.records import (
    CheckpointRecord,
    Commit,
    Drop,
    Genesis,
    Last,
    Lineage,
    Mitigation,
    Record,
    Roster,
    Snapshot,
    Units,
)
from mend.coordination.events import Validate
from mend.coordination.messages import FailSlow, Pulled
from mend.engine.compute.numerics import Anchor
from mend.engine.joining.training_state import Mirror, Mirrored, Received
from mend.engine.state.participation import LastRounds, Participation
from mend.engine.state.pulls import Transfers
from mend.errors import Evicted, JobLost, MendError
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

    def plus(self, size: int, fp32_bytes: int, residual: float) -> Sent:
        return Sent(self.bytes + size, self.fp32_bytes + fp32_bytes, residual)


class PublishedState:
    """Shared by the loop (writes) and the training thread (reads, waits)."""

    room_B: Tensor | None = None
    """Memory for a copy of the training state, with every page touched."""

    pulled = taken = 0
    """Bytes that this rank has pulled and verified; bytes of its rack's that others have."""

    missing: tuple[int, ...] = ()
    """Racks that were not heard when the job ended."""

    begun = over = False
    """Whether the log says that the job has begun, and that it has ended."""

    moment_bytes = 0
    """Of the payloads of moments so far."""

    mirror_bytes = 0
    """Size of the mirrors kept for another rack; written by the loop alone."""

    asks: Validate | None = None
    """The micro-benchmark that the coordinator asks for; the training thread takes it."""

    units: Units | None = None
    """Units of data, if the job gives them out; replaced as a whole."""

    marked_units: Units | None = None
    """As they were at the newest checkpoint."""

    on_anchor: Callable[[int], None] = staticmethod(lambda fragment: None)
    """Called by the loop with the fragment of every anchor that it has published. Set by the
    training thread before the loop publishes."""

    looks_again = False
    """Whether another rank of this rack may lack bytes that no rack has; this one has all."""

    def __init__(self, fragments: int) -> None:
        self.changed = threading.Condition()
        self.panels = [PublishedFragment() for _ in range(fragments)]
        self.failure: MendError | Evicted | None = None
        self.trains = False
        """Whether the training thread is out of `begin`; written by it."""
        self.finished = False
        self.last_error = ""
        self.commits = 0
        self.members_last: tuple[int, ...] = ()
        self.reason_last = ""
        self.sent = Sent()
        """Of weights."""
        self.outer_last = (0.0, 0.0)
        """Of the newest round: the rounds that its fragment had merged before, its momentum."""
        self.turnout, self.last_rounds = Participation(), LastRounds()
        self.tokens_merged = 0
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
        self.mark: tuple[CheckpointRecord, tuple[int, ...]] | None = None
        """The newest checkpoint, and the decided version of every fragment before it."""
        self.written: CheckpointRecord | None = None
        """The newest checkpoint that all its racks have written."""
        self.mitigations: Mapping[int, Mitigation] = {}
        """By slow rack."""
        self.members: frozenset[Member] = frozenset()
        self.removed: dict[Member, str] = {}
        """Members that lost their seats or left -> why; empty: a snapshot does not say."""
        self.tails_dropped: set[tuple[int, int]] = set()
        """(rack, fragment) whose newest offer that ended was dropped."""
        self.copies_failed: dict[int, str] = {}
        """Fragment -> error of the newest pull of a decided version; empty: it succeeded."""
        self.asked: tuple[Member, ...] = ()
        """Joining racks that wait for a copy of this rack's training state."""
        self.given: set[Member] = set()
        """Those whose copy was made or refused; the loop removes a rack when it frees the copy."""
        self.copied: Received | str | None = None
        """A donor's copy for this rack, or the reason why there is none."""
        self.pulling = False
        """Whether the copy is being transferred."""
        self.mirrors: tuple[Mirror, ...] = ()
        """Mirrors of this rack that other racks have listed so far."""
        self.unheard: tuple[int, ...] = ()
        """Racks that were asked for mirrors and have not answered, or cannot."""
        self.sought = False
        """Whether all answers have arrived."""
        self.wanted: Mirror | None = None
        """The mirror that this rank fetches."""
        self.mirrored: Mirrored | str | None = None
        """The wanted mirror with its bytes, or the reason why there is none."""
        self.transfers = Transfers()

    # -------------------------------------------------------------- loop

    def publish(self, fragment: int, anchor: Anchor) -> None:
        with self.changed:
            self.panels[fragment].anchors[anchor.version] = anchor
            self.changed.notify_all()
        self.on_anchor(fragment)

    def forget(self, fragment: int, version: int) -> None:
        with self.changed:
            self.panels[fragment].anchors.pop(version, None)

    def on_decided(self, record: Record, outer: tuple[float, float] | None = (0.0, 0.0)) -> None:
        """Take a committed record. `outer`: of a commit, see `outer_last`; None: the commit is of
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
            elif isinstance(record, Mitigation):
                self.mitigations = mitigations_after(self.mitigations, record)
            elif isinstance(record, CheckpointRecord) and record.written:
                self.written = record
            elif isinstance(record, CheckpointRecord):
                self.mark = record, tuple(panel.decided for panel in self.panels)
                self.marked_units = self.units
            self.changed.notify_all()

    def _take(self, record: Commit, outer: tuple[float, float] | None) -> None:
        panel = self.panels[record.fragment]
        panel.commits[record.version] = record
        panel.decided = record.version
        panel.digests[record.version] = record.digests
        self.tails_dropped -= {(share.member.rack, record.fragment) for share in record.members}
        self._drop(record)
        self.commits += 1
        self.members_last = tuple(share.member.rack for share in record.members)
        self.reason_last = record.reason
        # The racks that live now say nothing of rounds before this rack trained.
        live = set(self.live) & set(self.seats) if self.trains else set[int]()
        self.turnout.add(self.members_last, live)
        if outer is not None:
            self.outer_last = outer
            self.last_rounds.add(record)
            self.tokens_merged += sum(share.tokens for share in record.members)

    def count_units(self, units: Units) -> None:
        """Publish the units of data after the newest record."""
        with self.changed:
            self.units = units
            self.changed.notify_all()

    def receive(self, found: Received | str) -> None:
        """Publish a donor's training state, or the reason why there is none."""
        with self.changed:
            self.copied, self.pulling = found, False
            self.changed.notify_all()

    def find(
        self, mirrors: tuple[Mirror, ...], unheard: tuple[int, ...] = (), *, complete: bool = True
    ) -> None:
        """Publish the answers so far of the racks that were asked for mirrors of this one."""
        with self.changed:
            self.mirrors, self.unheard, self.sought = mirrors, unheard, complete
            self.changed.notify_all()

    def take_back(self, mirror: Mirror, found: Mirrored | str) -> None:
        """Publish a mirror's bytes, or the reason why there are none. A mirror that is not wanted
        any more is dropped: the ranks of this rack have agreed on another."""
        with self.changed:
            if mirror == self.wanted:
                self.mirrored = found
                self.changed.notify_all()

    def ask(self, racks: tuple[Member, ...]) -> None:
        """Publish the joining racks that wait for a copy of this rank's training state."""
        with self.changed:
            self.asked = racks

    def validate(self, asked: Validate) -> None:
        self.asks = asked

    def make_room(self, room_B: Tensor) -> None:
        """Publish memory for a copy of the training state."""
        with self.changed:
            self.room_B = room_B

    def free(self, to: Member) -> None:
        """Forget the copy for this rack; it is made again if the rack asks again."""
        with self.changed:
            self.given.discard(to)

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
            self.mitigations = {one.rack: one for one in snapshot.mitigations}
            for p, panel in enumerate(self.panels):
                panel.decided = panel.restored = snapshot.versions[p]
                panel.digests[panel.decided] = snapshot.digests[p]
                panel.last = {last.member: last for last in snapshot.last if last.fragment == p}
            if snapshot.checkpoint is not None:
                self._restore_mark(snapshot.checkpoint, snapshot.checkpoint_versions)
                self.marked_units = snapshot.checkpoint_units
            self.changed.notify_all()

    def _restore_mark(self, mark: CheckpointRecord, versions: tuple[int, ...]) -> None:
        """Take the newest checkpoint. The record of its begin may be known already."""
        if self.mark is None or self.mark[0].number != mark.number:
            self.mark = mark, versions
        if mark.written:
            self.written = mark

    def _drop(self, record: Commit | Drop) -> None:
        racks = {(ended.member.rack, record.fragment) for ended in record.dropped}
        self.tails_dropped |= racks

    def _end(self, members: frozenset[Member], missing: tuple[int, ...]) -> None:
        """After a roster of these members, of which an empty one ends the job without `missing`."""
        self.over = not members
        self.missing = () if members else tuple(rack for rack in missing if rack != WITNESS)

    def _seat(self, members: frozenset[Member], why: str = "") -> None:
        self.removed |= dict.fromkeys(self.members - members, why)
        stay = {member.rack for member in members & self.members}
        self.mitigations = {r: one for r, one in self.mitigations.items() if r in stay}
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

    def want(self, mirror: Mirror) -> None:
        """Want this mirror from now on, and no other; call it before the fetch."""
        with self.changed:
            self.wanted, self.mirrored = mirror, None

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
