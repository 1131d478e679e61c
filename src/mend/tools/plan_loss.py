"""What H, tau and outer momentum cost in loss, as far as it was measured.

Percent above data parallel at equal tokens: 5M parameters, 4 racks, 3,072 steps, three seeds
(docs/internals/quality.md; a test holds the figures to benchmarks/results/quality_gpu.md). Between
two H that were measured it is interpolated in log H; beyond
them nothing is known but the direction.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from mend.config.settings import MendConfig

Start = Literal["scratch", "warm"]

MEASURED: dict[tuple[bool, Start], dict[int, float]] = {
    (True, "scratch"): {16: -0.2, 64: 1.8, 256: 9.8},
    (True, "warm"): {16: -0.9, 64: -0.4, 256: 2.2},
    (False, "scratch"): {16: 7.5, 64: 11.6, 256: 14.8},
    (False, "warm"): {16: 2.8, 64: 3.5, 256: 4.3},
}
"""(momentum 0.9 with the ramp, or none; where the racks begin) -> H -> percent, without overlap."""

SHORT_PCT = 0.4
"""Added below H 64, where the default momentum is less than the measured one: a small GPT at H 16
was so much worse with .5 than with .9."""

OVERLAP_PCT: dict[Start, float] = {"scratch": 0.7, "warm": 0.1}
"""Added for tau 8 of H 64 that rises with the rounds."""


class Loss(NamedTuple):
    """Percent above data parallel. `bound`: H is beyond what was measured, so it is at least
    that."""

    scratch: float
    warm: float
    bound: bool

    def __str__(self) -> str:
        more = ">" if self.bound else ""
        return f"{more}{self.scratch:+z.0f}/{more}{self.warm:+z.0f}"


def loss_of(config: MendConfig) -> Loss:
    """Return the loss of a job with these settings; a momentum counts as the measured one."""
    momentum, period = config.outer_momentum > 0, config.sync_period_steps
    late = float(config.tau > 0)
    short = SHORT_PCT * (momentum and period < 64)
    scratch = (
        _between(MEASURED[momentum, "scratch"], period) + short + late * OVERLAP_PCT["scratch"]
    )
    warm = _between(MEASURED[momentum, "warm"], period) + short + late * OVERLAP_PCT["warm"]
    return Loss(scratch, warm, period > max(MEASURED[momentum, "scratch"]))


def _between(measured: dict[int, float], period: int) -> float:
    """Interpolated in log H; at the ends the last value."""
    known = sorted(measured)
    if period <= known[0] or period >= known[-1]:
        return measured[min(known, key=lambda h: abs(h - period))]
    above = next(h for h in known if h > period)
    below = known[known.index(above) - 1]
    share = math.log(period / below) / math.log(above / below)
    return measured[below] + share * (measured[above] - measured[below])
