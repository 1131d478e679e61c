"""Evaluates the cells of a sweep: rows with intervals, and whether the bits are equal.
Reads no file, prints nothing.

Ratios are taken within a repeat (a seed at a place), where the modes ran next to each other; the
bootstrap draws repeats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.delay_sweep import cost_model as line
from benchmarks.delay_sweep.plan import BLOCKING, CALIBRATION, CONCURRENT, MODES, NONE, Place, Sweep
from benchmarks.delay_sweep.read import Measured
from benchmarks.delay_sweep.state import Done

RESAMPLES = 10_000
CONFIDENCE_PCT = 95
SEED = 2501_18512
"""Seed of the bootstrap: the same cells give the same intervals."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over repeats. No interval (None) for a single one."""

    mean: float
    low: float | None
    high: float | None
    repeats: int


def estimate(values: Sequence[float]) -> Estimate:
    """The mean and its bootstrap percentile interval."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, None, None, len(values))
    chance = np.random.default_rng(SEED)
    drawn = chance.choice(np.asarray(values), size=(RESAMPLES, len(values))).mean(axis=1)
    tail = (100 - CONFIDENCE_PCT) / 2
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return Estimate(mean, float(low), float(high), len(values))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One mode at one place."""

    place: Place
    mode: str
    overlap_steps: int
    step_ms: float
    """t_step, without exchange, at this place."""
    tokens_per_s: Estimate
    share: Estimate
    """Share of the throughput without exchange, in the same repeat."""
    share_predicted: float
    stall_ms: Estimate
    """Per round."""
    stall_ms_predicted: float

    @property
    def hidden_ms(self) -> float:
        """tau * t_step: what an exchange may take without being waited for."""
        return self.overlap_steps * self.step_ms


def exchange_ms(sweep: Sweep, done: Sequence[Done]) -> float:
    """X of the analytic line: what blocking waits beyond the delay, where the delay is least.
    The one number of the line that is fitted; 0 as long as nothing blocking was run."""
    blocking = [one for one in done if one.cell.mode == BLOCKING]
    if not blocking:
        return 0.0
    least = min(one.cell.place.delay_ms for one in blocking)
    return max(
        0.0,
        fmean(
            one.measured.stall_ms_per_round
            - line.blocking_stall_ms(least, one.cell.place.distribution, sweep.pulls, 0.0)
            for one in blocking
            if one.cell.place.delay_ms == least
        ),
    )


def rows(sweep: Sweep, done: Sequence[Done]) -> list[Row]:
    """Return the rows of places that have a repeat without exchange, in the sweep's order."""
    counted = [one for one in done if one.cell.seed != CALIBRATION]
    beyond_ms = exchange_ms(sweep, counted)
    found = []
    for place in sweep.places:
        here = {(o.cell.mode, o.cell.seed): o for o in counted if o.cell.place == place}
        alone = {seed: one.measured for (mode, seed), one in here.items() if mode == NONE}
        for mode in MODES:
            repeats = [one for (m, seed), one in here.items() if m == mode and seed in alone]
            if repeats:
                found.append(_row(sweep, mode, repeats, alone, beyond_ms))
    return found


def _row(
    sweep: Sweep,
    mode: str,
    repeats: Sequence[Done],
    alone: Mapping[int, Measured],
    beyond_ms: float,
) -> Row:
    cell = repeats[0].cell
    step_ms = fmean(measured.step_ms for measured in alone.values())
    stall_ms = _predicted_stall_ms(sweep, mode, cell.place, cell.overlap_steps, step_ms, beyond_ms)
    tokens = [one.measured.tokens_per_s for one in repeats]
    return Row(
        place=cell.place,
        mode=mode,
        overlap_steps=cell.overlap_steps,
        step_ms=step_ms,
        tokens_per_s=estimate(tokens),
        share=estimate(
            [one.measured.tokens_per_s / alone[one.cell.seed].tokens_per_s for one in repeats]
        ),
        share_predicted=line.throughput_share(stall_ms, step_ms, sweep.gap_steps),
        stall_ms=estimate([one.measured.stall_ms_per_round for one in repeats]),
        stall_ms_predicted=stall_ms,
    )


def _predicted_stall_ms(
    sweep: Sweep, mode: str, place: Place, tau: int, step_ms: float, beyond_ms: float
) -> float:
    delay = (place.delay_ms, place.distribution, sweep.pulls, beyond_ms)
    if mode == BLOCKING:
        return line.blocking_stall_ms(*delay)
    if mode == CONCURRENT:
        in_flight = line.rounds_in_flight(tau, sweep.gap_steps)
        return line.concurrent_stall_ms(*delay, hidden_ms=tau * step_ms, in_flight=in_flight)
    return 0.0


# ------------------------------------------------------------------ bits


@dataclass(frozen=True, slots=True)
class Bits:
    """Cells that must have trained the same, compared bit for bit."""

    compared: int
    """Cells with exchange that were compared with another one of their seed and tau."""
    pairs: int
    """Repeats in which blocking and concurrent were both there."""
    losses: int
    """Recorded losses per cell; 0: the script records none."""
    differences: tuple[str, ...]
    """One sentence per cell that differs from the first of its group."""
    script_differs: str
    """The script's own: two runs without exchange that differ; empty: none does."""

    @property
    def equal(self) -> bool:
        return not self.differences


def compare_bits(done: Sequence[Done]) -> Bits:
    """The delay does not change what is computed: cells of one seed and one tau have the same
    losses and decide the same digests, blocking or concurrent, whatever the delay."""
    groups: dict[tuple[int, int], list[Done]] = defaultdict(list)
    alone: dict[int, list[Done]] = defaultdict(list)
    repeats: dict[tuple[int, Place], int] = defaultdict(int)
    for one in done:
        if one.cell.seed == CALIBRATION:
            continue
        if one.cell.mode == NONE:
            alone[one.cell.seed].append(one)
        else:
            groups[one.cell.seed, one.cell.overlap_steps].append(one)
            repeats[one.cell.seed, one.cell.place] += 1
    differences = [text for group in groups.values() for text in _differences(group, whole=True)]
    own = [text for group in alone.values() for text in _differences(group, whole=False)]
    return Bits(
        compared=sum(len(group) for group in groups.values() if len(group) > 1),
        pairs=sum(count == 2 for count in repeats.values()),
        losses=max(
            (_losses(one.measured) for group in groups.values() for one in group), default=0
        ),
        differences=tuple(differences),
        script_differs=own[0] if own else "",
    )


def _losses(measured: Measured) -> int:
    return sum(map(len, measured.losses.values()))


def _differences(group: Sequence[Done], *, whole: bool) -> Iterator[str]:
    """Each against the first. Not `whole`: as far as both go, for runs of different length."""
    first = group[0]
    for other in group[1:]:
        pairs = (
            ("loss", first.measured.losses, other.measured.losses),
            ("commit", first.measured.commits, other.measured.commits),
        )
        for what, one, two in pairs:
            if where := _first_difference(one, two, whole=whole):
                yield f"{what} of {where} differs in {first.cell.key} and {other.cell.key}"
                break


def _first_difference(
    one: Mapping[str, Sequence[Any]], two: Mapping[str, Sequence[Any]], *, whole: bool
) -> str:
    """Say where they differ; empty: nowhere. Floats are compared as text, so NaN equals NaN."""
    if one.keys() != two.keys():
        return f"{sorted(one)} and {sorted(two)}"
    for who in one:
        paired = zip_longest(one[who], two[who]) if whole else zip(one[who], two[who], strict=False)
        for number, (a, b) in enumerate(paired, start=1):
            if repr(a) != repr(b):
                return f"{who}, number {number}: {a} and {b}:"
    return ""
