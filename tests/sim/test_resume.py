"""Checkpoints under faults, and jobs that begin with the versions of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mend.coordination import admission
from mend.errors import CheckpointError
from mend.sim.generate import draw
from mend.sim.world import World
from mend.types import MS, Peer
from tests.sim.extent import is_long

SEEDS = [seed for seed in range(12) if not is_long(seed)]
"""Each test takes some seconds for these; draw more by hand."""


def problems_of(seed: int, **changes: Any) -> list[str]:
    return World(replace(draw(seed), **changes)).run().problems


def test_a_job_that_begins_with_versions_keeps_every_invariant() -> None:
    """Take-overs, restarts, joiners, new lineages and snapshots behind a Genesis with versions."""
    found = {seed: problems for seed in SEEDS if (problems := problems_of(seed, first=7))}
    assert found == {}


@pytest.mark.parametrize("writes_ms", [0, 700], ids=["foreground", "background"])
def test_checkpoints_lie_at_one_place_of_the_log_whatever_fails(writes_ms: int) -> None:
    """Also while their files are written and training goes on, through rounds, deaths, the end."""
    found, made = {}, 0
    for seed in SEEDS:
        scenario = draw(seed)
        cut = {"cut_step": min(scenario.steps) // 2, "cut_writes_ns": writes_ms * MS}
        world = World(replace(scenario, **cut))
        if problems := world.run().problems:
            found[seed] = problems
        made += len(world.checkers.cuts_written)
    assert found == {}
    assert made >= len(SEEDS) // 2, "most of the jobs make one"


def of_another_version() -> World:
    """Rack 1 has read a checkpoint of version 8, all others one of version 7."""
    world = World(racks=3, first=7)
    leader = world.trainings[Peer(1, 0)].rank.roles.leader
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
        rank_machine = rank.roles.rank_machine
        rank_machine.own_versions = (8,) * len(rank_machine.own_versions)
        for track in world.trainings[rank.me].trainer.tracks:
            track.anchor = replace(track.anchor, version=8, digest="ab" * 32)
    problems = world.run().problems
    assert any("the job has begun with other bits" in problem for problem in problems)
