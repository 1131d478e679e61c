"""Racks that average the moments of their optimizers, whatever breaks meanwhile."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from mend.engine.compute.numerics import Numerics
from mend_lab.sim import World, draw
from mend_lab.sim.scenario import Scenario
from mend_lab.sim.story import setup

SEEDS = (2, 5, 6, 12, 14, 15)
"""Short ones of 2 to 4 racks, in lockstep and not, with faults of several kinds."""
STALE = 13
"""Racks that are started again with what they had forgotten; as long as all others together."""


def with_moments(seed: int) -> Scenario:
    """What the seed draws, and first moments every period, second ones every second."""
    scenario = draw(seed)
    period = scenario.period_steps
    return replace(scenario, moments=(period, 2 * period))


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param((STALE,), marks=pytest.mark.slow)])
def test_no_seed_breaks_an_average_or_a_book(seeds: tuple[int, ...]) -> None:
    """Every merge of moments is computed again (`sim.moment_checks`); ledgers, digests, ends are
    judged as ever."""
    seen = Counter[str]()
    for seed in seeds:
        scenario = with_moments(seed)
        world = World(scenario)
        report = world.run()
        assert report.problems == [], f"{setup(scenario)}\n{report.problems}"
        seen["merges"] += sum(
            fragment >= scenario.fragments for fragment, _ in world.checkers.commits
        )
        seen["computed again"] += world.checkers.moments.compared
    assert seen["merges"] > 30, seen
    assert seen["computed again"] > 30, seen


def test_deltas_merged_by_the_rules_of_weights_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = {"seed": 3, "moments": (12, 18), "steps": 60, "momentum": 0.5, "overlap_steps": 2}
    assert World(**job).run().problems == []
    monkeypatch.setattr(Numerics, "of", lambda self, moments: self)
    assert any("beside the mean" in each for each in World(**job).run().problems)
