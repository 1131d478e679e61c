"""Finds the cause of a slowdown by a micro-benchmark.

The benchmark runs once while the rank is healthy, as soon as its past is known, for comparison, and
once per verdict. The training thread measures a matrix product at the end of a step and, over some
steps, the wait before the forward (`Validate`). Pulls over the lane from the same rank of the other
racks follow, one after another (`Probe`). It never runs if the detector does not validate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mend.coordination.events import Effect, Note, Probe, Probed, Validate, Validated
from mend.detector import Cause, cause_of
from mend.errors import require
from mend.events.kinds import RackSlowCause
from mend.types import MS, SECOND, Address

STEPS = 4
"""Steps over which the wait before the forward is measured."""

PROBES_NS = 500 * MS
"""After this time no further pull begins; racks not probed by then are not judged."""

PROBE_NS_MAX = SECOND
"""A probe that takes longer counts as this long."""

LANE_MARGIN_NS = 10 * MS
"""A lane is slow only if its pull takes this much longer. A pull over loopback takes a millisecond,
and several if a thread waits for a processor."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """`lanes`: duration of a pull by other rack, ns. 0, negative or missing: unknown."""

    gemm_ns: int = 0
    waited_ppm: int = -1
    lanes: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class CauseSearch:
    """The search of one rank. `healthy`: measurements before any verdict. `cause`: of the verdict
    in force."""

    rack: int
    rank: int
    healthy: Measurements | None = None
    cause: Cause | None = None
    gemm_ns: int = 0
    """Time of the newest matrix product."""
    _number: int = 0
    """Number of the newest benchmark; answers to older ones are dropped."""
    _ratio: float = 0.0
    """Ratio of the verdict that the benchmark is made for; 0: for none."""
    _found: Measurements | None = None
    """Results of the running benchmark, once the training thread has answered."""
    _holders: dict[int, Address] = field(default_factory=dict)
    """Racks that are not probed yet, ascending."""
    _asked: int = -1
    """The rack that is being probed; -1: none."""
    _asked_ns: int = 0
    _until_ns: int = 0

    def begin(self, ratio: float = 0.0) -> list[Effect]:
        """`ratio`: of a verdict; 0: the rank is healthy."""
        self.over()
        self._ratio = ratio
        return [Validate(self._number, STEPS)]

    def over(self) -> None:
        """End the search with the verdict; results still to come are dropped."""
        self._number, self._ratio, self._found, self._asked = self._number + 1, 0.0, None, -1
        self.cause = None

    def on_validated(
        self, event: Validated, holders: Mapping[int, Address], now_ns: int
    ) -> list[Effect]:
        """The training thread has answered. `holders`: lanes of the same rank in the other
        racks."""
        if event.number != self._number or self._found is not None:
            return []
        self.gemm_ns = event.gemm_ns
        self._found = Measurements(event.gemm_ns, event.waited_ppm)
        self._holders = {rack: holders[rack] for rack in sorted(holders)}
        self._until_ns = now_ns + PROBES_NS
        return self._next(now_ns)

    def on_probed(self, event: Probed, now_ns: int) -> list[Effect]:
        """A probe has ended. A failed one does not measure the link."""
        if event.number != self._number or event.rack != self._asked:
            return []
        return self._took(0 if event.error else now_ns - self._asked_ns, now_ns)

    def due_ns(self) -> list[int]:
        return [self._asked_ns + PROBE_NS_MAX] if self._asked >= 0 else []

    def tick(self, now_ns: int) -> list[Effect]:
        """End a probe that takes too long."""
        late = self._asked >= 0 and now_ns >= self._asked_ns + PROBE_NS_MAX
        return self._took(PROBE_NS_MAX, now_ns) if late else []

    def _took(self, ns: int, now_ns: int) -> list[Effect]:
        found = require(self._found, "probes follow the training thread's answer")
        if ns:
            self._found = replace(found, lanes={**found.lanes, self._asked: ns})
        self._asked = -1
        return self._next(now_ns)

    def _next(self, now_ns: int) -> list[Effect]:
        """The next probe, or the verdict when all have ended."""
        if self._holders and now_ns < self._until_ns:
            self._asked, self._asked_ns = min(self._holders), now_ns
            return [Probe(self._number, self._asked, self._holders.pop(self._asked))]
        self._number += 1
        measured, self._found = require(self._found, "nothing was measured"), None
        if not self._ratio:
            self.healthy = measured
            return []
        return [self._judge(measured)]

    def _judge(self, measured: Measurements) -> Note:
        before = self.healthy or Measurements()
        known = before.gemm_ns and measured.gemm_ns
        gemm = measured.gemm_ns / before.gemm_ns if known else 0.0
        lanes = {r: ns / before.lanes[r] for r, ns in measured.lanes.items() if r in before.lanes}
        knows_input = min(before.waited_ppm, measured.waited_ppm) >= 0 and self._ratio > 1.0
        longer = self._ratio * measured.waited_ppm - before.waited_ppm
        waited = longer / 1e6 / (self._ratio - 1.0) if knows_input else 0.0
        slow = {
            r: ratio
            for r, ratio in lanes.items()
            if measured.lanes[r] - before.lanes[r] >= LANE_MARGIN_NS
        }
        self.cause = cause_of(self._ratio, gemm, waited, slow)
        return Note(
            RackSlowCause(
                slow_rack=self.rack,
                slow_rank=self.rank,
                cause=self.cause.kind,
                link_to=self.cause.rack,
                ratio=round(self._ratio, 2),
                gemm_ratio=round(gemm, 2) if known else None,
                input_share=round(waited, 2) if knows_input else None,
                lane_ratios={str(r): round(x, 2) for r, x in lanes.items()},
            )
        )
