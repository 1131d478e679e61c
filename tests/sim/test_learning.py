"""Racks that learn: each step goes a part of the way to one goal, as a gradient does.

The other simulated jobs add updates that do not depend on the weights. Those show whether work is
lost or counted twice, and not whether the model is any good. A rack that had slept trained its
whole script on an old version, while every offer of it was too old. It then added the same way once
more to what the others had merged. Nobody trained after that, and all ended `merged`, far away.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from torch import Tensor

from mend.types import MS, SECOND
from mend_lab.sim.scenario import Fault, Scenario, calm
from mend_lab.sim.world import World

STEPS = 100
RATE = 0.05
"""Part of the way that a step goes: a rack alone ends at (1 - RATE) ** STEPS = 0.006 of its way."""
NEAR = 0.1
SEEDS = (14, 23, 48, 56)
"""They ended 0.11 to 0.21 away."""


def asleep(seed: int) -> Scenario:
    """A hurried job of one fragment; a rack or two stand still for some time."""
    rng = random.Random(seed)
    racks, step_ms = rng.choice([2, 3, 3]), rng.choice([1, 5])
    faults = []
    for _ in range(rng.choice([1, 1, 2])):
        begin_ns = (100 + rng.randrange(2 * STEPS * step_ms)) * MS
        length_ns = rng.choice([200, 600, 2500, 3500]) * MS
        faults.append(Fault("freeze", begin_ns, begin_ns + length_ns, a=rng.randrange(racks)))
    return calm(
        seed=seed, racks=racks, fragments=1, steps=(STEPS,) * racks,
        step_ns=(step_ms * MS,) * racks,
        period_steps=20, overlap_steps=rng.choice([1, 5]), delay_ns=rng.choice([1, 5, 20]) * MS,
        jitter_ns=rng.choice([0, 5]) * MS, byte_ns=rng.choice([0, 100_000]), faults=tuple(faults),
        shutdown_ns=20 * SECOND,
    )  # fmt: skip


def gradient(world: World, rack: int, *_: object, **__: object) -> Sequence[Tensor]:
    """A step from the rack's weights towards 1."""
    training = world.processes()[rack].trainer
    assert training is not None
    return [(1 - parameter.detach()) * RATE for parameter in training.parameters]


@pytest.mark.parametrize("seed", SEEDS)
def test_racks_that_have_slept_end_near_the_goal(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "_update", gradient)
    world = World(asleep(seed))
    assert world.run().problems == []
    found = [process.trainer for process in world.processes() if process.trainer is not None]
    merged = [each for each in found if each.trainer.outcome.word == "merged"]
    assert len(merged) == world.scenario.racks, "a rack that did not merge asks nothing here"
    for training in merged:
        away = max(float((1 - each.detach()).abs().max()) for each in training.parameters)
        assert away < NEAR, f"rack {training.rank.me.rack} ends at {away:.3f} from the goal"


def test_the_outcome_tells_of_steps_that_the_end_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others stood still too, so the rack trained to its end on an old version. What it had
    done was added to theirs, and all ended `merged`."""
    monkeypatch.setattr(World, "_update", gradient)
    world = World(asleep(60))
    assert world.run().problems == []
    found = [process.trainer for process in world.processes() if process.trainer is not None]
    outcomes = [(each.rank.me.rack, each.trainer.outcome) for each in found]
    assert {outcome.word for _, outcome in outcomes} == {"merged"}
    told = {rack: "steps that it had made on an old version" in o.detail for rack, o in outcomes}
    assert told == {0: True, 1: False, 2: False}
