"""benchmarks.h200_cells: the cells, their order and their overlap. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

WARM_UP_MIN = 3
SLACK = 1.5
"""An exchange beside training takes longer than one that training waits for."""

END_S = 5.0
"""Kept of the budget for leaving."""

CALIBRATION = -1
"""Repeat number of the cells that only find out t_step and the time of an exchange."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of all cells. P fragments, one captured every `gap` steps."""

    fragments: int
    gap: int
    gaps_measured: int
    steps_max: int
    repeats: int
    delays_ms: tuple[int, ...]

    @property
    def period(self) -> int:
        return self.fragments * self.gap

    @property
    def measured(self) -> int:
        """Steps that count: whole gaps, so that every cell has as many captures as applies."""
        return self.gap * self.gaps_measured

    @property
    def tau_max(self) -> int:
        return min(self.period - 1, self.steps_max - self.measured)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run from the same start. mode: none | blocking | concurrent. tau 0: nothing overlaps."""

    repeat: int
    mode: str
    delay_ms: int
    tau: int
    warm_up: int
    measured: int

    @property
    def steps(self) -> int:
        return self.warm_up + self.measured

    def fields(self) -> dict[str, object]:
        return asdict(self)


def calibration(plan: Plan) -> list[Cell]:
    """Alone for t_step; then two exchanges that training waits for, of which the second counts."""
    return [
        Cell(CALIBRATION, "none", 0, 0, WARM_UP_MIN, 4),
        Cell(CALIBRATION, "blocking", 0, 1, 2, 2 * plan.gap - 1),
    ]


def overlaps(plan: Plan, step_ms: float, exchange_ms: float) -> dict[int, int]:
    """delay -> tau so that tau * t_step covers the delay and the exchange; at most tau_max."""
    return {
        delay: max(1, min(plan.tau_max, math.ceil((delay + SLACK * exchange_ms) / step_ms)))
        for delay in plan.delays_ms
    }


def cells(plan: Plan, taus: Mapping[int, int]) -> list[Cell]:
    """Return all cells, repeat by repeat, so that a disturbance of the machine meets every mode."""
    found = []
    for repeat in range(plan.repeats):
        found.append(Cell(repeat, "none", 0, 0, WARM_UP_MIN, plan.measured))
        for delay in plan.delays_ms:
            # An apply falls tau steps after its capture: from then on every gap has one of each.
            warm_up = max(WARM_UP_MIN, taus[delay])
            modes = ("blocking", "concurrent") if repeat % 2 == 0 else ("concurrent", "blocking")
            found += [Cell(repeat, m, delay, taus[delay], warm_up, plan.measured) for m in modes]
    return found


def expected_s(cell: Cell, gap: int, done: Sequence[tuple[Cell, float]]) -> float:
    """Seconds that a cell will take: as long as its like, else longer than any before it."""
    real = [(c, seconds) for c, seconds in done if c.repeat != CALIBRATION]
    alike = [s for c, s in real if (c.mode, c.delay_ms) == (cell.mode, cell.delay_ms)]
    if alike:
        return max(alike)
    waits = cell.delay_ms / 1e3 * (cell.steps // gap) if cell.mode == "blocking" else 0.0
    return max((seconds for _, seconds in done), default=0.0) + waits
