"""Checkpoints under faults, and jobs that begin with the versions of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mend.coordination import admission
from mend.errors import CheckpointError
from mend.types import MS, Peer
from mend_lab.sim.generate import draw
from mend_lab.sim.world import World
from tests.sim.extent import is_long

SEEDS = [seed for seed in range(12) if not is_long(seed)]
"""They take some seconds; draw more by hand."""


@pytest.mark.parametrize(
    "first", [7, pytest.param(0, marks=pytest.mark.slow)], ids=["resumed", "from the start"]
)
def test_checkpoints_lie_at_one_place_of_the_log_whatever_fails(first: int) -> None:
    """Take-overs, restarts, joiners, new lineages and snapshots behind a Genesis with versions.
    With every odd seed training goes on while files are written, through rounds, deaths, the
    end."""
    found, made = {}, 0
    for seed in SEEDS:
        scenario = draw(seed)
        cut = {"cut_step": min(scenario.steps) // 2, "cut_writes_ns": seed % 2 * 700 * MS}
        world = World(replace(scenario, first=first, **cut))
        if problems := world.run().problems:
            found[seed] = problems
        made += len(world.checkers.cuts_written)
    assert found == {}
    assert made > 3 * len(SEEDS) // 4, "most of the jobs make one"


def of_another_version() -> World:
    """Rack 1 has read a checkpoint of version 8, all others one of version 7."""
    world = World(racks=3, first=7)
    leader = world.trainings[Peer(1, 0)].rank.leader
    assert leader is not None
    assert leader.hello.resume is not None
    versions = (8,) * len(leader.hello.resume.versions)
    resume = replace_word(leader.hello.resume, versions=versions)
    leader.hello = replace_word(leader.hello, resume=resume)
    return world


def replace_word(word: Any, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(word, **changes)


def test_a_rack_that_resumes_other_versions_is_refused() -> None:
    world = of_another_version()
    world.run()
    failures = {peer.rack: training.failure for peer, training in world.trainings.items()}
    assert isinstance(failures[1], CheckpointError)
    assert "its part of the checkpoint is of versions (8, 8)" in str(failures[1])
    assert all(not training.trainer.step for training in world.trainings.values())


def test_a_founder_that_does_not_compare_versions_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug. Rack 1 notices that the log begins with something else, and stops: what it
    has over its own anchor would be merged as progress over another one."""
    monkeypatch.setattr(admission, "resume_misfit", lambda hello, others: None)
    world = World(racks=3, first=7)
    for rank in [training.rank for training in world.trainings.values()]:
        if rank.me.rack != 1:
            continue
        rank_machine = rank.rank_machine
        rank_machine.own_versions = (8,) * len(rank_machine.own_versions)
        for state in world.trainings[rank.me].trainer.fragment_states:
            state.anchor = replace(state.anchor, version=8, digest="ab" * 32)
    problems = world.run().problems
    assert any("the job has begun with other bits" in problem for problem in problems)
