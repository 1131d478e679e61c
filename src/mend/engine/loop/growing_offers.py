"""Finds fragments whose offers grow beyond what training at its peak made of them."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from mend.consensus.records import Commit
from mend.events.kinds import OffersGrow

ROUNDS = 8
"""Newest rounds of a fragment whose median counts: one batch with a large gradient is no trend."""

SETTLED_ROUNDS = 32
"""Rounds of a fragment before its peak may be settled. Then the peak is so too if it lies in the
first half of the rounds: while a learning rate warms up, the newest offers are the largest."""

FALLEN = 0.75
"""Share of the peak to which the median has fallen when the peak is settled. A schedule that raises
its rate again leads back to the peak, not beyond it."""

GROWN = 1.5
"""Growth beyond a settled peak from which on there is a warning. In the small problems it is at
most 1.2 with the default momentum (docs/internals/quality.md#small-problems)."""


@dataclass
class _Fragment:
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS))
    rounds: int = 0
    peak: float = 0.0
    peak_round: int = 0
    settled: bool = False


class GrowingOffers:
    """The offers of one job that were merged, by fragment."""

    def __init__(self) -> None:
        self._fragments: dict[int, _Fragment] = {}
        self._warned = False

    def warning(self, commit: Commit) -> OffersGrow | None:
        """Take the next commit of weights; returns the warning, once. A closing offer has few steps
        and does not count."""
        moved = [each.norm / each.steps for each in commit.members if not each.closing]
        if self._warned or not moved:
            return None
        growth = self.growth(commit.fragment, statistics.fmean(moved))
        if growth < GROWN:
            return None
        self._warned = True
        return OffersGrow(commit.fragment, commit.version, growth)

    def growth(self, fragment: int, per_step: float) -> float:
        """Take the mean magnitude per step of the offers of one round; returns the median of the
        newest rounds relative to the settled peak, 0 before it is settled."""
        seen = self._fragments.setdefault(fragment, _Fragment())
        seen.recent.append(per_step)
        seen.rounds += 1
        if len(seen.recent) < ROUNDS:
            return 0.0
        now = statistics.median(seen.recent)
        if seen.settled:
            return now / seen.peak
        if now > seen.peak:
            seen.peak, seen.peak_round = now, seen.rounds
        long_ago = seen.rounds >= max(SETTLED_ROUNDS, 2 * seen.peak_round)
        seen.settled = long_ago and seen.peak > 0 and now <= FALLEN * seen.peak
        return 0.0
