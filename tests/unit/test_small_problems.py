"""The default outer step on small problems: what is merged is not worse than a rack alone."""

from __future__ import annotations

import pytest

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
    ],
    ids=lambda cell: "-".join(map(str, cell)),
)
def test_all_seeds_at_once_have_the_errors_of_the_reference(cell: Cell) -> None:
    steps, seeds = 40, 2
    merged = [merged_error(cell, steps, seed) for seed in range(seeds)]
    alone = [alone_error(cell, steps, seed) for seed in range(seeds)]
    assert merged_errors(cell, steps, seeds) == pytest.approx(merged, rel=1e-4)
    assert alone_errors(cell, steps, seeds) == pytest.approx(alone, rel=1e-4)
