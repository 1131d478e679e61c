"""What a job is predicted to lose against data parallel, and how well that is known.

All figures are of real racks and of 5M parameters in 1,408 steps (docs/internals/quality.md,
"Default settings"; a test holds them to benchmarks/results/loss.jsonl). They are percent of loss
above data parallel at equal tokens, at a peak of 1.4e-3: from random weights the best of three
learning rates for each side. After a warm start H 32 was run there (H 16, too, with eight racks in
lockstep), and nothing at a higher rate; how much other H differ from it is known at half of that
rate, with two racks.

In lockstep a result is applied when tau steps have passed, so tau counts; otherwise as soon as it
is there, and tau only limits the wait: the figures are of exchanges that take three to four steps.

A number of racks that was not run counts as the nearest that was, by its logarithm, the greater of
two as near. Between two H that were measured it is interpolated in log H; beyond them nothing is
known but the direction.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Literal, NamedTuple

from mend.codec.cost import measured_cost
from mend.config import describe
from mend.config.pair_warnings import OVERLAP_STEPS_DEFAULT, default_momentum, default_overlap
from mend.config.settings import MendConfig

Start = Literal["scratch", "warm"]
Known = Literal["measured", "estimated", "bound"]

PERIOD_BASE = 32

SCRATCH: dict[int, dict[int, float]] = {
    2: {16: 6.2, 32: 3.0, 64: 4.6, 128: 8.3},
    4: {16: 9.7, 32: 7.1, 128: 19.1},
    8: {16: 18.5, 32: 19.5},
}
"""Racks -> H -> percent from random weights, with the defaults, but int4 at H 16. One to three
seeds. Eight racks shared four GPUs, those at H 16 one."""

WARM: dict[int, float] = {2: 0.0, 4: 3.6, 8: 8.2}
"""Racks -> percent of H 32 after a warm start. Eight racks: one seed, on one GPU that also did
other work; above data parallel from random weights, which has the same bits."""

WARM_PERIODS: dict[int, float] = {16: -0.3, 32: -2.2, 128: 2.3}
"""H -> percent of two racks after a warm start, at a peak of 7e-4."""

LOCKSTEP: dict[Start, dict[int, dict[int, float]]] = {
    "scratch": {4: {16: 6.9, 32: 8.1}, 8: {16: 10.2, 32: 16.2}},
    "warm": {4: {32: 2.7}, 8: {16: 2.0, 32: 4.6}},
}
"""Start -> racks -> H -> percent in lockstep with the default tau, int4 at H 16. Eight racks after
a warm start: above data parallel from random weights, which has the same bits."""

LATE = 0.37
"""Percent for each step of tau in lockstep: of 4 racks, H 32, tau 8 and 2, one seed."""

ALONE: dict[Start, dict[int, float]] = {
    "scratch": {2: 17.6, 4: 32.4, 8: 50.7},
    "warm": {2: 9.8, 4: 16.8},
}
"""A rack that exchanges nothing."""

NO_MOMENTUM: dict[Start, dict[int, float]] = {
    "scratch": {16: 7.7, 64: 9.8, 256: 5.0},
    "warm": {16: 3.7, 64: 3.9, 256: 2.1},
}
"""Added without outer momentum: of 4 racks and 3,072 steps in one program
(benchmarks/results/quality_gpu.md), above a momentum of 0.9 with the ramp."""

MOMENTUM_SLACK = 0.02
AS_DEFAULT = ("outer_optimizer", "outer_lr", "merge", "apply_mode", "token_weighted_merge")


class Loss(NamedTuple):
    """Percent above data parallel. `known`: "measured", "estimated" from what was measured, or a
    "bound": at least that. `alone`: percent of a rack that exchanges nothing, of the nearest number
    of racks. `notes`: what of it was not measured, in words."""

    percent: float
    known: Known
    alone: float
    notes: tuple[str, ...] = ()

    @property
    def helps(self) -> bool:
        """Whether it is not known to be as bad as a rack alone, or worse."""
        return self.percent < self.alone

    def __str__(self) -> str:
        sign = {"measured": "", "estimated": "~", "bound": ">"}[self.known]
        return f"{sign}{self.percent:+z.0f}"


def loss_of(config: MendConfig) -> Loss:
    """Predict the loss of a job with these settings, from the start that they name."""
    start: Start = config.outer_start
    racks, by_period = _measured(config)
    period = config.sync_period_steps
    percent = _between(by_period, period) + LATE * _later(config)
    if not config.outer_momentum:
        percent += _between(NO_MOMENTUM[start], period)
    if (cost := measured_cost(config.codec, config.apply_mode)) is not None:
        percent += cost[1][start == "warm"]
    bounds = tuple(_beyond(config, by_period))
    guesses = (*_guessed(config, racks, by_period), *_of_lockstep(config))
    known: Known = "bound" if bounds else "estimated" if guesses else "measured"
    alone = ALONE[start][_nearest(ALONE[start], racks)]
    return Loss(percent, known, alone, bounds + guesses)


def source_of(config: MendConfig) -> str:
    """What the prediction is made from, and what of it was not measured, in words."""
    rate = {"scratch": "its best learning rate", "warm": "a learning rate of 1.4e-3"}
    base = f"5M parameters, 1,408 steps, each side at {rate[config.outer_start]}"
    return "; ".join([base, *loss_of(config).notes])


def _beyond(config: MendConfig, by_period: Mapping[int, float]) -> Iterator[str]:
    """What costs more than what was measured."""
    period, momentum = config.sync_period_steps, config.outer_momentum
    usual = default_momentum(period, config.racks)
    if period > max(by_period):
        yield f"H {period} is beyond {max(by_period)}, the longest that was run: at least that"
    if config.tau > OVERLAP_STEPS_DEFAULT:
        yield f"tau {config.tau} is beyond {OVERLAP_STEPS_DEFAULT}, the longest that was run"
    if momentum > usual + MOMENTUM_SLACK:
        yield f"outer_optimizer_momentum {momentum:g} is above its default, {usual:.2g}"


def _guessed(config: MendConfig, racks: int, known: Mapping[int, float]) -> Iterator[str]:
    """What was measured otherwise."""
    period, momentum = config.sync_period_steps, config.outer_momentum
    if racks != config.racks:
        yield f"{config.racks} racks count as {racks}"
    if min(known) < period < max(known) and period not in known:
        yield f"H {period} is interpolated"
    elif period < min(known):
        yield f"H {period} counts as {min(known)}"
    if config.outer_start == "warm" and period not in _runs(config)[1]:
        yield f"how H {period} differs from H {PERIOD_BASE} is known at half of that rate only"
    usual = default_momentum(period, config.racks)
    if not momentum:
        yield "what no momentum costs is that of 4 racks in one program"
    elif momentum < usual - MOMENTUM_SLACK:
        yield f"outer_optimizer_momentum {momentum:g} counts as its default, {usual:.2g}"
    if (cost := measured_cost(config.codec, config.apply_mode)) is not None:
        yield f"what {config.codec} costs is that of {cost[0]} with 4 racks, H 64 and 48 rounds"
    usual_settings = {each.field: each.default for each in describe()}
    for name in AS_DEFAULT:
        if (value := getattr(config, name)) != usual_settings[name]:
            yield f"{name} {value} counts as its default"


def _of_lockstep(config: MendConfig) -> Iterator[str]:
    if config.lockstep and not _locked(config):
        yield "lockstep counts as none"
    if later := _later(config):
        yield f"tau {config.tau} makes {LATE * later:+.1f}, as with 4 racks and H 32"


def _measured(config: MendConfig) -> tuple[int, dict[int, float]]:
    """The number of racks that this one counts as; H -> percent, by runs and by how H differs."""
    racks, run = _runs(config)
    if config.outer_start == "scratch":
        return racks, run
    shift = run[PERIOD_BASE] - WARM_PERIODS[PERIOD_BASE]
    return racks, {period: pct + shift for period, pct in WARM_PERIODS.items()} | run


def _runs(config: MendConfig) -> tuple[int, dict[int, float]]:
    """The same by runs alone."""
    start: Start = config.outer_start
    free = SCRATCH if start == "scratch" else {r: {PERIOD_BASE: pct} for r, pct in WARM.items()}
    known = {**free, **LOCKSTEP[start]} if config.lockstep else free
    racks = _nearest(known, config.racks)
    return racks, known[racks]


def _locked(config: MendConfig) -> bool:
    """Whether the figures are of lockstep."""
    return config.lockstep and _measured(config)[0] in LOCKSTEP[config.outer_start]


def _later(config: MendConfig) -> int:
    """Steps by which a result is applied later than in the runs that the figures are of."""
    return config.tau - default_overlap(config.sync_period_steps) if _locked(config) else 0


def _nearest(known: Collection[int], racks: int) -> int:
    return min(sorted(known, reverse=True), key=lambda r: abs(math.log(r / racks)))


def _between(measured: Mapping[int, float], period: int) -> float:
    """Interpolated in log H; at the ends the last value."""
    known = sorted(measured)
    if period <= known[0] or period >= known[-1]:
        return measured[min(known, key=lambda h: abs(h - period))]
    above = next(h for h in known if h > period)
    below = known[known.index(above) - 1]
    share = math.log(period / below) / math.log(above / below)
    return measured[below] + share * (measured[above] - measured[below])
