"""A rack that joins goes on with the optimizer's state of another rack, of one step, whatever
breaks meanwhile; or begins fresh, and says so."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from mend.types import SECOND
from mend_lab.sim import World, draw
from mend_lab.sim.story import setup
from tests.noted import pairs
from tests.sim.extent import is_long

SEEDS = 24
"""Those of them in which a rack of a job that is not in lockstep is started again."""

JOB = {"fragments": 1, "steps": 110, "shutdown_ns": 60 * SECOND, "carries": True}


def notes(world: World, kind: str) -> list[dict[str, object]]:
    processes = [*world.processes(), *world.past]
    return [fields for each in processes for found, fields in pairs(each.notes) if found == kind]


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_seed_gives_a_rack_a_state_that_is_of_another_step(long: bool) -> None:
    """What each optimizer holds is checked after every step (`Checkers.watch`)."""
    seen = Counter[str]()
    for seed in [seed for seed in range(SEEDS) if is_long(seed) is long]:
        scenario = draw(seed)
        if scenario.lockstep or not any(fault.kind == "restart" for fault in scenario.faults):
            continue
        world = World(replace(scenario, carries=True))
        report = world.run()
        assert report.problems == [], f"{setup(scenario)}\n{report.problems}"
        seen["state-copied"] += len(notes(world, "state-copied"))
    assert seen["state-copied"] > 0, seen


def test_a_donor_that_dies_is_replaced() -> None:
    """Rack 0 is asked first. It dies at some moment around its copy; all ranks of rack 2 get the
    state of one rack."""
    donors = set[object]()
    for tenth in (0, 1, 2):
        world = World(seed=3, racks=3, ranks=2, witness=True, **JOB)
        world.restart(2, at=1.0, until=3.2).crash(0, at=3.3 + tenth / 10)
        report = world.run()
        assert report.problems == [], (tenth, report.problems)
        copied = notes(world, "state-copied")
        assert len({(each["donor"], each["step"]) for each in copied}) == 1, tenth
        assert len(copied) == 2
        assert notes(world, "state-fresh") == []
        donors.add(copied[0]["donor"])
    assert donors == {0, 1}, "it dies before its copy, and after it"
