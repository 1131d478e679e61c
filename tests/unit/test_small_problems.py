"""The default outer step on small problems: what is merged is not worse than a rack alone."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import unequal_loss
from benchmarks.small_problems import Cell, alone_error, measure, merged_error
from benchmarks.small_problems_batch import alone_errors, merged_errors

STEPS, SEEDS = 400, 2
CELLS = [
    Cell("linear0", "sgd", 16, 2, "turns"),
    Cell("mlp", "adamw", 64, 2, "slow"),
    Cell("logistic", "adamw", 128, 2, "lockstep", "int4"),
]
LONG = [
    Cell("quadratic100", "adamw", 1, 2, "turns"),
    Cell("mlp", "adamw", 4, 2, "lockstep"),
    Cell("linear", "adamw", 16, 4, "jitter", "int4"),
]
"""A few of the cells of benchmarks/results/small_problems.md, which also has those that fail."""


@pytest.mark.parametrize(
    "cell",
    [*CELLS, *(pytest.param(cell, marks=pytest.mark.slow) for cell in LONG)],
    ids=lambda cell: "-".join(map(str, cell)),
)
def test_merged_model_default_outer_step_is_not_worse_than_alone(cell: Cell) -> None:
    row = measure(cell, STEPS, SEEDS)
    assert row.good, f"{row.ratio:.3f} times the error of a rack alone"


def test_merged_model_momentum_too_long_for_the_period_is_found() -> None:
    cell = Cell("quadratic100", "adamw", 4)
    assert measure(cell, STEPS, seeds=1, momentum=0.9).ratio > 10


@pytest.mark.parametrize(
    "cell",
    [
        Cell("mlp", "adamw", 16, 2, "slow"),
        Cell("quadratic100", "adamw", 4, 2, "turns", "int4"),
        Cell("linear", "sgd", 16, 4, "jitter"),
        Cell("linear", "adamw", 16, 3, unequal_loss.SPEEDS),
    ],
    ids=lambda cell: "-".join(map(str, cell)),
)
def test_all_seeds_at_once_have_the_errors_of_the_reference(cell: Cell) -> None:
    steps, seeds = 40, 2
    merged = [merged_error(cell, steps, seed) for seed in range(seeds)]
    alone = [alone_error(cell, steps, seed) for seed in range(seeds)]
    assert merged_errors(cell, steps, seeds) == pytest.approx(merged, rel=1e-4)
    assert alone_errors(cell, steps, seeds) == pytest.approx(alone, rel=1e-4)


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
