"""Units of data in simulated jobs with faults: none is merged twice, and none is lost."""

from __future__ import annotations

import dataclasses

import pytest

from mend_lab.sim import draw, problems_of
from mend_lab.sim.scenario import Scenario


def with_units(seed: int, units: int = 100_000) -> Scenario:
    """A drawn job whose scripts take two units per step, and end with their steps."""
    scenario = draw(seed)
    mode = "carry" if scenario.apply_mode == "overwrite" else scenario.apply_mode
    return dataclasses.replace(scenario, units=units, unit_batch=2, apply_mode=mode)


@pytest.mark.parametrize("seed", range(90))
def test_drawn_job_with_units_has_no_problem(seed: int) -> None:
    assert problems_of(with_units(seed)) == []
