"""The round of one fragment on the coordinator: from a version to the next one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import Enum, auto

from msgspec.structs import replace

from mend.consensus.ballots import ATTEMPT_LAST, attempt_of
from mend.consensus.quorum import hold, worthwhile
from mend.consensus.records import (
    TEXT_MAX,
    Absent,
    ClosedBy,
    Commit,
    Drop,
    Ended,
    Offer,
    Policy,
    merge_member_of,
)
from mend.coordination.grace import WINDOW_NS_MAX, Mean, adaptive_grace_ns
from mend.coordination.messages import MergeProposal, OpenFor, Sliced
from mend.coordination.schedule import gap_steps, overlap_at
from mend.types import SECOND, WITNESS, Member, rack_names

ATTEMPTS_MAX = 8
"""Attempts without a pause. After these, racks whose results differ are asked again only when an
attempt stalls."""

ATTEMPT_STALL_NS = 10 * SECOND
"""An attempt without a result for this long has stalled, or for twice the time of an earlier one if
that is longer."""

ATTEMPT_STALL_NS_MAX = 300 * SECOND

SLICED_MIN = 3
"""Least number of members of a sharded attempt: two would pull as much as without sharding."""

TOOK_KEPT = 8
"""Commits of a fragment of which the fastest one counts, so that an outage does not count as a slow
link."""


class Phase(Enum):
    """State of a round.

    IDLE: no rack trains on this version yet. OPEN: offers are arriving. PROPOSED: the members are
    fixed and results are awaited.
    """

    IDLE = auto()
    OPEN = auto()
    PROPOSED = auto()


@dataclass(frozen=True, slots=True)
class RoundInputs:
    """All inputs of a round's decisions. `arrived`: one offer per rack, ascending."""

    version: int
    voters: frozenset[int]
    policy: Policy
    offers: tuple[Offer, ...]
    arrived: tuple[Offer, ...]
    declined: frozenset[int]
    contributors: frozenset[int]
    live: frozenset[int]
    held: Mapping[int, tuple[int, tuple[str, ...]]]
    """rack -> (attempt, digests) of its result for version + 1."""
    step_ns: int
    seats: int
    """Number of racks in the roster; `live`: those of them that are heard."""
    mitigated: frozenset[int] = frozenset()
    """Slow racks that the round does not wait for."""
    without_rows: frozenset[int] = frozenset()
    """Racks that offer nothing before a rack that leaves has left, as it took the last rows."""
    bad: Mapping[tuple[Member, int], str] = field(default_factory=dict)
    """Open offers (member, seq) that are not fit to be merged, and why."""
    norm_max: float = math.inf
    """Greatest plausible magnitude per step."""
    slices: Mapping[int, Sliced] = field(default_factory=dict)
    """Progress of each rack in a sharded attempt at version + 1."""
    works: Mapping[int, Absent] = field(default_factory=dict)
    """Weights, while they are not in a merge, of racks whose work was or will be named. A rack
    whose work was never named may be in `coming` only."""
    lasts: Mapping[int, Absent] = field(default_factory=dict)
    """Weight of each rack's last named offer."""
    coming: frozenset[int] = frozenset()
    """Racks that have trained, or will train, since their last named offer."""
    named: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """By rack: the base of its last named offer, and the version that merged it."""


@dataclass
class Round:
    """The soft state of one fragment's round. Losing it with the coordinator costs only time."""

    fragment: int
    quorum_time: Mean
    sync_time: Mean
    ballot: int = 0
    phase: Phase = Phase.IDLE
    opened_ns: int = 0
    enough_ns: int | None = None
    gathered_ns: int = 0
    started_ns: int = 0
    """Start of the attempt; `gathered_ns` moves on each time the attempt has stalled."""
    took_ns: deque[int] = field(default_factory=lambda: deque(maxlen=TOOK_KEPT))
    """Times from the start of an attempt to its commit: equal bytes over the same links."""
    count: int = 0
    """Number of attempts at this version in this ballot."""
    members: tuple[Offer, ...] = ()
    awaited: frozenset[int] = frozenset()
    """Live racks without a result while others have one."""
    absent: tuple[Absent, ...] = ()
    """Racks that count as absent, fixed for the attempt."""
    waiting: frozenset[int] = frozenset()
    """Racks that the round stays open for although K offers have arrived."""
    open_for: OpenFor = ""
    """Why it stays open for them."""
    hidden_ns: int = 0
    """How long it may stay open and still end within the overlap of the rack that opened it."""
    looked_ns: int = 0
    """When the ladder last counted its open time."""
    closed_by: ClosedBy = "all-in"
    detail: list[str] = field(default_factory=list)
    """Further to `closed_by`: about which racks it is, and how the attempts went."""
    sharded: bool = False
    """Whether the attempt is sharded."""
    unsharded: str = ""
    """Why further attempts at this version are not sharded; empty: they may be."""
    merged: tuple[int, ...] = ()
    """Merged slices that each member of a sharded attempt serves; empty: none of any member."""
    faults: list[str] = field(default_factory=list)
    why: str = ""

    @property
    def attempt(self) -> int:
        return attempt_of(self.ballot, self.count)

    def rests(self, asked: Set[int]) -> bool:
        """Whether the round has nothing to do. `asked`: fragments that some rack has offered or
        declined."""
        rests = self.phase is Phase.IDLE and self.fragment not in asked
        self.why = "" if rests else self.why
        return rests

    def advance(self, inputs: RoundInputs, now_ns: int) -> Commit | Drop | None:
        """Advance as far as the inputs allow. Returns the record to append, if there is one."""
        self.why, self.waiting, self.open_for = "", frozenset(), ""
        if inputs.bad:
            return self._drop_bad(inputs.bad)
        if (
            self.phase is not Phase.PROPOSED
            and (old := self._too_old(inputs))
            and len(old) == len(inputs.offers)
        ):
            return Drop(
                self.fragment,
                tuple(Ended(offer.member, offer.seq) for offer in old),
                "older than staleness_max_rounds",
            )
        self._without_removed(inputs, now_ns)
        if self.phase is Phase.IDLE and self._opens(inputs):
            self.phase, self.opened_ns, self.enough_ns = Phase.OPEN, now_ns, None
        if self.phase is Phase.OPEN:
            drop = self._try_close(inputs, now_ns)
            if drop is not None:
                return drop
        if self.phase is Phase.PROPOSED:
            return self._try_commit(inputs, now_ns)
        return None

    def _drop_bad(self, bad: Mapping[tuple[Member, int], str]) -> Drop:
        """End these offers at once; the round continues without them in a new attempt."""
        reasons = [f"rack {m.rack} has diverged: {bad[m, seq]}" for m, seq in sorted(bad)]
        ended = tuple(Ended(*name) for name in sorted(bad))
        return Drop(self.fragment, ended, "; ".join(reasons)[:TEXT_MAX], diverged=True)

    @staticmethod
    def _absurd(inputs: RoundInputs, members: tuple[Offer, ...]) -> dict[tuple[Member, int], str]:
        """Members that moved implausibly far. Empty if all of several did, or a single one did:
        then training moves that far now."""
        far = [offer for offer in members if offer.norm > inputs.norm_max * offer.steps]
        if len(far) == len(members) > 1 or len(inputs.contributors) == 1:
            return {}
        return {
            _id(offer): f"its weights moved by {offer.norm / offer.steps:g} per step, the limit is "
            f"{inputs.norm_max:g}"
            for offer in far
        }

    def on_decided(self, now_ns: int) -> None:
        """The commit of this round is decided; the next may open."""
        if self.phase is Phase.PROPOSED:
            self.sync_time.observe(now_ns - self.started_ns)
            self.took_ns.append(now_ns - self.started_ns)
        self.phase, self.count, self.faults, self.unsharded = Phase.IDLE, 0, [], ""
        self.members, self.absent = (), ()

    def proposal(self, version: int) -> MergeProposal | None:
        if self.phase is not Phase.PROPOSED:
            return None
        return MergeProposal(
            self.fragment, version + 1, self.attempt, self.members, self.absent,
            self.sharded, self.merged,
        )  # fmt: skip

    def slow(self, now_ns: int) -> frozenset[int]:
        """Live racks whose results take longer than merges do."""
        stalled = self.phase is Phase.PROPOSED and now_ns >= self.started_ns + self._stall_ns()
        return self.awaited if stalled else frozenset()

    def deadline_ns(self, inputs: RoundInputs) -> int | None:
        if self.phase is Phase.OPEN and self.enough_ns is not None and not inputs.policy.lockstep:
            return self.enough_ns + self._window_ns(inputs)
        if self.phase is Phase.PROPOSED:
            return self.gathered_ns + self._stall_ns()
        return None

    def _stall_ns(self) -> int:
        """At least twice the measured time, because a slow link or a slow merge is not a stall."""
        twice_ns = 2 * min(self.took_ns, default=0)
        return max(ATTEMPT_STALL_NS, min(twice_ns, ATTEMPT_STALL_NS_MAX))

    def _hidden_ns(self, inputs: RoundInputs) -> int:
        policy = inputs.policy
        tau = policy.overlap_steps  # afterwards training waits: see `Calendar.last`
        if policy.lockstep:
            tau = overlap_at(inputs.version, tau, policy.overlap_ramp)
        return self.opened_ns + tau * inputs.step_ns - (self.sync_time.value_ns or 0)

    def _opens(self, inputs: RoundInputs) -> bool:
        """Whether an offer opens the round. A late offer alone (its rack had not applied `version`
        at the capture) does not."""
        return bool(inputs.declined) or any(
            offer.applied == inputs.version for offer in inputs.offers
        )

    def _window_ns(self, inputs: RoundInputs) -> int:
        """How long the round waits once K offers have arrived; adaptive: longer while bytes are in
        flight.

        A rack whose offer is announced but not pulled yet has done its part. Merging without it
        would put the same bytes into a round of their own a moment later, where deltas that should
        be averaged add up. So the window is up to half the time until the fragment is captured
        again.
        """
        policy = inputs.policy
        if policy.grace_ns >= 0:
            return policy.grace_ns
        grace_ns = adaptive_grace_ns(
            step_ns=inputs.step_ns,
            quorum_ns=self.quorum_time.value_ns,
            sync_ns=self.sync_time.value_ns,
            overlap_steps=policy.overlap_steps,  # also while tau rises: see `Calendar.last`
            gap_steps=gap_steps(policy.of_weights, policy.period_steps),
            limit_ns=WINDOW_NS_MAX,
        )
        too_old = len(self._too_old(inputs))
        under_way = len(inputs.offers) - too_old > len(inputs.arrived)
        half_period_ns = inputs.step_ns * policy.period_steps // 2
        return max(grace_ns, half_period_ns) if under_way else grace_ns

    def _try_close(self, inputs: RoundInputs, now_ns: int) -> Drop | None:
        arrived = inputs.arrived
        if inputs.policy.lockstep:
            arrived = tuple(offer for offer in arrived if offer.base == inputs.version)
        inside = {offer.member.rack for offer in arrived}
        expected = (
            inputs.contributors if inputs.policy.lockstep else inputs.contributors & inputs.live
        )
        waiting = _named(inputs, expected) - inside - inputs.declined - inputs.without_rows
        able = inputs.contributors - inputs.without_rows
        k = min(inputs.policy.merge_min_racks, max(1, len(able)))
        if inputs.policy.lockstep:
            enough = bool(arrived)
        else:
            # Offers that this commit will drop as too old also count: waiting for K without them
            # could wait forever.
            enough = bool(arrived) and worthwhile(len(arrived) + len(self._too_old(inputs)), k)
        if not enough:
            self.enough_ns = None
            scarce = {offer.member.rack for offer in inputs.offers} - inside
            scarce -= {offer.member.rack for offer in self._too_old(inputs)}
            self.why = (
                f"{len(arrived)} of {k} offers have arrived"
                + _racks(", too few racks hold the payload of", scarce)
                + _racks(", waiting for", waiting - scarce)
            )
            return None
        if self.enough_ns is None:
            self.enough_ns = now_ns
            self.quorum_time.observe(now_ns - self.opened_ns)
        if not waiting:
            left = expected - inside - inputs.declined - inputs.without_rows
            self.closed_by, self.detail = _close_reason(inputs, inside, left)
        elif not inputs.policy.lockstep and now_ns >= self.enough_ns + self._window_ns(inputs):
            self.closed_by, self.detail = "grace-over", [_racks("without", waiting)]
        else:
            self.why, self.waiting = f"waiting for {rack_names(waiting)}", frozenset(waiting)
            self.open_for = "lockstep" if inputs.policy.lockstep else "grace"
            self.hidden_ns = self._hidden_ns(inputs)
            return None
        if absurd := self._absurd(inputs, arrived):
            return self._drop_bad(absurd)
        self.gathered_ns = now_ns
        self._start_attempt(arrived, inputs)
        return None

    def _without_removed(self, inputs: RoundInputs, now_ns: int) -> None:
        """End the offers of a removed or restarted member, also after the proposal: a commit must
        not name them."""
        open_ = {_id(offer) for offer in inputs.offers}
        if self.phase is not Phase.PROPOSED or all(_id(offer) in open_ for offer in self.members):
            return
        still = tuple(offer for offer in self.members if _id(offer) in open_)
        self.gathered_ns = now_ns
        if still:
            self._start_attempt(still, inputs)
        else:
            self.phase, self.members, self.absent = Phase.IDLE, (), ()

    def _start_attempt(self, members: tuple[Offer, ...], inputs: RoundInputs) -> None:
        if self.count == ATTEMPT_LAST:
            return  # an attempt number names one set of members, so numbers have run out
        gone = {offer.member.rack for offer in self.members} - {o.member.rack for o in members}
        if gone:
            self.detail.append(_racks("then without", gone))
        may = inputs.policy.sharded and len(members) >= SLICED_MIN
        self.sharded, self.merged = may and not self.unsharded, ()
        if self.sharded and self.count == 0:
            self.detail.append("sharded")
        self.phase, self.members, self.absent = Phase.PROPOSED, members, _absent(inputs, members)
        self.started_ns = self.gathered_ns
        self.count += 1

    def _try_commit(self, inputs: RoundInputs, now_ns: int) -> Commit | None:
        by_digests: dict[tuple[str, ...], set[int]] = {}
        for rack, (attempt, digests) in inputs.held.items():
            if attempt == self.attempt:
                by_digests.setdefault(digests, set()).add(rack)
        for digests in sorted(by_digests):
            if hold(by_digests[digests], inputs.voters):
                return self._commit(inputs, digests)
        reported = set().union(*by_digests.values())
        absent = (inputs.live & inputs.contributors) - reported
        self.awaited = absent if reported else frozenset()
        if inputs.policy.sharded and self._ends_sharded(inputs, now_ns):
            return None
        stalled = now_ns >= self.gathered_ns + self._stall_ns()
        if len(by_digests) > 1 and not absent and (self.count < ATTEMPTS_MAX or stalled):
            self.faults.append(
                f"fragment {self.fragment} version {inputs.version + 1} attempt {self.count}: "
                f"racks {sorted(reported)} merged equal members into {len(by_digests)} different "
                "results"
            )
            self.gathered_ns = now_ns
            self._unshard("results differ")
            self._start_attempt(self.members, inputs)
        elif stalled:
            self.gathered_ns = now_ns
            still = self._still(inputs)
            if still and (self._unshard("stalled") or len(still) < len(self.members)):
                self._start_attempt(still, inputs)
        self.why = _undecided(reported, absent, inputs)
        return None

    def _still(self, inputs: RoundInputs) -> tuple[Offer, ...]:
        """Members whose bytes are still available."""
        arrived = {_id(offer) for offer in inputs.arrived}
        return tuple(offer for offer in self.members if _id(offer) in arrived)

    def _unshard(self, why: str) -> bool:
        """Stop sharding this version: from here on all racks pull all payloads and verify their
        checksums. Returns False if they do so already."""
        if self.sharded:
            self.unsharded = why
            self.detail.append(f"then mesh: {why}")
        return self.sharded

    def _ends_sharded(self, inputs: RoundInputs, now_ns: int) -> bool:
        """Count the merged slices. If a rack has failed, start a new attempt without sharding; if a
        member is silent, one without it, whose slices go to others. In lockstep all members are
        waited for. Returns whether the attempt has ended."""
        reports = {rack: s for rack, s in inputs.slices.items() if s.attempt == self.attempt}
        racks = [offer.member.rack for offer in self.members]
        merged = [reports[rack].merged if rack in reports else 0 for rack in racks]
        self.merged = tuple(merged) if any(merged) else ()
        failed = {rack for rack, sliced in reports.items() if sliced.failed}
        still = self._still(inputs)
        if not failed and not inputs.policy.lockstep:
            still = tuple(offer for offer in still if offer.member.rack in inputs.live)
        if not still or (not failed and len(still) == len(self.members)):
            return False
        if failed:
            self._unshard("failed at" + _racks("", failed))
        self.gathered_ns = now_ns
        self._start_attempt(still, inputs)
        return True

    @staticmethod
    def _too_old(inputs: RoundInputs) -> list[Offer]:
        """Offers that are too old to be merged. They do not count as arrived, so a merge never
        includes them."""
        return [
            offer
            for offer in inputs.offers
            if inputs.version - offer.base > inputs.policy.staleness_max_rounds
        ]

    def _commit(self, inputs: RoundInputs, digests: tuple[str, ...]) -> Commit:
        return Commit(
            fragment=self.fragment,
            version=inputs.version + 1,
            members=tuple(merge_member_of(offer) for offer in self.members),
            dropped=tuple(Ended(offer.member, offer.seq) for offer in self._too_old(inputs)),
            digests=digests,
            closed_by=self.closed_by,
            detail=", ".join(self.detail)[:TEXT_MAX],
            absent=self.absent,
        )


def _id(offer: Offer) -> tuple[Member, int]:
    """An offer's identity; its `applied` may grow meanwhile."""
    return (offer.member, offer.seq)


def _absent(inputs: RoundInputs, members: tuple[Offer, ...]) -> tuple[Absent, ...]:
    """Racks that are not members and have work from the time in which the members did theirs,
    ascending. The work comes later, or was merged into a version that no member had applied when
    its own work began, which is when it captured before. A rack whose last work was merged after
    that of every member, and that has more to come, weighs as the longer of both."""
    racks = [offer.member.rack for offer in members]
    since = max(inputs.named.get(rack, (0, 0))[0] for rack in racks)
    away = (inputs.contributors & inputs.live & inputs.coming) - inputs.declined
    away |= {rack for rack, (_, version) in inputs.named.items() if version > since}
    tokens, steps = sum(o.tokens for o in members), sum(o.steps for o in members)
    mean = Absent(0, tokens // len(members), steps // len(members))  # if nothing is known of it
    away -= set(racks)
    newest = max(inputs.named.get(rack, (0, 0))[1] for rack in racks)
    beside = {rack for rack in away if inputs.named.get(rack, (0, 0))[1] > newest}
    return tuple([_weight(inputs, rack, mean, rack in beside) for rack in sorted(away)])


def _weight(inputs: RoundInputs, rack: int, mean: Absent, beside: bool) -> Absent:
    """The weight of an absent rack. `beside`: its last merged work counts, too."""
    work, last = inputs.works.get(rack) or replace(mean, rack=rack), inputs.lasts.get(rack)
    if not beside or last is None or last.steps <= work.steps:
        return work
    return replace(last, closing=work.closing)


def _named(inputs: RoundInputs, expected: frozenset[int]) -> frozenset[int]:
    """The contributors that a round waits for: the expected ones of the settings, or all if none of
    those contributes; without the mitigated racks, unless all are mitigated."""
    named = expected.intersection(inputs.policy.expected) or expected
    return named - inputs.mitigated or named


def _close_reason(
    inputs: RoundInputs, inside: Set[int], left: Set[int]
) -> tuple[ClosedBy, list[str]]:
    """Why a round that waits for no rack closes: all live racks have offered; or the others offer
    nothing (they declined, leave or have just joined); or rounds do not wait for the racks
    `left`."""
    if inputs.policy.lockstep:
        return "lockstep", []
    if left and left <= inputs.mitigated:
        return "slow-left", [_racks("without", left)]
    if left:
        return "expected-in", [_racks("without", left)]
    if absent := inputs.live - inside:
        return "rest-in", [_racks("nothing from", absent)]
    return "all-in", [f"{len(inside)} of {inputs.seats} racks"]


def _undecided(reported: Set[int], absent: Set[int], inputs: RoundInputs) -> str:
    """What a merge waits for and, if silent racks block it, what a person can do."""
    has = "have" if len(reported) > 1 else "has"
    missing = absent or inputs.voters - {WITNESS} - reported
    silent = missing - inputs.live
    why = "no rack has the result yet"
    if reported:
        why = f"{rack_names(reported)} {has} the result, too few to decide it"
    why += _racks(": waiting for", missing)
    if not silent:
        return why
    each = " or ".join(f"`mend retire {rack}`" for rack in sorted(silent))
    return f"{why}{_racks(', silent:', silent)} (start again, or {each})"


def _racks(before: str, racks: Set[int]) -> str:
    return f"{before} {rack_names(racks)}" if racks else ""
