"""Racks that merge a slice each: the bits of a mesh, and what becomes of a round whose owner dies
or whose payload is no numbers."""

from __future__ import annotations

from typing import Any

import pytest

from mend.types import MS, SECOND
from mend_lab.sim import World, draw, problems_of
from mend_lab.sim.faults import SPOILT
from mend_lab.sim.network import STREAMS_ONE_IN
from mend_lab.sim.scenario import FOR_EVER, Fault, calm
from tests.sim.bugs import NAMED, planted

RACKS = 4
JOB: dict[str, Any] = {"racks": RACKS, "sharded": True, "witness": False, "fragments": 1}
SLOW = Fault("slow_worker", 0, FOR_EVER, a=3, amount=150 * MS)
DEATH: dict[str, Any] = JOB | {"seed": 5, "numel": 7, "steps": 36, "byte_ns": MS}
"""Rack 3 dies when the others have merged their slices, and before it has merged its own."""


def commits_of(**fields: Any) -> dict[Any, dict[str, Any]]:
    """By (fragment, version), of a run without a problem."""
    world = World(calm(**fields))
    assert world.run().problems == []
    return world.checkers.commits


def dies(at_ms: int, seed: int = 5) -> dict[str, Any]:
    return DEATH | {"seed": seed} | {"faults": (SLOW, Fault("crash", at_ms * MS, FOR_EVER, a=3))}


@pytest.mark.parametrize("payload", ["float32", "int8"])
@pytest.mark.parametrize("lockstep", [True, False])
def test_the_bits_are_those_of_a_mesh(payload: str, lockstep: bool) -> None:
    job = JOB | {"payload": payload, "lockstep": lockstep, "numel": 300, "momentum": 0.5}
    job |= {"overlap_steps": 1}  # without lockstep a result is else applied as it arrives
    sharded, mesh = commits_of(**job), commits_of(**job | {"sharded": False})
    assert {key: commit.digests for key, commit in sharded.items()} == {
        key: commit.digests for key, commit in mesh.items()
    }
    assert all(commit.reason.endswith(", sharded") for commit in sharded.values())
    assert not any("sharded" in commit.reason for commit in mesh.values())


@pytest.mark.parametrize("streams", [False, True])
def test_an_owner_dies_and_its_slice_goes_to_the_others(streams: bool) -> None:
    """Also where orders travel as patches of those before."""
    seed = 4 * STREAMS_ONE_IN if streams else 5
    assert (seed % STREAMS_ONE_IN == 0) == streams
    commits = commits_of(**dies(620, seed))
    first = commits[0, 1]
    assert first.reason == "all-in, 4 of 4 racks, sharded, then without rack 3"
    assert [member.rack for member in first.members] == [0, 1, 2]
    assert commits[0, 2].reason == "all-in, 3 of 4 racks, sharded"


def test_slices_of_two_attempts_that_are_mixed_are_found() -> None:
    with planted(NAMED["11b"]):
        problems = problems_of(calm(**dies(620)), first=True)
    assert problems
    assert problems[0].startswith("I1: ")
    assert "merged equal members into 3 different results" in problems[0]


@pytest.mark.parametrize("kind", SPOILT)
def test_a_member_without_numbers_is_found_by_all_and_left_out(kind: str) -> None:
    """A slice has no checksum of its sender, so nobody is blamed for it: all look again, as a
    mesh."""
    commits = commits_of(**DEATH | {"faults": (Fault(kind, 0, 3 * SECOND, a=2),)})
    first = commits[0, 1]
    assert ", sharded, then mesh: failed at rack" in first.reason
    assert first.reason.endswith(", then without rack 2")
    assert [member.rack for member in first.members] == [0, 1, 3]
    assert commits[0, 2].reason == "all-in, 3 of 3 racks, sharded"


def test_seeds_draw_both_plans() -> None:
    drawn = [draw(seed) for seed in range(200)]
    assert 10 < sum(scenario.sharded for scenario in drawn) < 60
    assert all(scenario.racks > 2 for scenario in drawn if scenario.sharded)
