"""Tapes of simulated jobs with faults: every machine of every process decides the same again."""

from __future__ import annotations

import subprocess

import pytest

from mend.coordination.machines import machines_of
from mend.trace.format import Entry
from mend.trace.replay import replay
from mend.trace.state import decode_state, encode_state
from mend_lab.sim import World, tell
from tests.noted import pairs
from tests.sim.extent import by_length
from tests.traces import ROOT, read_pinned, trace_of, traces_of_revision

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


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")
def test_traces_of_a_revision_are_those_that_it_pins() -> None:
    """Of the revision, whatever lies in the working tree; its worktree is removed."""
    pinned = git("show", "HEAD:tests/sim/traces.txt").splitlines()
    before = git("worktree", "list")
    assert traces_of_revision("HEAD", "3:4", jobs=1) == {3: pinned[3].split()[1]}
    assert git("worktree", "list") == before


def git(*words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True
    ).stdout
