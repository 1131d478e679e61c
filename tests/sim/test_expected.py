"""Rounds that wait for named racks: they close when these are in, and everything else holds."""

from __future__ import annotations

import pytest

from mend.types import MS, SECOND
from mend_lab.sim import World
from mend_lab.sim.generate import draw
from mend_lab.sim.scenario import calm

GRACE_NS = 20 * SECOND
"""Nobody would wait so long."""


def reasons(expected: tuple[int, ...]) -> list[str]:
    """Of the rounds of three racks, the last of which is five times slower."""
    world = World(
        calm(
            racks=3, steps=(96, 96, 20), step_ns=(50 * MS, 50 * MS, 250 * MS), grace_ns=GRACE_NS,
            period_steps=12, overlap_steps=3, expected=expected,
        )
    )  # fmt: skip
    world.run()
    found = list(world.checkers.commits.values())
    assert found
    for commit in found:
        if commit.closed_by == "expected-in":
            assert set(expected) <= {member.rack for member in commit.members}
    return [commit.reason for commit in found]


def test_a_round_does_not_wait_for_racks_that_are_not_expected() -> None:
    named = reasons((0, 1))
    assert named.count("expected-in, without rack 2") > len(named) // 2
    every = reasons(())
    assert not any(reason.startswith("expected-in") for reason in every)
    assert len(named) > len(every), "who waits for the slow rack has fewer rounds"


@pytest.mark.parametrize("seed", range(12))
def test_the_invariants_hold_whoever_is_expected(seed: int) -> None:
    """With faults; the checkers look at each step."""
    scenario = draw(seed, {"expected": (seed % 2,), "lockstep": False})
    World(scenario).run()
