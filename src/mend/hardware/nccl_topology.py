"""Reads the topology that NCCL dumps for one machine (NCCL_TOPO_DUMP_FILE).

`parse_dump` is pure; `read_dump` opens a file. The format is that of NCCL's src/graph/xml.cc
(ncclTopoDumpXmlRec, ncclTopoFillGpu, ncclTopoFillNet): <system version="1">, in it a <cpu> per NUMA
node (numaid, affinity; -1 where a virtual machine shows none), in it nested <pci busid>, and at
their ends <gpu dev rank> with <nvlink target tclass>, or <nic> with <net name>. A dump of racks
with NVLink between machines holds several machines, distinguished by host_hash.

The text may come from anywhere: no entities, and every size has a limit.
"""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from xml.parsers import expat

from mend.errors import ConfigError
from mend.files import open_regular

logger = logging.getLogger("mend")

DUMP_BYTES_MAX = 4 << 20
GPUS_MAX = 1024
ELEMENTS_MAX = 20_000
DEPTH_MAX = 64
VERSIONS = ("1", "2")
"""NCCL writes 1. RCCL writes 2, with the same elements as far as they are read here."""

NVSWITCH_CLASS = "0x068000"

_BUS_ID = re.compile(r"([0-9a-f]{4,16}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-9a-f])")
_MASK = re.compile(r"[0-9a-f]{1,8}(,[0-9a-f]{1,8}){0,255}")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of a dump. `nics`: the network cards that share most of its path to the processor."""

    bus_id: str
    host: str
    dev: int | None
    rank: int | None
    numa: int | None
    cores: frozenset[int] | None
    switch: str
    """Bus id of the PCI bridge that it is attached to; empty: the processor itself."""
    nics: tuple[str, ...]
    links: tuple[str, ...]
    """The other ends of its NVLinks: bus ids of GPUs, or "nvswitch"."""


@dataclass(frozen=True, slots=True)
class Dump:
    """All GPUs, in the order of the file."""

    gpus: tuple[Gpu, ...]

    def gpu(self, bus_id: str) -> Gpu | None:
        """The GPU with a bus id. None: it is not in the dump, or several machines have it at
        different places."""
        by_place = {self._near(gpu): gpu for gpu in self.gpus if gpu.bus_id == plain_bus_id(bus_id)}
        return next(iter(by_place.values())) if len(by_place) == 1 else None

    def island(self, bus_id: str) -> str:
        """A name that GPUs of one machine share if NVLink or a processor connects them: the bus id
        of the island's first GPU. Empty: unknown."""
        gpu = self.gpu(bus_id)
        return "" if gpu is None else _islands(self)[self.gpus.index(gpu)]

    @staticmethod
    def _near(gpu: Gpu) -> tuple[object, ...]:
        return gpu.numa, gpu.cores, gpu.nics


@functools.lru_cache(maxsize=2)
def _islands(dump: Dump) -> tuple[str, ...]:
    """For each GPU of the dump, the name of its island."""
    names = [""] * len(dump.gpus)
    left = set(range(len(dump.gpus)))
    while left:
        first = left.pop()
        reached, fresh = [first], [first]
        while fresh:
            here = dump.gpus[fresh.pop()]
            near = [
                i for i in left if dump.gpus[i].host == here.host and _joined(here, dump.gpus[i])
            ]
            left.difference_update(near)
            reached += near
            fresh += near
        name = min(dump.gpus[i].bus_id for i in reached)
        for i in reached:
            names[i] = name
    return tuple(names)


def _joined(one: Gpu, other: Gpu) -> bool:
    switched = "nvswitch" in one.links and "nvswitch" in other.links
    linked = one.bus_id in other.links or other.bus_id in one.links
    return switched or linked or one.numa == other.numa


def announce(racks: int, ranks_per_rack: int, source: str, *, found: bool) -> None:
    """Log the racks that rack_mesh chose, and why; as a warning if they were `found` and not
    given."""
    level = logging.WARNING if found else logging.INFO
    line = 'mend rank=0 rack-mesh racks=%d ranks_per_rack=%d source="%s"'
    logger.log(level, line, racks, ranks_per_rack, source)


def plain_bus_id(text: str) -> str:
    """Return a bus id as sysfs writes it, where NVML and CUDA write 00000000:1B:00.0; other text in
    lower case."""
    text = text.strip().lower()
    match = _BUS_ID.fullmatch(text)
    if match is None:
        return text
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4]}"


def parse_mask(text: str) -> frozenset[int] | None:
    """Cores of a mask as the kernel writes it, in words of 32 bits, the highest first:
    `3,0000000f`. None: it is malformed or empty."""
    text = text.strip().lower()
    if not _MASK.fullmatch(text):
        return None
    bits = 0
    for word in text.split(","):
        bits = bits << 32 | int(word, 16)
    return frozenset(core for core in range(bits.bit_length()) if bits >> core & 1) or None


def read_dump(path: Path, field: str = "NCCL topology dump") -> Dump:
    """Read a dump. Raises ConfigError, which names `field`, if it cannot be read or is not a
    dump."""
    try:
        with open_regular(path) as file:
            data = file.read(DUMP_BYTES_MAX + 1)
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
        raise ConfigError(field, str(path), rule, "Correct the path, or unset it.") from error
    try:
        return parse_dump(data)
    except ValueError as error:
        rule = f"is not an NCCL topology: {error}"
        remedy = "Let NCCL write it: NCCL_TOPO_DUMP_FILE=topo.xml in a job that uses NCCL."
        raise ConfigError(field, str(path), rule, remedy) from error


def parse_dump(text: str | bytes) -> Dump:
    """Parse a dump. Raises ValueError, which says what is wrong and where."""
    data = text.encode() if isinstance(text, str) else text
    if len(data) > DUMP_BYTES_MAX:
        raise ValueError(f"it is larger than {DUMP_BYTES_MAX >> 20} MiB")
    reader = _Reader()
    parser = expat.ParserCreate()
    parser.buffer_text = False
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.StartDoctypeDeclHandler = reader.doctype
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, LookupError) as error:  # LookupError: an unknown encoding
        raise ValueError(f"broken XML ({error})") from error
    return reader.dump()


@dataclass(frozen=True, slots=True)
class _Element:
    """A GPU or a network port, and the path to it: the processor, then bridges, then its own."""

    path: tuple[str, ...]
    attributes: dict[str, str]
    cpu: dict[str, str]
    links: list[str]


class _Reader:
    """Handlers of one pass over the elements, which keep only the path to the current one."""

    def __init__(self) -> None:
        self._elements = self._cpus = 0
        self._stack: list[tuple[str, dict[str, str]]] = []
        self._gpus: list[_Element] = []
        self._nets: list[_Element] = []

    def doctype(self, *_: object) -> None:
        raise ValueError("a DOCTYPE, which NCCL never writes")

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._elements += 1
        if self._elements > ELEMENTS_MAX:
            raise ValueError(f"more than {ELEMENTS_MAX} elements")
        if len(self._stack) >= DEPTH_MAX:
            raise ValueError(f"elements nested more than {DEPTH_MAX} deep")
        if not self._stack and (name != "system" or attributes.get("version") not in VERSIONS):
            raise ValueError(f'begins with <{name}>, not <system version="{VERSIONS[0]}">')
        if name == "cpu":
            self._cpus += 1
        self._stack.append((name, attributes))
        if name == "gpu":
            self._gpus.append(self._element(attributes))
        elif name == "net":
            self._nets.append(self._element(attributes))
        elif name == "nvlink" and len(self._stack) > 1 and self._stack[-2][0] == "gpu":
            switch = attributes.get("tclass", "") == NVSWITCH_CLASS
            target = "nvswitch" if switch else plain_bus_id(attributes.get("target", ""))
            self._gpus[-1].links.append(target)

    def end(self, _: str) -> None:
        self._stack.pop()

    def _element(self, attributes: dict[str, str]) -> _Element:
        buses = [plain_bus_id(a.get("busid", "")) for name, a in self._stack if name == "pci"]
        cpu = next((a for name, a in self._stack if name == "cpu"), {})
        return _Element((f"cpu {self._cpus}", *buses), attributes, cpu, [])

    def dump(self) -> Dump:
        if not self._elements:
            raise ValueError("it is empty")
        gpus = [element for element in self._gpus if len(element.path) > 1]
        if len(gpus) > GPUS_MAX:
            raise ValueError(f"it has {len(gpus)} GPUs, more than {GPUS_MAX}")
        return Dump(tuple(self._gpu(element) for element in gpus))

    def _gpu(self, element: _Element) -> Gpu:
        numa = _whole(element.cpu.get("numaid"))
        return Gpu(
            bus_id=element.path[-1],
            host=element.cpu.get("host_hash", ""),
            dev=_whole(element.attributes.get("dev")),
            rank=_whole(element.attributes.get("rank")),
            numa=numa if numa is not None and numa >= 0 else None,
            cores=parse_mask(element.cpu.get("affinity", "")),
            switch=element.path[-2] if len(element.path) > 2 else "",
            nics=self._nearest(element.path),
            links=tuple(dict.fromkeys(element.links)),
        )

    def _nearest(self, path: tuple[str, ...]) -> tuple[str, ...]:
        shared = [(_shared(path, net.path), net.attributes.get("name", "")) for net in self._nets]
        most = max((length for length, _ in shared), default=0)
        return tuple(dict.fromkeys(name for length, name in shared if length == most > 0))


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Length of the common prefix."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return len([*same])


def _whole(text: str | None) -> int | None:
    try:
        return int(text) if text is not None and len(text) <= 9 else None
    except ValueError:
        return None
