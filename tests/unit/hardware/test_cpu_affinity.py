"""Cores near a GPU, on machines made of files; and a thread that is kept on some."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mend.hardware import cpu_affinity
from mend.hardware.cpu_affinity import (
    HostTopology,
    bus_id_of,
    near_cores,
    parse_cores,
    pin_worker,
    worker_cores,
)
from mend.hardware.nccl_topology import parse_dump
from tests.unit.hardware.dumps import CLOUD, GPUS, sockets

Build = Callable[..., HostTopology]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Machines with these GPUs: bus -> NUMA node and near cores. `cores` hyperthreaded cores, the
    second thread of core c is c + cores, as Linux counts on x86."""

    def make(gpus: dict[str, tuple[int, str]], cores: int = 0) -> HostTopology:
        devices = tmp_path / "sys/bus/pci/devices"
        for bus, (numa, near_list) in gpus.items():
            _files(devices / f"0000:{bus}:00.0", {
                "vendor": "0x10de", "class": "0x030200", "numa_node": f"{numa}",
                "local_cpulist": near_list,
            })  # fmt: skip
        _files(devices / "0000:00:1f.0", {
            "vendor": "0x8086", "class": "0x030000", "numa_node": "0", "local_cpulist": "0-191",
        })  # fmt: skip  # a screen
        for core in range(2 * cores):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
            _files(folder, {"thread_siblings_list": f"{core % cores},{core % cores + cores}"})
        return HostTopology(tmp_path / "sys", tmp_path / "proc")

    return make


def _files(folder: Path, texts: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / name).write_text(text + "\n")


def on(*buses: str) -> Callable[[int], str | None]:
    """CUDA devices 0, 1, ... are on these buses."""
    ids = [f"0000:{bus}:00.0" for bus in buses]
    return lambda index: ids[index] if index < len(ids) else None


DGX = dict(
    [(bus, (0, "0-47,96-143")) for bus in GPUS[:4]]
    + [(bus, (1, "48-95,144-191")) for bus in GPUS[4:]]
)


def test_the_cores_of_the_gpus_own_socket(build: Build) -> None:
    machine = build(DGX)
    found = near_cores(5, machine=machine, bus_ids=on(*GPUS))
    assert found == {*range(48, 96), *range(144, 192)}
    assert machine.numa("0000:ab:00.0") == 1
    assert machine.gpus() == tuple(f"0000:{bus}:00.0" for bus in GPUS)


def test_ranks_of_one_socket_share_its_cores_and_no_core_is_given_twice(build: Build) -> None:
    machine = build(DGX, cores=96)
    shares = [
        worker_cores(k, k, 8, allowed=range(192), machine=machine, bus_ids=on(*GPUS))
        for k in range(8)
    ]
    given = [core for share in shares if share is not None for core in share]
    assert sorted(given) == list(range(192)), "all of them, each once"
    assert shares[0] == {*range(12), *range(96, 108)}, "both threads of 12 cores"
    assert shares[4] == {*range(48, 60), *range(144, 156)}


def test_two_racks_of_one_machine_do_not_meet(build: Build) -> None:
    """Each torchrun sees its own GPUs only; in the machine there are all."""
    machine = build(DGX, cores=96)
    taken: set[int] = set()
    for rack in range(4):
        visible = on(*GPUS[2 * rack : 2 * rack + 2])
        for rank in range(2):
            share = worker_cores(
                rank, rank, 2, allowed=range(192), machine=machine, bus_ids=visible
            )
            assert share, "every rank has some"
            assert not taken & share
            taken |= share


def test_ranks_with_one_gpu_between_them_split_its_cores(build: Build) -> None:
    machine = build({"05": (0, "0-7")})
    both = [
        worker_cores(0, k, 2, allowed=range(8), machine=machine, bus_ids=on("05")) for k in range(2)
    ]
    assert both == [set(range(4)), set(range(4, 8))]


def test_only_cores_that_the_process_may_use(build: Build) -> None:
    machine = build({"05": (0, "0-7"), "06": (1, "8-15")})
    ids = on("05", "06")
    assert worker_cores(0, allowed={6, 7, 8}, machine=machine, bus_ids=ids) == {6, 7}
    assert worker_cores(0, allowed={9, 10}, machine=machine, bus_ids=ids) is None, (
        "somebody has put the process on the other socket, and knows why"
    )


def test_fewer_cores_than_gpus_are_used_by_all(build: Build) -> None:
    machine = build(dict.fromkeys(GPUS, (0, "0-1")))
    for k in range(8):
        share = worker_cores(k, k, 8, allowed={0, 1}, machine=machine, bus_ids=on(*GPUS))
        assert share == {0, 1}


def test_without_sysfs_an_nccl_dump_tells(tmp_path: Path) -> None:
    machine, dump = HostTopology(tmp_path, tmp_path), parse_dump(sockets())
    ids = on("17", "b1")
    assert near_cores(1, machine=machine, dump=dump, bus_ids=ids) == set(range(16, 32))


def test_where_nothing_is_known_nothing_is_pinned(tmp_path: Path, build: Build) -> None:
    nowhere = HostTopology(tmp_path / "none", tmp_path / "none")
    assert near_cores(0, machine=nowhere, bus_ids=on("05")) is None
    assert near_cores(0, machine=nowhere, dump=parse_dump(CLOUD), bus_ids=on("05")) is None
    assert worker_cores(0, allowed=range(8), machine=nowhere, bus_ids=on("05")) is None
    dgx = build(DGX)
    assert worker_cores(3, allowed=range(8), machine=dgx, bus_ids=on()) is None
    assert dgx.near("../../../etc") is None, "no bus id, no path"
    assert nowhere.gpus() == ()
    assert nowhere.boot() == ""
    assert pin_worker(None) is False


def test_a_gpu_is_found_by_its_uuid(tmp_path: Path) -> None:
    _files(tmp_path / "proc/driver/nvidia/gpus/0000:62:00.0", {
        "information": "Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-9221d5d1-b60b-a624-bf14-0a1819cf",
    })  # fmt: skip
    machine = HostTopology(tmp_path / "sys", tmp_path / "proc")
    assert machine.bus_id_of("9221d5d1-b60b-a624-bf14-0a1819cf") == "0000:62:00.0"
    assert machine.bus_id_of("00000000-0000-0000-0000-000000000000") is None


class _Told:
    """What CUDA tells of a device, in torch of 2025 and before."""

    def __init__(self, **told: object) -> None:
        self.__dict__.update(told)


def test_the_bus_of_a_cuda_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = [
        _Told(pci_domain_id=0, pci_bus_id=222, pci_device_id=0),
        _Told(uuid="9221d5d1"),
        _Told(),
    ]
    monkeypatch.setattr(cpu_affinity.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu_affinity.torch.cuda, "device_count", lambda: len(told))
    monkeypatch.setattr(cpu_affinity.torch.cuda, "get_device_properties", told.__getitem__)
    info = {"information": "GPU UUID: GPU-9221d5d1"}
    _files(tmp_path / "proc/driver/nvidia/gpus/0000:62:00.0", info)
    machine = HostTopology(tmp_path, tmp_path / "proc")
    found = [bus_id_of(index, machine) for index in range(4)]
    assert found == ["0000:de:00.0", "0000:62:00.0", None, None]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system pins no threads")
def test_only_the_calling_thread_is_pinned() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    seen: list[object] = []

    def work() -> None:
        seen.extend((pin_worker(one), os.sched_getaffinity(0), pin_worker(frozenset({1 << 20}))))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True, one, False]
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("0-3,8", {0, 1, 2, 3, 8}), ("5\n", {5}), ("", None), ("3-1", None), ("0-99999999", None),
        ("0-999999", None), ("a", None), ("1,,2", None),
    ],
)  # fmt: skip
def test_lists_are_read_as_the_kernel_writes_them(text: str, cores: set[int] | None) -> None:
    assert parse_cores(text) == cores
