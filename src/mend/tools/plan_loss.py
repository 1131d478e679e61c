"""What H and outer momentum cost in loss, as far as it was measured.

Percent above data parallel at equal tokens, of real racks with mend's default overlap, and the
momentum H / (H + 16) that was the default for any number of racks: 5M parameters, 1,408 steps, one
to three seeds, a peak learning rate of 7e-4 (docs/internals/quality.md, "Default settings"; a test
holds the figures to benchmarks/results/loss.jsonl). They rank settings; at 1.4e-3, the best rate
for both sides, H 32 is 3.8 % above with 2 racks and 8.9 % with 4. A number of racks that was not
run counts as the nearest that was, by its logarithm, the greater of two as near. Between two H that
were measured it is interpolated in log H; beyond them nothing is known but the direction. Codecs
but topk and powersgd cost nothing that was measured, so that a figure of one codec counts for all.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from mend.config.settings import MendConfig

Start = Literal["scratch", "warm"]

MEASURED: dict[Start, dict[int, dict[int, float]]] = {
    "scratch": {
        2: {16: 1.1, 32: -0.9, 64: 2.1, 128: 6.5},
        4: {16: 8.3, 32: 6.9, 128: 18.2},
        8: {16: 20.8, 32: 19.6, 128: 29.4},
    },
    "warm": {2: {16: -0.3, 32: -2.2, 128: 2.3}},
}
"""Where the racks begin -> racks -> H -> percent."""

NO_MOMENTUM: dict[Start, dict[int, float]] = {
    "scratch": {16: 7.7, 64: 9.8, 256: 5.0},
    "warm": {16: 3.7, 64: 3.9, 256: 2.1},
}
"""Added without outer momentum: of 4 racks and 3,072 steps in one program
(benchmarks/results/quality_gpu.md), above a momentum of 0.9 with the ramp."""


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
    """Return the loss of a job with these settings; any momentum and overlap count as the
    defaults."""
    period = config.sync_period_steps
    found: dict[Start, float] = {
        start: _between(by_racks[_nearest(start, config.racks)], period)
        + (0.0 if config.outer_momentum else _between(NO_MOMENTUM[start], period))
        for start, by_racks in MEASURED.items()
    }
    bound = period > max(MEASURED["scratch"][_nearest("scratch", config.racks)])
    return Loss(found["scratch"], found["warm"], bound)


def source_of(config: MendConfig) -> str:
    """What the figures were measured with, and what of that is not this job, in words."""
    runs = {start: _nearest(start, config.racks) for start in MEASURED}
    known = MEASURED["scratch"][runs["scratch"]]
    period = config.sync_period_steps
    notes = []
    if runs["scratch"] != config.racks:
        notes.append(f"{config.racks} racks were not measured")
    if period not in known:
        within = min(known) < period < max(known)
        notes.append(
            f"H {period} is interpolated" if within else f"H {period} is beyond what was measured"
        )
    text = (
        f"as 5M parameters in 1,408 steps at a learning rate of 7e-4 with {runs['scratch']} racks, "
        f"after a warm start with {runs['warm']}"
    )
    return "; ".join([text, *notes])


def _nearest(start: Start, racks: int) -> int:
    return min(sorted(MEASURED[start], reverse=True), key=lambda r: abs(math.log(r / racks)))


def _between(measured: dict[int, float], period: int) -> float:
    """Interpolated in log H; at the ends the last value."""
    known = sorted(measured)
    if period <= known[0] or period >= known[-1]:
        return measured[min(known, key=lambda h: abs(h - period))]
    above = next(h for h in known if h > period)
    below = known[known.index(above) - 1]
    share = math.log(period / below) / math.log(above / below)
    return measured[below] + share * (measured[above] - measured[below])
