"""What is drawn for donors and keys, and that planted bugs show in it."""

from __future__ import annotations

import pytest

from mend_lab.sim import World, draw
from mend_lab.sim.scripted_faults import PULLED
from tests.noted import pairs
from tests.planting import Edit, planted

DONOR, KEYS = 43, 1465
"""A seed in which a donor dies, and one in which the key of the job is replaced."""

FOUND = "self.found, self.tries, self.retry_ns = orders.copy, 0, 0"
BUGS = {
    "failed pulls of a dead donor count for the next one": (
        DONOR,
        Edit("coordination.state_copy:StateCopies.read", FOUND, "self.found = orders.copy"),
        "joined, and got no copy of a training state",
    ),
    "a process accepts the first secret of its file alone": (
        KEYS,
        Edit("transport.security:Secrets.named", "self.all", "self.all[:1]"),
        "frames and pulls were refused for their key",
    ),
}


def test_donor_dies_while_its_state_is_pulled() -> None:
    world = World(DONOR)
    assert any(fault.after == PULLED for fault in world.scenario.faults)
    report = world.run()
    assert report.problems == []
    assert report.felt["restart"] > 1
    assert any(
        kind == "state-copied" for each in world.processes() for kind, _ in pairs(each.notes)
    )


@pytest.mark.slow
def test_job_trains_on_while_its_key_is_replaced() -> None:
    world = World(KEYS)
    assert world.scenario.rotates
    report = world.run()
    assert report.problems == []
    names = [world.network.secrets[number].own.name for number in world.scenario.targets]
    assert len(set(names)) == 1
    assert draw(KEYS).racks * 3 <= len(world.past), "each was started again three times"


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_shows(name: str) -> None:
    seed, edit, says = BUGS[name]
    with planted([edit]):
        report = World(seed).run(first=True)
    assert any(says in problem for problem in report.problems), report.problems
