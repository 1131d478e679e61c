"""One torchrun over two racks of two ranks: the mesh, its errors, and a training on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.conftest import Jobs
from tests.process.racks import Nursery, Siblings, Torchrun, environment

RANKS = 4
CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "shutdown_timeout_s": 60,
    "lockstep": True, "wait_timeout_s": 60,
}  # fmt: skip
STEPS = 20


class World:
    """One job of four ranks."""

    def __init__(self, nursery: Nursery, folder: Path, port: int) -> None:
        self._nursery, self._folder, self._port = nursery, folder, port
        self.started: Siblings | Torchrun | None = None

    def run(self, *, torchrun: bool = False, env: dict[str, str] | None = None, code: int = 0,
            **options: Any) -> list[dict[str, Any]]:  # fmt: skip
        """What each rank wrote, when all have ended."""
        told = {**options, "out": str(self._folder / "rank{rank}.json")}
        argv, log = ["tests.process.meshed", json.dumps(told)], self._folder / "log"
        environ = environment(**(env or {}))
        if torchrun:
            self.started = Torchrun(self._nursery, argv, RANKS, environ, log)
        else:
            self.started = Siblings(self._nursery, argv, RANKS, environ, log, self._port)
        ended = self.started.wait()
        logs = "".join(path.read_text() for path in sorted(self._folder.glob("log*")))
        logs += "".join(path.read_text() for path in sorted(self._folder.glob("*.log")))
        assert bool(ended) == bool(code), f"ended with {ended}\n{logs}"
        self.logs = logs
        return [json.loads((self._folder / f"rank{k}.json").read_text()) for k in range(RANKS)]


@pytest.fixture
def world(
    nursery: Nursery, tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> Iterator[World]:
    made = World(nursery, tmp_path, free_ports(1)[0])
    yield made
    if made.started is not None:
        made.started.kill()


def test_two_racks_of_two_ranks(world: World) -> None:
    told = [rank["mesh"] for rank in world.run(mesh={"ranks_per_rack": 2})]
    for k, mesh in enumerate(told):
        rack = [0, 1] if k < 2 else [2, 3]
        assert mesh == {
            "names": ["rack", "dp"],
            "ranks": [[0, 1], [2, 3]],
            "groups": {"rack": [k % 2, k % 2 + 2], "dp": rack},
            "seat": [k // 2, 2, rack],
        }
    assert "rack-mesh" not in world.logs, "it does as it was told, and does not make words of it"


def test_a_layout_inside_the_rack_by_the_environment(world: World) -> None:
    env = {"MEND_RANKS_PER_RACK": "4", "MEND_RACKS": "1"}
    told = world.run(mesh={"inner": {"dp": 2, "tp": 2}}, env=env)
    for k, rank in enumerate(told):
        mesh = rank["mesh"]
        assert mesh["names"] == ["rack", "dp", "tp"]
        assert mesh["ranks"] == [[[0, 1], [2, 3]]]
        assert mesh["groups"]["tp"] == [k // 2 * 2, k // 2 * 2 + 1]
        assert mesh["groups"]["dp"] == [k % 2, k % 2 + 2]
        assert mesh["seat"] == [0, 1, [0, 1, 2, 3]]


def test_slurm_may_not_contradict_the_hosts(world: World) -> None:
    """It says two racks of two nodes, and all are on one machine here."""
    only = {
        str(k): {
            "SLURM_TOPOLOGY_ADDR": f"core.rack{k // 2}.node{k}",
            "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
        }
        for k in range(RANKS)
    }
    told = world.run(only=only, code=1)
    for rank in told:
        assert rank["error"][0] == "ConfigError"
        assert "share a host and not a switch" in rank["error"][1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"only": {"2": {"MEND_RANKS_PER_RACK": "2"}}}, "rank 0 says None, rank 2 says 2"),
        ({"only": {"1": {"MEND_RANKS_PER_RACK": "two"}}}, "MEND_RANKS_PER_RACK='two'"),
        ({"mesh": {"ranks_per_rack": 3}}, "4 ranks cannot be cut into racks of 3"),
        ({"mesh": {"ranks_per_rack": 2, "inner": {"rack": 2}}}, "Rename 'rack'"),
        ({}, "nothing says where a rack ends"),
    ],
)
def test_all_ranks_hear_what_one_of_them_sees(
    world: World, options: dict[str, Any], says: str
) -> None:
    """Whoever raises alone leaves the others waiting for half an hour."""
    for rank in world.run(**options, code=1):
        assert rank["error"][0] == "ConfigError"
        assert says in rank["error"][1]


@pytest.mark.parametrize(
    ("parallel", "torchrun", "aware"),
    [("ddp", False, False), ("ddp", True, False), ("fsdp2", False, False), ("ddp", False, True)],
    ids=str,
)
def test_a_training_on_it_has_the_bits_of_a_torchrun_per_rack(
    world: World,
    jobs: Jobs,
    free_ports: Callable[[int], list[int]],
    parallel: str,
    torchrun: bool,
    aware: bool,
) -> None:
    """`aware`: mend_init finds the racks by itself, as the mesh has them."""
    ports = free_ports(2)
    env = {
        "MEND_RACKS": "2",
        "MEND_SIDEBAND_PEERS": ",".join(f"{r}=tcp://127.0.0.1:{p}" for r, p in enumerate(ports)),
    }
    mesh = {"ranks_per_rack": 2}
    training = {"steps": STEPS, "config": {**CONFIG, "rack_aware": aware}, "parallel": parallel}
    behind = {"MEND_RANKS_PER_RACK": "2"} if aware else {}
    results = world.run(torchrun=torchrun, env=env, mesh=mesh, behind=behind, **training)
    apart = jobs(ranks=2).run(**training)
    for result in results:
        assert result["weights"] == apart[0].weights
        assert result["status"]["anchor_digest"] == apart[0].digest
        assert result["threads"] == []
    assert [result["mesh"]["seat"][0] for result in results] == [0, 0, 1, 1]


def test_model_that_spans_two_racks_is_refused_with_rack_aware(world: World) -> None:
    """Racks of one rank, and a model that averages gradients over two."""
    config = {**CONFIG, "rack_aware": True}
    behind = {"MEND_RANKS_PER_RACK": "1"}
    mesh = {"ranks_per_rack": 2}
    for rank in world.run(code=1, mesh=mesh, behind=behind, steps=1, config=config):
        assert rank["error"][0] == "UsageError"
        assert "which are not of rack" in rank["error"][1]
