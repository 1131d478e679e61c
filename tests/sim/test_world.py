"""The API of scenarios: calls that chain, and Python that comes back as it was."""

from __future__ import annotations

import dataclasses

import pytest

import mend.types
from mend.errors import ConfigError
from mend.types import MS, SECOND
from mend_lab.sim import WITNESS, Fault, Scenario, World, draw, python_of, tell
from mend_lab.sim.faults import sentence
from mend_lab.sim.generate import PLOTS
from tests.noted import pairs


def test_calls_chain_and_make_a_scenario() -> None:
    world = World(seed=7, racks=4).cut(0, 1, at=1.0, until=3.0).crash(2, at=5.0).heal(at=6.0)
    assert world.scenario.faults == (
        Fault("cut", SECOND, 3 * SECOND, 0, 1),
        Fault("crash", 5 * SECOND, 1 << 62, 2),
    )
    assert (world.scenario.seed, world.scenario.racks) == (7, 4)
    assert world.scenario.quiet_ns == 6 * SECOND
    report = world.run()
    assert report.problems == []
    assert report.scenario == world.scenario


def test_a_world_is_made_of_a_seed_a_scenario_or_fields() -> None:
    assert World(12).scenario == draw(12)
    assert World(draw(12)).scenario == draw(12)
    assert World(seed=12).scenario == Scenario(seed=12)
    assert World(racks=3, steps=9, step_ns=20 * MS).scenario.steps == (9, 9, 9)
    with pytest.raises(AssertionError, match="a seed or a scenario"):
        World(12, racks=3)


def test_one_value_per_rack() -> None:
    with pytest.raises(ConfigError, match="2 values for 3 racks"):
        Scenario(racks=3)


def test_a_fault_befalls_who_is_there() -> None:
    """One of a witness that the job did not have, or under its number on the wire, was an
    IndexError in the middle of the run."""
    for number, witness in ((WITNESS, False), (mend.types.WITNESS, True), (2, True)):
        with pytest.raises(ConfigError, match=rf"2 racks, .* witness, no \[{number}\]"):
            World(witness=witness).restart(number, at=0.1, until=0.2)
    with pytest.raises(ConfigError, match=r"no \[2\]"):
        Scenario(faults=(Fault("partition", 0, SECOND, racks=(1, 2)),))
    assert World(witness=True, ranks=2).crash(0, rank=1).restart(WITNESS, until=2.0).run().finished


@pytest.mark.parametrize("seed", range(0, 400, 8))
def test_the_python_of_a_scenario_makes_it_again(seed: int) -> None:
    scenario = draw(seed)
    assert eval(python_of(scenario), {"Scenario": Scenario, "Fault": Fault}) == scenario


def test_fixed_values_are_not_drawn() -> None:
    fixed = {"racks": 3, "period_steps": 20, "overlap_steps": 5, "k": 2, "fragments": 2}
    for seed in range(50):
        scenario = draw(seed, fixed)
        assert {name: getattr(scenario, name) for name in fixed} == fixed
        assert len(scenario.steps) == len(scenario.step_ns) == 3
        assert min(scenario.steps) >= 40


def test_every_plot_is_told_in_sentences() -> None:
    import random

    scenario = Scenario(racks=3, steps=(9, 9, 9), step_ns=(MS, MS, MS))
    for plot in PLOTS:
        for fault in plot(scenario, random.Random(1)):
            text = sentence(fault, scenario)
            assert "{" not in text
            assert text.startswith(("at ", "right after "))


def test_a_story_says_what_was_set_up_what_happened_and_how_it_ended() -> None:
    world = World(seed=5, racks=3).cut(0, 1, at=0.3, until=0.6).crash(WITNESS, at=0.5)
    story = tell(world, world.run())
    assert story.startswith("Seed 5. 3 racks, one rank each, with a witness; P = 2 fragments")
    assert "At 0.30 s nothing reaches rack 1 from rack 0, until 0.60 s." in story
    assert "At 0.50 s the witness crashes." in story
    assert "   0.500 s  the witness crashes" in story
    assert "the witness: racks 0,1,2 have met: the job begins" in story
    assert (
        "fragment 0 version 1 is decided: offers of racks 0, 1, 2 (all-in, 3 of 3 racks)" in story
    )
    assert "every invariant held" in story
    again = story.partition("To have it again:")[2]
    assert "World(Scenario(seed=5, racks=3" in again


def test_a_long_story_is_cut_in_the_middle() -> None:
    world = World(racks=2, steps=100, fragments=3, period_steps=4, step_ns=20 * MS)
    lines = tell(world, world.run()).splitlines()
    assert any("lines left out; --trace has them all" in line for line in lines)
    assert len(lines) < 90


@pytest.mark.parametrize("seed", [3, 7, 20])
def test_a_job_without_faults_keeps_its_first_coordinator(seed: int) -> None:
    """Late hellos, and racks that have no bytes yet, are no reason to stand or to step down."""
    drawn = draw(seed)
    scenario = dataclasses.replace(drawn, faults=(), non_finite=(), loss=0.0, duplicate=0.0)
    world = World(scenario)
    assert not world.run().problems
    noted = {kind for process in world.processes() for kind, _ in pairs(process.notes)}
    assert not noted & {"stands", "deposed", "takes-over", "gives-up", "no-quorum"}
