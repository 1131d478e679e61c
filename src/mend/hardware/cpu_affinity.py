"""Finds the cores near a GPU, and keeps worker threads on them. Reads sysfs.

A copy between a GPU and the memory of the other socket crosses the link between the sockets, and so
do the merges after it. If sysfs says nothing, no thread is pinned.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mend.errors import ensure
from mend.hardware.nccl_topology import Dump, plain_bus_id
from mend.types import owned_span

NVIDIA = "0x10de"
DISPLAY_CLASS = "0x03"
"""PCI class of GPUs, with or without a screen."""

CORES_MAX = 1 << 16
FILE_CHARS_MAX = 1 << 20

_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class HostTopology:
    """Reads the files in which Linux describes the machine. Tests pass trees of their own."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")

    def near(self, bus_id: str) -> frozenset[int] | None:
        """The cores of the NUMA node that a device is attached to; all cores, in a virtual machine
        without nodes."""
        text = self._device(bus_id, "local_cpulist")
        return parse_cores(text) if text else None

    def numa(self, bus_id: str) -> int | None:
        """The kernel writes -1 if it does not know the node."""
        text = self._device(bus_id, "numa_node")
        return int(text) if text.isdigit() else None

    def gpus(self) -> tuple[str, ...]:
        """Bus ids of the NVIDIA GPUs of the whole machine, ascending, including those that this
        process does not see."""
        with contextlib.suppress(OSError):
            bus_ids = sorted(path.name for path in (self.sys / "bus/pci/devices").iterdir())
            return tuple(each for each in bus_ids if self._is_gpu(each))
        return ()

    def siblings(self, core: int) -> frozenset[int]:
        """The threads of the same physical core, including this one."""
        name = f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        return (parse_cores(read_short(self.sys / name)) or frozenset()) | {core}

    def boot(self) -> str:
        """The boot id, which differs between machines even if their names do not; empty:
        unknown."""
        return read_short(self.proc / "sys/kernel/random/boot_id")

    def bus_id_of(self, uuid: str) -> str | None:
        """The bus id of the GPU with this UUID, as the driver lists it."""
        with contextlib.suppress(OSError):
            for folder in sorted((self.proc / "driver/nvidia/gpus").iterdir()):
                if uuid.lower() in read_short(folder / "information").lower():
                    return plain_bus_id(folder.name)
        return None

    def _is_gpu(self, bus_id: str) -> bool:
        vendor, kind = self._device(bus_id, "vendor"), self._device(bus_id, "class")
        return vendor == NVIDIA and kind.startswith(DISPLAY_CLASS)

    def _device(self, bus_id: str, name: str) -> str:
        if not _BUS_ID.fullmatch(bus_id):
            return ""
        return read_short(self.sys / "bus/pci/devices" / bus_id / name)


def host() -> str:
    """The host name of this machine."""
    return platform.node()


def parse_cores(text: str) -> frozenset[int] | None:
    """The cores of a list as the kernel writes it, `0-3,8`. None: it is malformed or empty."""
    cores: set[int] = set()
    for item in text.strip().split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            return None
        low, high = int(match[1]), int(match[2] or match[1])
        if not low <= high < CORES_MAX:
            return None
        cores.update(range(low, high + 1))
    return frozenset(cores)


def bus_id_of(device_index: int, machine: HostTopology = HostTopology()) -> str | None:
    """The bus id of a CUDA device, by torch's numbering. None: there is no such GPU, or it is
    unknown."""
    if not torch.cuda.is_available() or not 0 <= device_index < torch.cuda.device_count():
        return None
    gpu: Any = torch.cuda.get_device_properties(device_index)
    if hasattr(gpu, "pci_bus_id"):  # torch of 2025 and later
        return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    uuid = str(getattr(gpu, "uuid", ""))
    return machine.bus_id_of(uuid) if uuid else None


BusIdOf = Callable[[int], str | None]


def near_cores(
    device_index: int,
    *,
    machine: HostTopology = HostTopology(),
    dump: Dump | None = None,
    bus_ids: BusIdOf = bus_id_of,
) -> frozenset[int] | None:
    """Cores on the NUMA node of a CUDA device, according to sysfs, or else an NCCL dump. None:
    unknown."""
    bus_id = bus_ids(device_index)
    cores = machine.near(bus_id) if bus_id is not None else None
    if cores is None and bus_id is not None and dump is not None:
        gpu = dump.gpu(bus_id)
        cores = gpu.cores if gpu is not None else None
    return cores


def worker_cores(
    device_index: int,
    local_rank: int = 0,
    local_world: int = 1,
    *,
    allowed: Iterable[int] | None = None,
    machine: HostTopology = HostTopology(),
    bus_ids: BusIdOf = bus_id_of,
) -> frozenset[int] | None:
    """This rank's share of the cores near its GPU, in whole physical cores.

    The cores are shared with the ranks of the other GPUs on the same NUMA node. All GPUs of the
    machine count, so that two racks on one machine get different cores. If there are fewer GPUs
    than local ranks, the ranks of the same GPU share. `allowed`: the cores that this process may
    use; None: ask the kernel. Returns None if the place of the GPU is unknown, or no core of this
    process is near it.
    """
    near = near_cores(device_index, machine=machine, bus_ids=bus_ids)
    may = frozenset(allowed) if allowed is not None else allowed_cores()
    if near is None or may is None or not near & may:
        return None
    own = str(bus_ids(device_index))
    beside = {each for each in machine.gpus() if machine.near(each) == near} | {own}
    visible = sum(bus_ids(index) is not None for index in range(local_world)) or 1
    ranks = -(-local_world // visible)
    place = sorted(beside).index(own) * ranks + min(local_rank // visible, ranks - 1)
    return _share(near & may, len(beside) * ranks, place, machine)


def _share(
    cores: frozenset[int], sharers: int, place: int, machine: HostTopology
) -> frozenset[int]:
    """Part `place` of `sharers`, in whole physical cores; all of them if there are too few."""
    physical = sorted({min(machine.siblings(core) & cores) for core in cores})
    if len(physical) < sharers:
        return cores
    span = owned_span(len(physical), sharers, place)
    threads = [machine.siblings(core) & cores for core in physical[span.start : span.stop]]
    share = frozenset[int]().union(*threads)
    ensure(share <= cores, "cores that this process does not have", share=share, cores=cores)
    return share


def pin_worker(cores: frozenset[int] | None) -> bool:
    """Pin the calling thread, and those that it will start, to these cores. Returns False if there
    are no cores or the system refuses."""
    pin = getattr(os, "sched_setaffinity", None)
    if pin is None or not cores:
        return False
    try:
        pin(0, cores)  # 0: this thread, not the process
    except OSError:
        return False
    return True


def allowed_cores() -> frozenset[int] | None:
    """The cores that this process may use. None: the system does not say."""
    affinity = getattr(os, "sched_getaffinity", None)
    return frozenset(affinity(0)) if affinity is not None else None


def read_short(path: Path) -> str:
    """The stripped text of a short system file; empty if there is no such file."""
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(FILE_CHARS_MAX).strip()
    except OSError:
        return ""
