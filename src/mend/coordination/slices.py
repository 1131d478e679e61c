"""A sharded attempt on one rank: which slices it pulls, merges and serves.

Each member owns SLICES_EACH adjacent slices of every member's payload, in member order. Slice by
slice its rack pulls them from the others' payloads, merges and serves them. Once the coordinator
announces that an owner has done so on all ranks, every rack pulls the merged slice: after the
payloads of most members, along with those of the last. A rank that has all merged slices takes the
outer step and digests the result, as without sharding. So a rack receives 2 (R - 1) / R payloads
instead of R - 1.

A failed pull is retried until the attempt is over. A result that cannot be made from the slices is
reported as failed, and the coordinator continues without sharding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from mend.consensus.log import LogState
from mend.coordination.events import (
    FetchSlice,
    FreeSlices,
    MergeSlice,
    Note,
    SliceFetched,
    SliceMerged,
)
from mend.coordination.fetch_queue import RETRY_NS_MAX, RETRY_NS_MIN
from mend.coordination.messages import SLICES_EACH, MergeProposal, Sliced
from mend.errors import require
from mend.events.kinds import FetchFailed, MergeFailed
from mend.types import SECOND, Member, Peer

KEPT_NS = 30 * SECOND
"""Merged slices are kept at most this long after the decision, for racks that lack the result."""

Attempt = tuple[int, int]
"""(version, attempt)"""


class Stage(Enum):
    """PULLING: pulling slices of the members' payloads. MERGING: a worker merges an own slice.
    MERGED: all own slices are served, or this rack has none. FAILED: this attempt cannot succeed
    here."""

    PULLING = auto()
    MERGING = auto()
    MERGED = auto()
    FAILED = auto()


@dataclass
class SlicePull:
    """Sequential pulls of another rack's slices: `here` have arrived, and one may be in flight."""

    here: int = 0
    flying: bool = False
    retry_ns: int = 0
    wait_ns: int = RETRY_NS_MIN

    @property
    def whole(self) -> bool:
        return self.here == SLICES_EACH

    def due(self, now_ns: int) -> bool:
        return not self.whole and not self.flying and now_ns >= self.retry_ns


@dataclass
class Slices:
    """One fragment on one rank: the newest attempt, and merged slices of earlier ones."""

    proposal: MergeProposal | None = None
    """The attempt, if it is sharded."""
    stage: Stage = Stage.MERGED
    mine: int = -1
    """Position of this rack among the members; -1: it is not a member."""
    done: int = 0
    """Number of own slices that are merged."""
    pulls: dict[tuple[int, int], SlicePull] = field(default_factory=dict)
    """(rack, seq): the own slices of a member's payload; (rack, 0): the merged slices of an
    owner."""
    kept: dict[Attempt, int] = field(default_factory=dict)
    """Attempts whose slices are here -> time at which the version was decided; 0: it is not."""

    def begin(self, proposal: MergeProposal, me: Member) -> list[FreeSlices]:
        """Begin a new attempt, sharded or not. Slices of other attempts at this version are
        freed."""
        freed = self._free([of for of in self.kept if of[0] >= proposal.version], proposal.fragment)
        if not proposal.sharded:
            self.proposal = None
            return freed
        members = [offer.member for offer in proposal.members]
        self.proposal, self.pulls, self.done = proposal, {}, 0
        self.kept[proposal.which] = 0
        self.mine = members.index(me) if me in members else -1
        self.stage = Stage.MERGED if self.mine < 0 else Stage.PULLING
        for offer in proposal.members:
            if self.mine >= 0 and offer.member != me:
                self.pulls[offer.member.rack, offer.seq] = SlicePull()
            self.pulls[offer.member.rack, 0] = SlicePull()
        return freed

    def news(self, proposal: MergeProposal) -> bool:
        """Update the same attempt: more slices may be merged. Returns whether it was that one."""
        same = self._is_of(*proposal.which)
        self.proposal = proposal if same else self.proposal
        return same

    def move(
        self, log: LogState, me: Peer, weights: tuple[float, ...], now_ns: int
    ) -> list[FetchSlice | MergeSlice]:
        """The pulls and merges that are due. `weights`: of the members."""
        proposal = self.proposal
        if proposal is None or self.stage is Stage.FAILED:
            return []
        version, attempt, p = proposal.version, proposal.attempt, proposal.fragment
        decided = log.versions[p] >= version  # if so, all owners have merged
        count = SLICES_EACH * len(proposal.members)
        waits = self._lacks_payloads()
        effects: list[FetchSlice | MergeSlice] = []
        if self.stage is Stage.PULLING and self._has_parts():
            self.stage = Stage.MERGING
            names = tuple((offer.member, offer.seq) for offer in proposal.members)
            which = SLICES_EACH * self.mine + self.done
            effects.append(MergeSlice(p, version, attempt, which, count, names, weights))
        racks = [offer.member.rack for offer in proposal.members]
        for position in sorted(range(len(racks)), key=lambda at: (racks[at] < me.rack, at)):
            offer, rack = proposal.members[position], racks[position]
            served = SLICES_EACH if decided else 0 if waits else self._served(position)
            due = self._due(rack, offer.seq, served, now_ns) if rack != me.rack else []
            if due and log.member(rack) != offer.member:  # its bytes are gone
                self.stage = Stage.FAILED
                return []
            for seq in due:
                pull, holders = self.pulls[rack, seq], (log.seats[rack].lanes[me.rank],)
                pull.flying, pull.retry_ns = True, 0
                which = SLICES_EACH * (self.mine if seq else position) + pull.here
                effects.append(
                    FetchSlice(p, version, attempt, which, count, offer.member, seq, holders)
                )
        return effects

    def _served(self, position: int) -> int:
        """Merged slices that the member at `position` is known to serve."""
        merged = require(self.proposal, "no attempt has begun").merged
        return merged[position] if position < len(merged) else 0

    def _due(self, rack: int, seq: int, served: int, now_ns: int) -> list[int]:
        """The streams of a member of which to pull the next slice now: `seq`, its payload; 0, its
        merged slices. The second merged slice waits for the first, which all racks wait for."""
        wanted = [seq] if (rack, seq) in self.pulls else []
        wanted += [0] if self.pulls[rack, 0].here < served else []
        return [each for each in wanted if self.pulls[rack, each].due(now_ns)]

    def on_fetched(self, event: SliceFetched, decided: bool, now_ns: int) -> list[Note]:
        """A pull of a slice has ended. `decided`: whether the version is decided; if so, a rank
        that lacks a slice may copy the whole."""
        if not self._is_of(*event.which):
            return []
        pull = self.pulls[event.rack, event.seq]
        pull.flying = False
        if not event.error:
            pull.here, pull.wait_ns = pull.here + 1, RETRY_NS_MIN
            return []
        pull.retry_ns = now_ns + pull.wait_ns
        pull.wait_ns = min(2 * pull.wait_ns, RETRY_NS_MAX)
        if decided:
            self.stage = Stage.FAILED
        return [Note(FetchFailed(event.rack, event.fragment, event.seq, event.error))]

    def on_merged(self, event: SliceMerged, me: Peer) -> list[Note]:
        """A worker has merged one more own slice, or failed."""
        if not self._is_of(*event.which) or self.stage is not Stage.MERGING:
            return []
        if event.error:
            self.stage = Stage.FAILED
            return [Note(MergeFailed(event.fragment, event.version, event.error))]
        self.done += 1
        self.pulls[me.rack, 0].here = self.done
        self.stage = Stage.MERGED if self.done == SLICES_EACH else Stage.PULLING
        return []

    def failed(self, version: int, attempt: int) -> None:
        """Record that the result could not be made from the merged slices."""
        if self._is_of(version, attempt):
            self.stage = Stage.FAILED

    def whole(self, version: int, attempt: int) -> bool:
        """Whether all merged slices of the attempt are here."""
        return (
            self._is_of(version, attempt)
            and self.stage is Stage.MERGED
            and all(pull.whole for (_, seq), pull in self.pulls.items() if not seq)
        )

    def going(self, version: int) -> bool:
        """Whether the slices of this version may still give a result."""
        proposal = self.proposal
        return (
            proposal is not None and proposal.version == version and self.stage is not Stage.FAILED
        )

    def report(self, newest: int) -> Sliced | None:
        """The state to report; None for a version that is held already."""
        proposal = self.proposal
        if proposal is None or proposal.version <= newest:
            return None
        failed = self.stage is Stage.FAILED
        return Sliced(*proposal.key, self.done, failed) if failed or self.done else None

    def tidy(
        self, fragment: int, newest: int, settled: int, behind: int, now_ns: int
    ) -> list[FreeSlices]:
        """Free slices whose result every live rack holds (`settled`), or that are old. `newest`:
        the newest decided version; `behind`: how many versions are kept for racks that lag
        behind."""
        if self.proposal is not None and self.proposal.version < newest:
            self.proposal, self.pulls = None, {}  # a rack that lacks it needs a newer version
        stale = []
        for of, since_ns in self.kept.items():
            if of[0] > newest:
                continue
            self.kept[of] = since_ns = since_ns or now_ns
            if settled >= of[0] or newest - of[0] >= behind or now_ns - since_ns > KEPT_NS:
                stale.append(of)
        return self._free(stale, fragment)

    def undo(self, fragment: int, version: int) -> list[FreeSlices]:
        """Free the slices that a new lineage, which continues from `version`, has undone."""
        return self._free([of for of in self.kept if of[0] > version], fragment)

    def dues_ns(self) -> list[int]:
        if self.proposal is None or self.stage is Stage.FAILED:
            return []
        return [p.retry_ns for p in self.pulls.values() if p.retry_ns and not (p.whole or p.flying)]

    def stale_ns(self) -> list[int]:
        """When kept slices are old enough to be freed."""
        return [since_ns + KEPT_NS + 1 for since_ns in self.kept.values() if since_ns]

    def _free(self, attempts: list[Attempt], fragment: int) -> list[FreeSlices]:
        for of in attempts:
            del self.kept[of]
            if self._is_of(*of):
                self.proposal, self.pulls = None, {}
        return [FreeSlices(fragment, *of) for of in attempts]

    def _is_of(self, version: int, attempt: int) -> bool:
        return self.proposal is not None and self.proposal.which == (version, attempt)

    def _lacks_payloads(self) -> bool:
        """Whether payloads of more than half of the other members are missing. All wait for the
        rack that merges last, so payloads go before merged slices on the links, except those of a
        few slow members."""
        missing = [not pull.whole for (_, seq), pull in self.pulls.items() if seq]
        return 2 * sum(missing) > len(missing)

    def _has_parts(self) -> bool:
        """Whether the next own slice has arrived from all other members."""
        return all(pull.here > self.done for (_, seq), pull in self.pulls.items() if seq)
