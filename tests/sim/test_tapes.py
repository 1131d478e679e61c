"""Tapes of simulated jobs with faults: every machine of every process decides the same again."""

from __future__ import annotations

import pytest

from mend.sim import World, tell
from mend.trace.replay import replay
from tests.traces import read_pinned, trace_of

TAPED = 40
"""Seeds that are run with a tape, once: their invariants are asked here, not in test_seeds."""


@pytest.mark.parametrize("seed", range(TAPED))
def test_every_process_of_a_seed_replays_with_equal_effects(seed: int) -> None:
    world = World(seed, record=True)
    report = world.run()
    assert not report.problems, tell(world, report)
    rounds = 0
    for process in world.processes():
        assert process.tape is not None
        found = replay(process.tape.parts, process.tape.entries())
        assert found.difference is None, (process.me, found.difference)
        assert found.events == len(process.tape.records) > 0
        rounds = max(rounds, 0 if process.dead else found.rounds)
    begun_anew = any(kind == "lineage" for p in world.processes() for kind, _ in p.notes)
    assert rounds <= len(world.checkers.commits) or begun_anew, "some may have been undone"
    assert rounds or not world.checkers.commits
    pinned = read_pinned()[seed]
    assert trace_of(world) == pinned, "python -m tests.traces --pin, if it is meant to be another"


def test_nothing_is_recorded_that_nobody_asked_for() -> None:
    world = World(0)
    assert all(process.tape is None for process in world.processes())
