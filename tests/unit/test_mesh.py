"""Which ranks of one torchrun share a rack: from what they told each other, alike on all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mend import mesh, rack_mesh
from mend.determinism import enabling
from mend.errors import ConfigError
from mend.mesh import Place, Racks, decide, decide_without_mesh
from tests import golden


def on(*hosts: str, **more: object) -> list[Place]:
    """One rank on each, as told; the same of all others."""
    return [replace(Place(host), **more) for host in hosts]  # type: ignore[arg-type]


A4B4 = on(*"AAAABBBB")


def refused(places: list[Place]) -> None:
    with golden.raises(ConfigError):
        decide(places)


def test_every_host_is_a_rack_where_nobody_says_more() -> None:
    assert decide(A4B4) == Racks(((0, 1, 2, 3), (4, 5, 6, 7)), "hosts (A, B)")
    assert decide(on("B", "A", "B", "A")).ranks == ((0, 2), (1, 3)), "in the order of first ranks"


def test_two_machines_may_have_one_name() -> None:
    places = [Place("localhost", boot) for boot in ("x", "x", "y", "y")]
    assert decide(places).ranks == ((0, 1), (2, 3))


def test_a_number_goes_before_all() -> None:
    levels = [("s0",)] * 4 + [("s1",)] * 4
    places = [
        replace(place, ranks_per_rack=2, said_by="ranks_per_rack", levels=level)
        for place, level in zip(A4B4, levels, strict=True)
    ]
    assert decide(places) == Racks(((0, 1), (2, 3), (4, 5), (6, 7)), "ranks_per_rack=2")


def test_a_rack_is_whole_hosts_or_a_part_of_one() -> None:
    def cut(hosts: str, size: int) -> Racks:
        return decide(on(*hosts, ranks_per_rack=size, said_by="MEND_RANKS_PER_RACK"))

    assert len(cut("AABBCCDD", 4).ranks) == 2
    assert len(cut("AAAAAAAA", 4).ranks) == 2
    assert len(cut("AAAAAAAA", 8).ranks) == 1, "one rack, because somebody said so"
    with golden.raises(ConfigError):
        cut("AAABBB" * 1, 2)


def test_a_world_that_does_not_divide() -> None:
    refused(on(*"AAAAAA", ranks_per_rack=4, said_by="ranks_per_rack"))


def test_slurms_switches_where_nodes_begin_to_differ() -> None:
    addresses = [
        ("core", "rack1", "sw1"), ("core", "rack1", "sw2"),
        ("core", "rack2", "sw3"), ("core", "rack2", "sw4"),
    ]  # fmt: skip
    places = [Place(host, levels=at) for host, at in zip("ABCD", addresses, strict=True)]
    assert decide(places) == Racks(((0, 1), (2, 3)), "SLURM_TOPOLOGY_ADDR (rack1, rack2)")
    assert decide(places[:2]).ranks == ((0,), (1,)), "in one rack of the room, its switches"


def test_one_switch_for_all_says_nothing_and_nodes_do() -> None:
    places = [
        Place(host, levels=("s0",), node=f"n{number}", node_number=number)
        for host, number in zip("AABB", (0, 0, 1, 1), strict=True)
    ]
    assert decide(places) == Racks(((0, 1), (2, 3)), "SLURM_NODEID (n0, n1)")


def test_switches_with_unequal_nodes() -> None:
    places = [Place(host, levels=(s,)) for host, s in zip("ABC", ("s0", "s0", "s1"), strict=True)]
    refused(places)


def test_hosts_of_unequal_size_and_a_single_host_are_refused() -> None:
    refused(on(*"AAAB"))
    refused(on(*"AAAA"))


def test_a_dump_divides_a_single_machine_and_never_joins_two() -> None:
    islands = ["17", "17", "b1", "b1"]
    alone = [Place("A", island=island) for island in islands]
    assert decide(alone) == Racks(((0, 1), (2, 3)), "the NCCL topology dump")
    joined = [Place("A", island="17") for _ in range(4)]
    refused(joined)
    known_by_some = [replace(alone[0], island=""), *alone[1:]]
    refused(known_by_some)
    two = [Place(host, island=island) for host, island in zip("ABAB", islands, strict=True)]
    assert decide(two).source == "hosts (A, B)"


@pytest.mark.parametrize(
    "changed",
    [
        {"ranks_per_rack": 4}, {"ranks_per_rack": None}, {"shape": (("dp", 2),)},
        {"device_type": "cuda"}, {"racks": 3},
        {"fault": ("LOCAL_RANK", "x", "needs a number", "Change it.")},
    ],
)  # fmt: skip
def test_ranks_that_contradict_each_other(changed: dict[str, object]) -> None:
    places = on(*"AAAA", ranks_per_rack=2, said_by="ranks_per_rack", device_type="cpu")
    refused([*places[:3], replace(places[3], **changed)])  # type: ignore[arg-type]


def test_sources_that_contradict_each_other() -> None:
    torn = [Place("A", levels=(switch,)) for switch in ("s0", "s0", "s1", "s1")]
    refused(torn)
    depths = [Place("A", levels=("s0",)), Place("B", levels=("s0", "s1"))]
    refused(depths)
    numbers = [Place(host, node_number=0) for host in "AABB"]
    refused(numbers)
    refused(on(*"AABB", racks=4))


def test_a_layout_that_is_no_rack() -> None:
    refused(on(*"AABB", shape=(("dp", 2), ("tp", 2))))
    assert decide(on(*"AABB", shape=(("dp", 1), ("tp", 2)))).ranks == ((0, 1), (2, 3))


def test_one_rank_is_not_several_racks() -> None:
    refused(on("A"))


def test_without_a_process_group() -> None:
    with golden.raises(ConfigError):
        rack_mesh()


def test_a_backend_that_torch_chose_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """init_process_group() without a backend takes gloo, and NCCL where there are GPUs.
    get_backend() says "undefined" then, and the mesh of such a job was one of CPUs."""
    dist.init_process_group(init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        chosen = distributed_c10d._world.pg_backend_config
        monkeypatch.setitem(chosen, dist.group.WORLD, "cpu:gloo,cuda:nccl")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert mesh._device_type() == "cuda"
        assert enabling._nccl_runs()
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


def without_mesh(places: list[Place], *, addressed: bool = True) -> Racks | None:
    return decide_without_mesh(places, addressed=addressed)


def test_rack_aware_decides_as_the_mesh_does() -> None:
    assert without_mesh(A4B4) == decide(A4B4)
    counted = on(*"AAAA", ranks_per_rack=2, said_by="MEND_RANKS_PER_RACK")
    assert without_mesh(counted, addressed=False) == decide(counted)
    with golden.raises(ConfigError):
        without_mesh(on(*"AAAB"))


def test_rack_aware_takes_a_torchrun_for_one_rack() -> None:
    """Where it has been given a number, as by `mend launch`; or where nothing tells ranks apart."""
    assert without_mesh([replace(place, rack=1) for place in A4B4]) is None
    assert without_mesh(on(*"AAAA")) is None
    assert without_mesh(on(*"AAAA", ranks_per_rack=4, said_by="MEND_RANKS_PER_RACK")) is None


@pytest.mark.parametrize(
    "places",
    [
        [*on("A", rack=0), *on("B", rack=1)],
        on(*"AAAA", rack=1, ranks_per_rack=2, said_by="MEND_RANKS_PER_RACK"),
        A4B4,
    ],
    ids=["two numbers", "one rack of several", "no addresses"],
)
def test_places_that_rack_aware_cannot_decide_are_refused(places: list[Place]) -> None:
    with golden.raises(ConfigError):
        without_mesh(places, addressed=False)
