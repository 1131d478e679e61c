"""The default outer step on small problems: what is merged is not worse than a rack alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks import unequal_loss
from benchmarks.small_problems import GPT, Cell, Row, alone_error, chosen, merged_error, row_of
from benchmarks.small_problems_batch import Racks, alone_errors, merged_errors
from mend.engine.loop.growing_offers import GROWN, GrowingOffers

STEPS, SEEDS = 400, 5
FORTY = chosen(40)
BAD = {Cell("linear0", "adamw", 128, 2, "turns", "int4"): 1.023}
"""Cells of these forty in which what is merged is worse, and how many times as great its error is:
three rounds, in which a mean gains nothing. benchmarks/results/small_problems.md has all cells."""


def of_all_seeds(
    cell: Cell, momentum: float | None = None, growth: list[float] | None = None
) -> Row:
    """`growth`: gets the greatest growth of the offers of each seed."""
    racks = Racks(cell, SEEDS, STEPS)
    merged = merged_errors(cell, STEPS, SEEDS, momentum, racks=racks)
    if growth is not None:
        growth += growth_of(racks, SEEDS)
    return row_of(cell, merged, alone_errors(cell, STEPS, SEEDS))


def growth_of(racks: Racks, seeds: int) -> list[float]:
    seen = [GrowingOffers() for _ in range(seeds)]
    greatest = [0.0] * seeds
    for fragment, moved_S in racks.moved:
        for seed, per_step in enumerate(moved_S.tolist()):
            greatest[seed] = max(greatest[seed], seen[seed].growth(fragment, per_step))
    return greatest


def test_forty_cells_with_the_defaults_are_bad_in_the_known_ones_only() -> None:
    growth: list[float] = []
    rows = [of_all_seeds(cell, growth=growth) for cell in FORTY]
    bad = {row.cell: row.ratio for row in rows if not row.good}
    assert set(bad) == set(BAD), bad
    assert bad == pytest.approx(BAD, abs=0.01)
    assert len(growth) == SEEDS * len(FORTY)
    assert max(growth) < GROWN, "a warning of growing offers in a sound job"


@pytest.mark.parametrize("name", ["linear", "quadratic1"])
def test_offers_momentum_too_long_grow_beyond_their_peak(name: str) -> None:
    found: dict[float | None, list[float]] = {None: [], 0.9: []}
    for momentum, growth in found.items():
        of_all_seeds(Cell(name, "adamw", 4, 2), momentum, growth)
    assert sum(each >= GROWN for each in found[0.9]) >= SEEDS - 1, found
    assert max(found[None]) < GROWN


class WarmingUp(Racks):
    """Their learning rate rises for a tenth of the steps."""

    def step(self, racks: Sequence[int]) -> None:
        peak = self.rate
        self.rate = peak * min(1.0, 10 * (self.made_R.max() + 1) / STEPS)
        super().step(racks)
        self.rate = peak


def test_offers_of_a_byte_gpt_that_warms_up_do_not_grow_beyond_their_peak() -> None:
    cell, seeds = Cell(GPT, "adamw", 4, 2), 1
    racks = WarmingUp(cell, seeds, STEPS)
    (error,) = merged_errors(cell, STEPS, seeds, racks=racks)
    assert error < racks.problem.error(racks.problem.start(0)).item() / 2
    assert 0.0 < max(growth_of(racks, seeds)) < GROWN


def test_row_tells_the_best_rack_from_the_mean_one() -> None:
    row = row_of(Cell("linear"), [1.0, 1.0], [[0.5, 1.9], [0.7, 1.3]])
    assert (row.alone, row.least) == ([1.2, 1.0], [0.5, 0.7])
    assert row.good
    assert not row.good_beside_the_best


def test_momentum_too_long_for_the_period_makes_more_cells_bad() -> None:
    """The forty cells see it: .9 at every period, as it was."""
    short = [cell for cell in FORTY if cell.period <= 4 and cell.optimizer == "adamw"]
    ratios = [of_all_seeds(cell, momentum=0.9).ratio for cell in short]
    assert len(short) > 5
    assert sum(ratio > 2 for ratio in ratios) > 5


@pytest.mark.parametrize(
    "cell",
    [
        Cell("mlp", "adamw", 16, 2, "slow"),
        Cell("quadratic100", "adamw", 4, 2, "turns", "int4"),
        Cell("linear", "sgd", 16, 4, "jitter"),
        Cell("linear", "adamw", 16, 3, unequal_loss.SPEEDS),
        Cell("gpt", "adamw", 16, 2, "jitter", "int4"),
    ],
    ids=lambda cell: "-".join(map(str, cell)),
)
def test_all_seeds_at_once_have_the_errors_of_the_reference(cell: Cell) -> None:
    steps, seeds = 40, 2
    merged = [merged_error(cell, steps, seed) for seed in range(seeds)]
    alone = [alone_error(cell, steps, seed) for seed in range(seeds)]
    assert merged_errors(cell, steps, seeds) == pytest.approx(merged, rel=1e-4)
    assert np.array(alone_errors(cell, steps, seeds)) == pytest.approx(np.array(alone), rel=1e-4)


@pytest.mark.parametrize("apart", [0.0, unequal_loss.APART])
def test_rules_for_unequal_racks_are_one_where_racks_are_in_step(apart: float) -> None:
    """And with the speeds 1 : .5 : .25 they are three."""
    cell = Cell("quadratic100", "sgd", 16, 3, "1/1/1")
    equal = unequal_loss.ratios(cell, 48, 2, apart, falling=True)
    assert equal["alike"] == pytest.approx(equal["tokens"], rel=1e-6)
    assert equal["rate"] == pytest.approx(equal["tokens"], rel=1e-6)
    unequal = cell._replace(timing=unequal_loss.SPEEDS)
    found = unequal_loss.ratios(unequal, 48, 2, apart, falling=True)
    assert len({round(each[0], 4) for each in found.values()}) == 3


def test_goals_of_the_racks_have_the_common_one_as_their_mean() -> None:
    cell = Cell("linear", "sgd", 16, 3)
    plain, moved = (
        unequal_loss.racks_of(cell, 1, 4, apart, falling=False)
        for apart in (0.0, unequal_loss.APART)
    )
    x_RTBI, shift_RTB = plain.data[0][0], (moved.data[1] - plain.data[1])[0]
    goals_RI = [
        np.linalg.lstsq(x_TBI.reshape(-1, 16), shift_TB.reshape(-1))[0]
        for x_TBI, shift_TB in zip(x_RTBI, shift_RTB, strict=True)
    ]
    assert np.abs(np.mean(goals_RI, 0)).max() < 1e-4
    goal = plain.problem.goal_I.norm().item()
    lengths = np.linalg.norm(goals_RI, axis=1)
    assert lengths.mean() == pytest.approx(unequal_loss.APART * goal, rel=1e-3)
