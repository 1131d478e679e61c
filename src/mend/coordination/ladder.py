"""What is done about a slow rack, step by step and by ski rental: a move is made once the time that
was lost without it has reached its price, and taken back on relief.

    S1  the grace window absorbs it: nothing is lost while the result is in before the overlap ends
    S2  it makes fewer steps between two rounds, as it captures where a round is open
    S3  rounds do not wait for it: a record (`Mitigation`), as is the way back

What rounds have cost is soft: whoever takes over counts anew. Nothing here touches safety: a rack
that is not waited for keeps its seat, its vote and its offers, which later rounds merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mend.consensus.log import LogState
from mend.consensus.proposer import Proposer
from mend.consensus.records import AWAITED, NOT_AWAITED, Mitigation, Policy
from mend.coordination.events import Effect, Note
from mend.coordination.messages import FailSlow, Report
from mend.coordination.round import Round
from mend.coordination.round_inputs import fastest_ns
from mend.coordination.schedule import gap_steps
from mend.coordination.slow import sentence_of
from mend.types import MS

MITIGATED, RELIEVED = "slow-rack-left", "slow-rack-awaited"
"""Kinds of the notes."""

CALM_DETECTS = 1
"""Detection times that a rack must be as fast as it was before it is waited for again: whoever has
just taken over has heard by then who is slow."""


@dataclass
class Ladder:
    """For the coordinator. `lost_ns`: by slow rack, how long rounds have waited for slow racks
    alone, and past what the overlap hides."""

    lost_ns: dict[int, int] = field(default_factory=dict)
    _calm_ns: dict[int, int] = field(default_factory=dict)
    """By rack that is not waited for: since when it has not been slow."""

    def count(self, rounds: Iterable[Round], judged: Sequence[FailSlow], now_ns: int) -> None:
        """Of rounds that are open since the last call. Who was waited for has not changed since."""
        slow = {verdict.rack for verdict in judged}
        for round_ in rounds:
            waiting = round_.waiting
            if waiting and waiting <= slow:
                for rack in waiting:
                    lost_ns = max(now_ns - max(round_.looked_ns, round_.hidden_ns), 0)
                    self.lost_ns[rack] = self.lost_ns.get(rack, 0) + lost_ns
            round_.looked_ns = now_ns
        self.lost_ns = {rack: ns for rack, ns in self.lost_ns.items() if rack in slow}

    def move(
        self,
        proposer: Proposer,
        judged: Sequence[FailSlow],
        reports: Mapping[int, Report | None],
        live: frozenset[int],
        now_ns: int,
        detect_ns: int,
    ) -> list[Effect]:
        """Append the move that is due, if there is one and it may be appended."""
        if not proposer.may_append():
            return []
        due = self.next(proposer.log.appended, judged, reports, live, now_ns, detect_ns)
        if due is None:
            return []
        proposer.append(due)
        kind = RELIEVED if due.stage == AWAITED else MITIGATED
        return [Note(kind, {"slow_rack": due.rack, "stage": due.stage, "reason": due.reason})]

    def next(
        self,
        log: LogState,
        judged: Sequence[FailSlow],
        reports: Mapping[int, Report | None],
        live: frozenset[int],
        now_ns: int,
        detect_ns: int,
    ) -> Mitigation | None:
        """The move that is due. `log`: as far as it is written."""
        policy = log.policy
        if policy is None or not policy.acts or policy.lockstep:
            return None
        slow = {verdict.rack: verdict for verdict in reversed(judged)}
        price_ns = price_of_not_waiting(policy, reports, live)
        for rack in sorted(log.seats):
            calm = rack not in slow and rack in live and reports.get(rack) is not None
            if not calm:
                self._calm_ns.pop(rack, None)
            if rack in log.mitigated:
                limit_ns = CALM_DETECTS * detect_ns
                if calm and now_ns - self._calm_ns.setdefault(rack, now_ns) >= limit_ns:
                    return Mitigation(rack, AWAITED, "it is slow no more")
            elif rack in slow and self.lost_ns.get(rack, 0) >= price_ns > 0:
                lost = f"rounds have lost {self.lost_ns.pop(rack) // MS} ms with it"
                dearer = f"one without it costs {price_ns // MS} ms"
                return Mitigation(rack, NOT_AWAITED, f"{sentence_of(slow[rack])}; {lost}, {dearer}")
        return None


def price_of_not_waiting(
    policy: Policy, reports: Mapping[int, Report | None], live: frozenset[int]
) -> int:
    """ns: a round that does not wait for a rack misses what it does between two rounds, until a
    later one. 0: not known yet."""
    times = [report.step_ns for rack, report in reports.items() if report and rack in live]
    return fastest_ns(times) * gap_steps(policy.fragments, policy.period_steps)
