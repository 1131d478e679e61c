"""Compares a rack with its peers. This finds racks that are slow from the start.

A rack's pace is that of its newest samples, which it reports; no past is needed. With two racks
there is no median of others, and only the own past judges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from mend.detector.own_past import SHIFT_MIN, MeasuredPace

RACKS_MIN = 3
"""Least number of racks for a comparison."""


@dataclass(slots=True)
class PeerComparison:
    """`slow`: the racks that are slower than their peers now, and by which ratio. A rack is found
    slow when its shift from the median of the others exceeds 10 % by more than the margins of both,
    and is slow until the shift is below half of that."""

    slow: dict[int, float] = field(default_factory=dict)

    def compare(self, paces: Mapping[int, MeasuredPace]) -> tuple[frozenset[int], frozenset[int]]:
        """Returns the racks that have become slow, and those that are no longer slow. A rack whose
        pace is unknown (time 0) is neither compared nor counted as a peer."""
        before, known = self.slow, {r: paces[r] for r in sorted(paces) if paces[r].time > 0}
        self.slow = {}
        for rack, pace in known.items() if len(known) >= RACKS_MIN else ():
            others = [other for peer, other in known.items() if peer != rack]
            shift = math.log(pace.time) - median([math.log(other.time) for other in others])
            margin = math.hypot(pace.margin, median([other.margin for other in others]))
            limit = -math.log1p(-SHIFT_MIN) + margin
            if rack in before:
                limit = -math.log1p(-SHIFT_MIN / 2)
            if shift > limit:
                self.slow[rack] = math.exp(shift)
        return frozenset(self.slow.keys() - before), frozenset(before.keys() - self.slow)
