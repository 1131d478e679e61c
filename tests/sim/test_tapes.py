"""Tapes of simulated jobs with faults: every machine of every process decides the same again."""

from __future__ import annotations

import pytest

from mend.coordination.machines import machines_of
from mend.trace.format import Entry
from mend.trace.replay import replay
from mend.trace.state import decode_state, encode_state
from mend_lab.sim import World, tell
from tests.noted import pairs
from tests.sim.extent import by_length
from tests.traces import HUNDRED, by_hundred, read_pinned, trace_of

TAPED = 40
"""Seeds that are run with a tape, once: their invariants are asked here, not in test_seeds."""
ONE = 13
"""A long job that `make test` runs all the same."""
MIDDLE = 4
"""The tapes of every fourth seed are replayed from their middle, too."""


@pytest.mark.parametrize("seed", [*by_length(seed for seed in range(TAPED) if seed != ONE), ONE])
def test_every_process_of_a_seed_replays_with_equal_effects_from_any_place(seed: int) -> None:
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
    begun_anew = any(kind == "lineage" for p in world.processes() for kind, _ in pairs(p.notes))
    assert rounds <= len(world.checkers.commits) or begun_anew, "some may have been undone"
    assert rounds or not world.checkers.commits
    pinned = read_pinned()[seed]
    assert trace_of(world) == pinned, "python -m tests.traces --pin, if it is meant to be another"
    if seed % MIDDLE == 0:
        replay_from_the_middle(world)


def replay_from_the_middle(world: World) -> None:
    """Equal effects from there on: whatever a machine keeps is in its state, and what two of them
    share is shared again."""
    for process in world.processes():
        assert process.tape is not None
        entries = list(process.tape.entries())
        for middle in (len(entries) // 3, 2 * len(entries) // 3):
            machines = machines_of(process.tape.parts).named()
            for entry in entries[:middle]:
                assert isinstance(entry, Entry)
                machines[entry.machine].handle(entry.event, entry.now_ns)
            base = encode_state(machines)
            assert encode_state(decode_state(base)) == base
            found = replay(process.tape.parts, entries[middle:], base)
            assert found.difference is None, (process.me, middle, found.difference)
            assert found.events == len(entries) - middle


def test_nothing_is_recorded_that_nobody_asked_for() -> None:
    world = World(0)
    assert all(process.tape is None for process in world.processes())


def test_one_digest_of_a_hundred_seeds_says_that_one_is_another() -> None:
    """`python -m tests.traces --all` pins these."""
    traces = [(seed, f"{seed:012x}") for seed in range(2 * HUNDRED + 7)]
    first, second = by_hundred(traces)
    assert (first[0], second[0]) == (0, HUNDRED), "what is not whole has none"
    traces[HUNDRED + 3] = (HUNDRED + 3, "another")
    same, other = by_hundred(traces)
    assert (same, other[0]) == (first, HUNDRED)
    assert other != second
