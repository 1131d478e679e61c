"""Mitigates a slow rack in stages, by ski rental: a stage begins once the time lost without it has
reached its price, and ends when the rack is fast again.

    S1  The grace window absorbs it. Nothing is lost while the result arrives before the overlap
        ends.
    S2  It makes fewer steps between two rounds, because it captures when a round is open. If its
        script asks (`Runtime.local_batch`), it also takes fewer micro-batches per step.
    S3  Rounds do not wait for it.
    S4  It is evicted: its work is merged, it leaves, and it is started again. The price is compared
        with the time that the rack itself has lost, not with what the rounds have lost.

Every change of the micro-batches, and of S3 and S4, is a record of the log (`Mitigation`). The lost
time is soft state: a new coordinator counts anew. Safety does not depend on any of this. A rack
that is not waited for keeps its seat, its vote and its offers, which later rounds merge; an evicted
one gives them up like any rack that leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from mend.consensus.log import LogState
from mend.consensus.proposer import Proposer
from mend.consensus.records import (
    AWAITED,
    EVICTED,
    EVICTIONS_MAX,
    NOT_AWAITED,
    SMALLER,
    Mitigation,
    Policy,
)
from mend.coordination.events import CommonEffect, Note
from mend.coordination.messages import FailSlow, Report
from mend.coordination.round import Round
from mend.coordination.round_inputs import fastest_ns
from mend.coordination.schedule import gap_steps
from mend.coordination.slow import sentence_of
from mend.detector import COMPUTE, INPUT, LINK, UNKNOWN
from mend.events.kinds import (
    EvictedRackLost,
    RackAwaited,
    RackBatchChanged,
    RackEvicted,
    RackMitigated,
    RackNotAwaited,
)
from mend.types import MS, SECOND

CALM_DETECTS = 1
"""Detection times for which a rack must be as fast as before until rounds wait for it again. In
this time a new coordinator hears which racks are slow."""

PER_TOKEN = frozenset({COMPUTE, INPUT})
"""Causes that slow down each token: half of the micro-batches take half of the time."""

KNOWN = PER_TOKEN | {LINK}
"""Causes that a micro-benchmark can identify; any other is unknown, or not validated (yet)."""

RESTARTABLE = frozenset({COMPUTE, UNKNOWN})
"""Causes that a restart may cure. A link or a loader is as slow after it."""

VOTERS_LEFT_MIN = 2
"""Voters that must be live while a rack restarts. With fewer, a single death meanwhile would end
the job."""

COUNTED_NS_MAX = SECOND
"""Limit of the time between two checks that counts as lost; a longer gap was the coordinator's own
sleep."""

BATCH_CHANGE_MIN_PCT = 10
"""Percentage points by which a change of the micro-batches must differ from the value in force."""

AWAY_NS = 600 * SECOND
"""How long an evicted rack may be away before it counts as lost, if `seat_timeout_s` is 0."""


def event_of(before: int, due: Mitigation) -> RackMitigated:
    """The event of a mitigation that follows stage `before`: the rack is evicted; rounds stop
    waiting for it, or wait again; or only its micro-batches change."""
    about = (due.rack, due.stage, due.batch_pct, due.reason)
    if due.stage == EVICTED:
        return RackEvicted(*about)
    if (before >= NOT_AWAITED) == (due.stage >= NOT_AWAITED):
        return RackBatchChanged(*about)
    return RackNotAwaited(*about) if due.stage >= NOT_AWAITED else RackAwaited(*about)


def taken_of(count: int, batch_pct: int) -> int:
    """How many of `count` micro-batches are taken: the nearest number, at least one."""
    return max(min(count, 1), (count * batch_pct + 50) // 100)


@dataclass
class Ladder:
    """The coordinator's account of lost time. `lost_ns`: by slow rack, how long rounds have waited
    for slow racks alone, beyond what the overlap hides; negative while a mitigation gets time to
    work. `behind_ns`: by rack that has become slower, how much longer it would have to train to
    catch up."""

    lost_ns: dict[int, int] = field(default_factory=dict)
    behind_ns: dict[int, int] = field(default_factory=dict)
    _counted_ns: int = 0
    _eased_ns: dict[int, int] = field(default_factory=dict)
    """By mitigated rack: since when a weaker mitigation would suffice."""
    _away_ns: dict[int, int] = field(default_factory=dict)
    """By evicted rack that has left and not returned: since when, as far as this coordinator
    knows."""

    def count(self, rounds: Iterable[Round], judged: Sequence[FailSlow], now_ns: int) -> None:
        """Add the time since the last call. Rounds have waited for the same racks since then."""
        self._count_behind(judged, now_ns)
        slow = {verdict.rack for verdict in judged}
        for round_ in rounds:
            waiting = round_.waiting
            if waiting and waiting <= slow:
                for rack in waiting:
                    lost_ns = max(now_ns - max(round_.looked_ns, round_.hidden_ns), 0)
                    self.lost_ns[rack] = self.lost_ns.get(rack, 0) + lost_ns
            round_.looked_ns = now_ns
        self.lost_ns = {rack: ns for rack, ns in self.lost_ns.items() if rack in slow}

    def _count_behind(self, judged: Sequence[FailSlow], now_ns: int) -> None:
        passed_ns = min(now_ns - self._counted_ns, COUNTED_NS_MAX) if self._counted_ns else 0
        self._counted_ns, before = now_ns, self.behind_ns
        self.behind_ns = {}
        for each in judged:
            if each.own_past and not each.of_link and each.ratio_tenths > 10:
                lost_ns = passed_ns * (each.ratio_tenths - 10) // each.ratio_tenths
                self.behind_ns[each.rack] = before.get(each.rack, 0) + lost_ns

    def move(
        self,
        proposer: Proposer,
        judged: Sequence[FailSlow],
        reports: Mapping[int, Report],
        live: frozenset[int],
        now_ns: int,
        detect_ns: int,
    ) -> list[CommonEffect]:
        """Append the mitigation that is due, if there is one and it may be appended."""
        if not proposer.may_append():
            return []
        log = proposer.log.appended
        due = self.next(log, judged, reports, live, now_ns, detect_ns)
        if due is None:
            return []
        before = log.mitigations[due.rack].stage if due.rack in log.mitigations else AWAITED
        proposer.append(due)
        if due.rack not in log.seats:
            return [Note(EvictedRackLost(due.rack, due.stage, due.batch_pct, due.reason))]
        return [Note(event_of(before, due))]

    def next(
        self,
        log: LogState,
        judged: Sequence[FailSlow],
        reports: Mapping[int, Report],
        live: frozenset[int],
        now_ns: int,
        detect_ns: int,
    ) -> Mitigation | None:
        """The mitigation that is due. `log`: the log as far as it is written."""
        policy = log.policy
        if policy is None or not policy.acts:
            return None
        slow = worst_of(judged)
        step_ns = fastest_ns([r.step_ns for rack, r in reports.items() if rack in live])
        for rack in sorted(log.seats):
            report, verdict = reports.get(rack), slow.get(rack)
            now = log.mitigations.get(rack, Mitigation(rack, AWAITED, ""))
            if now.stage == EVICTED and report is not None and report.leaving:
                continue
            less = None
            if report is not None and rack in live:
                less = _less(now, verdict, report.pace.batch)
            if less is None:
                self._eased_ns.pop(rack, None)
            elif now_ns - self._eased_ns.setdefault(rack, now_ns) >= CALM_DETECTS * detect_ns:
                del self._eased_ns[rack]
                return less
            if now.stage == EVICTED:
                more = _taken_back(log, now, reports, live)
            elif verdict is None or report is None:
                continue
            else:
                more = self._more(now, verdict, report.pace.batch, policy, step_ns)
                more = more or self._eviction(log, now, judged, reports, live)
            if more is not None:
                return more
        return self._given_up(log, policy, now_ns)

    def _given_up(self, log: LogState, policy: Policy, now_ns: int) -> Mitigation | None:
        """Declare an evicted rack that was not restarted lost, like any other absent rack. Then
        other racks may be evicted, as far as the job can continue without them. The rack may still
        join."""
        limit_ns = policy.seat_timeout_ns or AWAY_NS
        self._away_ns = {rack: self._away_ns.get(rack, now_ns) for rack in log.away}
        for rack, since_ns in self._away_ns.items():
            if now_ns - since_ns >= limit_ns:
                why = f"it was evicted and has not come back for {limit_ns // SECOND} s"
                return Mitigation(rack, AWAITED, why)
        return None

    def _eviction(
        self,
        log: LogState,
        now: Mitigation,
        judged: Sequence[FailSlow],
        reports: Mapping[int, Report],
        live: frozenset[int],
    ) -> Mitigation | None:
        """The eviction of a rack, once it has lost as much time as its restart costs and the others
        can continue without it. Only a rack that was faster in this life is evicted: one that was
        slow from its start would be slow again."""
        rack, report = now.rack, reports[now.rack]
        if log.policy is None or not log.policy.evicts or rack not in live:
            return None
        own = next((each for each in judged if each.rack == rack and each.own_past), None)
        if own is None or own.cause not in RESTARTABLE or report.leaving:
            return None
        price_ns, lost_ns = report.pace.start_ms * MS, self.behind_ns.get(rack, 0)
        if log.evictions.get(rack, 0) >= EVICTIONS_MAX or lost_ns < price_ns or not price_ns:
            return None
        if _needed(log, rack, reports, live):
            return None
        del self.behind_ns[rack]
        reason = f"{sentence_of(own)}; this has cost it {lost_ns // MS} ms"
        reason = f"{reason}, a restart costs {price_ns // MS} ms"
        return Mitigation(rack, EVICTED, reason, now.batch_pct)

    def _more(
        self, now: Mitigation, verdict: FailSlow, offered: int, policy: Policy, step_ns: int
    ) -> Mitigation | None:
        """The next stage, if the time lost in the current one has reached its price. Fewer
        micro-batches go first: all of the rack's work then stays in the rounds."""
        rack, gap_ns = now.rack, step_ns * gap_steps(policy.fragments, policy.period_steps)
        lost_ns, pct = self.lost_ns.get(rack, 0), batch_pct_of(verdict)
        why = f"{sentence_of(verdict)}; rounds have lost {lost_ns // MS} ms with it"
        if _helps(now, verdict) and _fewer(offered, now.batch_pct, pct):
            price_ns = step_ns if verdict.cause in PER_TOKEN else gap_ns
            if lost_ns < price_ns or not price_ns:
                return None
            self.lost_ns[rack] = -gap_ns  # it takes effect after the step that may have begun
            reason = f"{why}, fewer micro-batches cost {price_ns // MS} ms"
            return Mitigation(rack, max(now.stage, SMALLER), reason, pct)
        if policy.lockstep or now.stage >= NOT_AWAITED or lost_ns < gap_ns or not gap_ns:
            return None
        # A round that does not wait for a rack misses its work between two rounds, until a
        # later round.
        del self.lost_ns[rack]
        reason = f"{why}, one without it costs {gap_ns // MS} ms"
        return Mitigation(rack, NOT_AWAITED, reason, now.batch_pct)


def worst_of(judged: Sequence[FailSlow]) -> dict[int, FailSlow]:
    """By rack, the verdict with the greatest ratio; on a tie the one from its own past, which comes
    first. A verdict on its steps goes before verdicts on pulls from it, which fewer micro-batches
    cannot help. With fewer micro-batches the time per token includes more of the fixed cost of a
    step, so the own past may show a smaller ratio than the peers do. If the chosen verdict has no
    cause, it takes that of the rack's other verdict."""
    by_rack: dict[int, FailSlow] = {}
    for verdict in judged:
        worst, other = verdict, by_rack.get(verdict.rack)
        if other is not None and _weight(other) >= _weight(verdict):
            worst, other = other, verdict
        if (
            other is not None
            and not other.of_link
            and worst.cause not in KNOWN
            and other.cause in KNOWN
        ):
            worst = replace(worst, cause=other.cause, link_to=other.link_to)
        by_rack[verdict.rack] = worst
    return by_rack


def _weight(verdict: FailSlow) -> tuple[bool, int]:
    return not verdict.of_link, verdict.ratio_tenths


def batch_pct_of(verdict: FailSlow) -> int:
    """Percentage of its micro-batches with which a slow rack steps as fast as before."""
    return max(1, min(100, 1000 // max(verdict.ratio_tenths, 1)))


def _taken_back(
    log: LogState, now: Mitigation, reports: Mapping[int, Report], live: frozenset[int]
) -> Mitigation | None:
    """Cancels an eviction if the rack is needed after all, or reports that it stays."""
    report, why = reports.get(now.rack), _needed(log, now.rack, reports, live)
    why = f"it is needed: {why}" if why else ""
    if now.rack in live and report is not None and not report.pace.start_ms:
        why = "it stays: its work could not be merged in time"
    stage = SMALLER if now.batch_pct < 100 else AWAITED
    return Mitigation(now.rack, stage, why, now.batch_pct) if why else None


def _needed(log: LogState, rack: int, reports: Mapping[int, Report], live: frozenset[int]) -> str:
    """Why the others cannot continue without a rack for a while; empty: they can."""
    away = [r for r, one in sorted(log.mitigations.items()) if one.stage == EVICTED and r != rack]
    others = [r for r in sorted(log.seats) if r != rack]
    for other in (*away, *others):
        report = reports.get(other)
        if other not in live or other in away or report is None:
            return f"rack {other} is absent"
        if report.leaving:
            return f"rack {other} leaves"
    left = {voter for voter in log.voters if voter.rack != rack and voter.rack in live}
    if len(left) < VOTERS_LEFT_MIN or not log.may_decide(left):
        return "too few votes would be left"
    wanted = log.policy.merge_min_racks if log.policy is not None else 0
    return f"a merge needs {wanted} racks" if len(others) < wanted else ""


def _helps(now: Mitigation, verdict: FailSlow) -> bool:
    """Whether fewer micro-batches may help. A slow link costs a step the same with fewer. For an
    unknown cause it is tried once."""
    if verdict.cause == LINK:
        return False
    return verdict.cause in PER_TOKEN or now.batch_pct == 100


def _fewer(offered: int, before_pct: int, pct: int) -> bool:
    """Whether `pct` percent of the offered micro-batches are fewer than `before_pct` percent, by
    more than the noise of a measurement."""
    if before_pct - pct < BATCH_CHANGE_MIN_PCT:
        return False
    return taken_of(offered, pct) < taken_of(offered, before_pct)


def _less(now: Mitigation, verdict: FailSlow | None, offered: int) -> Mitigation | None:
    """A weaker mitigation that suffices now, if there is one."""
    if now.stage == AWAITED:
        return None
    if verdict is None:
        return Mitigation(now.rack, AWAITED, "it is no longer slow")
    if now.stage == EVICTED:
        return None
    if verdict.cause == LINK and now.batch_pct < 100:
        stage = AWAITED if now.stage == SMALLER else now.stage
        reason = f"{sentence_of(verdict)}, where fewer micro-batches do not help"
        return Mitigation(now.rack, stage, reason)
    pct = batch_pct_of(verdict)
    if not _fewer(offered, pct, now.batch_pct):
        return None
    reason = f"{sentence_of(verdict)}, which is less than before"
    return Mitigation(now.rack, now.stage, reason, pct)
