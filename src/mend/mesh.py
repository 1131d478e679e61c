"""Decides which ranks of one torchrun share a rack.

The calls are collective, between init_process_group and mend_init. The decision depends only on
what the ranks exchange, so it is the same on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mend.config.topology import RACKS, RANKS_PER_RACK, read_hints
from mend.engine.io.rack import RackGroup
from mend.errors import ConfigError
from mend.hardware.cpu_affinity import HostTopology, bus_id_of, host
from mend.hardware.nccl_topology import announce, read_dump

MEET_S = 300.0
"""Limit of the wait of the ranks for each other. One torchrun has just started all of them."""

RACK_DIM = "rack"
SAY = "Say rack_mesh(ranks_per_rack=...), or set MEND_RANKS_PER_RACK on all ranks."


@dataclass(frozen=True, slots=True)
class RackSeat:
    """The place of this process in a job whose torchrun spans several racks."""

    rack: int
    racks: int
    ranks: tuple[int, ...]
    """Global ranks of this rack, in the order of the mesh."""


@dataclass(frozen=True, slots=True)
class Place:
    """What one rank knows about its place. Empty and None mean unknown. Plain data."""

    host: str
    boot: str = ""
    """Boot id; distinguishes machines of the same name."""
    ranks_per_rack: int | None = None
    said_by: str = ""
    """The argument or variable that set ranks_per_rack."""
    racks: int | None = None
    levels: tuple[str, ...] = ()
    node: str = ""
    node_number: int | None = None
    island: str = ""
    """The part of its machine that NVLink or a CPU connects with its GPU, according to an NCCL
    dump."""
    shape: tuple[tuple[str, int], ...] = ()
    device_type: str = ""
    rack: int | None = None
    """The rack number from the settings, if there is no mesh."""
    fault: tuple[str, str, str, str] | None = None
    """A ConfigError that only this rank found. All ranks raise it, instead of waiting for this
    one."""


@dataclass(frozen=True, slots=True)
class Racks:
    """Global ranks by rack, ascending within each rack; racks are ordered by their first rank.
    `source`: what determined them."""

    ranks: tuple[tuple[int, ...], ...]
    source: str


def rack_mesh(
    device_type: str | None = None,
    *,
    ranks_per_rack: int | None = None,
    inner: Mapping[str, int] | None = None,
) -> DeviceMesh:
    """The mesh ("rack", "dp") of all ranks of one torchrun that spans several racks.

    All ranks call it, after init_process_group. `inner`: the layout of a rack's ranks, outermost
    first; {"dp": 2, "tp": 2} gives ("rack", "dp", "tp"). The first of these sources that applies
    decides which ranks share a rack: `ranks_per_rack` (consecutive global ranks);
    MEND_RANKS_PER_RACK; on a single machine, an NCCL topology dump, if neither NVLink nor a
    processor connects all GPUs; Slurm's switches or blocks, then its nodes; the hosts. Rank 0 logs
    the choice.

    Raises ConfigError on every rank: without a process group, with one rank, with unequal racks or
    a single one (unless ranks_per_rack says so), or if sources or ranks contradict each other.
    """
    if not (dist.is_available() and dist.is_initialized()):
        remedy = "Call torch.distributed.init_process_group first, under torchrun."
        raise ConfigError("process group", None, "rack_mesh needs one", remedy)
    device = device_type or _device_type()
    places = _places(_place(ranks_per_rack, inner, device))
    racks = decide(places)
    shape = dict(places[0].shape) or {"dp": len(racks.ranks[0])}
    if dist.get_rank() == 0:
        inferred = places[0].ranks_per_rack is None
        announce(len(racks.ranks), len(racks.ranks[0]), racks.source, found=inferred)
    ranks = torch.tensor(racks.ranks, dtype=torch.int64, device="cpu").reshape(
        len(racks.ranks), *shape.values()
    )
    return DeviceMesh(device, ranks, mesh_dim_names=(RACK_DIM, *shape))


def find_seat(rack: int | None, *, addressed: bool) -> RackSeat | None:
    """The rack of this process, decided as `rack_mesh` decides it, for `rack_aware`.

    `rack`: the number in the settings, if there is one. `addressed`: whether the settings say where
    the racks listen. Returns None if all ranks of this torchrun are one rack, or this is the only
    process; then the settings name the rack. All ranks call it. Raises ConfigError on every rank if
    sources or ranks contradict each other, or racks on several hosts have no addresses.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    places = _places(replace(_place(None, None, _device_type()), rack=rack))
    racks = decide_without_mesh(places, addressed=addressed)
    if racks is None:
        return None
    me = dist.get_rank()
    if me == 0:
        announce(len(racks.ranks), len(racks.ranks[0]), racks.source, found=True)
    own = next(number for number, ranks in enumerate(racks.ranks) if me in ranks)
    return RackSeat(own, len(racks.ranks), racks.ranks[own])


def rack_of(mesh: DeviceMesh) -> RackSeat:
    """The rack of this process in a mesh. Raises ConfigError if the mesh has no dimension "rack",
    or does not contain this process."""
    names = mesh.mesh_dim_names or ()
    if RACK_DIM not in names:
        raise ConfigError("mesh", names, 'has no dimension "rack"', "Use mend.rack_mesh().")
    axis = names.index(RACK_DIM)
    by_rack = mesh.mesh.movedim(axis, 0).reshape(mesh.shape[axis], -1).tolist()
    me = dist.get_rank()
    own = [rack for rack, ranks in enumerate(by_rack) if me in ranks]
    if not own:
        rule = f"this process, rank {me}, is not in it"
        raise ConfigError("mesh", by_rack, rule, "Give the whole mesh of mend.rack_mesh().")
    return RackSeat(own[0], len(by_rack), tuple(int(rank) for rank in by_rack[own[0]]))


# ------------------------------------------------------------------ what a rank knows


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend_config() else "cpu"


def _place(ranks_per_rack: int | None, inner: Mapping[str, int] | None, device: str) -> Place:
    try:
        shape = _shape(inner)
        if ranks_per_rack is not None:
            _refuse_unless_whole("ranks_per_rack", ranks_per_rack)
        hints = read_hints()
        machine = HostTopology()
        size = ranks_per_rack if ranks_per_rack is not None else hints.ranks_per_rack
        argument = "ranks_per_rack" if ranks_per_rack is not None else RANKS_PER_RACK
        island = ""
        if device == "cuda" and hints.dump is not None and hints.dump.exists():
            index = hints.local_rank % max(1, torch.cuda.device_count())
            island = read_dump(hints.dump).island(bus_id_of(index) or "")
    except ConfigError as error:
        return Place(host(), fault=(error.field, str(error.value), error.rule, error.remedy))
    return Place(
        host(), machine.boot(), size, argument if size is not None else "", hints.racks,
        hints.levels, hints.node, hints.node_number, island, shape, device,
    )  # fmt: skip


def _places(own: Place) -> list[Place]:
    """The places of all ranks, in rank order. Collective."""
    group = RackGroup(None, MEET_S)  # of all ranks
    try:
        return group.gather(own, Place)
    finally:
        group.close()


def _shape(inner: Mapping[str, int] | None) -> tuple[tuple[str, int], ...]:
    if inner is not None and not isinstance(inner, Mapping):
        raise ConfigError("inner", inner, "must map names to sizes", 'As {"dp": 4, "tp": 2}.')
    for name, size in (inner or {}).items():
        if not str(name).isidentifier() or name == RACK_DIM:
            rule = f'its names are identifiers, none of them "{RACK_DIM}"'
            raise ConfigError("inner", dict(inner or {}), rule, f"Rename {name!r}.")
        _refuse_unless_whole(f"inner[{name!r}]", size)
    return tuple((inner or {}).items())


def _refuse_unless_whole(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(field, value, "needs a whole number, at least 1", f"Change {field}.")


# ------------------------------------------------------------------ what follows from that


def decide(places: Sequence[Place]) -> Racks:
    """The racks, from the places of all ranks in rank order. The result is the same on every rank.
    Raises ConfigError."""
    _refuse_faults(places)
    racks = _found(places)
    if racks is None:
        rule = f"all {len(places)} ranks are on {places[0].host}: nothing says where a rack ends"
        raise ConfigError("ranks_per_rack", None, rule, SAY)
    return _checked(places, racks)


def decide_without_mesh(places: Sequence[Place], *, addressed: bool) -> Racks | None:
    """`decide` for `rack_aware`. None: the torchrun is one rack, because the settings give its
    number to the ranks, or because no source distinguishes them. Raises ConfigError."""
    _refuse_faults(places)
    number, size = places[0].rack, places[0].ranks_per_rack
    if number is not None:
        if size not in (None, len(places)):
            rule = (
                f"names one rack for all ranks of this torchrun, but {RANKS_PER_RACK}={size} makes "
                "several racks of them"
            )
            remedy = f"Leave rack out (unset MEND_RACK), or unset {RANKS_PER_RACK}."
            raise ConfigError("rack", number, rule, remedy)
        return None
    racks = _found(places)
    if racks is None or len(racks.ranks) == 1:
        return None
    hosts = [place.host for place in places]
    if not addressed and len(_groups([_home(place) for place in places])) > 1:
        rule = f"is empty, and the racks are on several hosts ({_names(hosts)} by {racks.source})"
        remedy = "Name where the lowest rank of each rack listens, as 0=tcp://host:port."
        raise ConfigError("sideband_peers", (), rule, remedy)
    return _checked(places, racks)


def _found(places: Sequence[Place]) -> Racks | None:
    """The racks; None: no source distinguishes the ranks."""
    size = places[0].ranks_per_rack
    return _counted(places, size) if size is not None else _looked_up(places)


def _checked(places: Sequence[Place], racks: Racks) -> Racks:
    sizes = [len(ranks) for ranks in racks.ranks]
    if len(set(sizes)) > 1:
        rule = f"racks by {racks.source} would have {_listed(sizes)} ranks; all need as many"
        raise ConfigError("racks", len(sizes), rule, f"Start as many on each. {SAY}")
    configured = {place.racks for place in places} - {None}
    if configured and configured != {len(sizes)}:
        rule = f"{racks.source} makes {len(sizes)} racks of {sizes[0]} ranks"
        raise ConfigError(
            RACKS, _listed(sorted(map(str, configured))), rule, f"Unset {RACKS}, or: {SAY}"
        )
    shape = places[0].shape
    if shape and math.prod(extent for _, extent in shape) != sizes[0]:
        rule = f"is {math.prod(extent for _, extent in shape)} ranks; a rack has {sizes[0]}"
        rule += f" by {racks.source}"
        raise ConfigError("inner", dict(shape), rule, f"Change inner. Or: {SAY}")
    together = sorted(rank for ranks in racks.ranks for rank in ranks)
    if together != list(range(len(places))):
        rule = (
            f"the ranks of the racks by {racks.source} are {together}, not 0 to {len(places) - 1}"
        )
        raise ConfigError("racks", len(sizes), rule, SAY)
    return racks


def _refuse_faults(places: Sequence[Place]) -> None:
    for place in places:
        if place.fault is not None:
            raise ConfigError(*place.fault)
    if len(places) == 1:
        remedy = "Start more ranks; a rack with a torchrun of its own needs no mesh."
        raise ConfigError("world size", 1, "one rank is not several racks", remedy)
    for field in ("ranks_per_rack", "shape", "device_type", "rack"):
        by_value = {getattr(place, field): rank for rank, place in reversed([*enumerate(places)])}
        if len(by_value) > 1:
            by_rank = sorted((rank, value) for value, rank in by_value.items())
            name = {"shape": "inner"}.get(field, field)
            rule = ", ".join(f"rank {rank} says {value}" for rank, value in by_rank[:4])
            raise ConfigError(name, by_rank[0][1], rule, "Say the same on all ranks.")


def _counted(places: Sequence[Place], size: int) -> Racks:
    """Racks of `size` consecutive global ranks, which torchrun numbers host by host."""
    world, source = len(places), f"{places[0].said_by}={size}"
    if world % size:
        near = [n for n in range(1, world) if world % n == 0 and n * 2 <= world]
        rule = f"{world} ranks cannot be cut into racks of {size}"
        raise ConfigError("ranks_per_rack", size, rule, f"One of {_listed(near)} would do.")
    racks = tuple(tuple(range(first, first + size)) for first in range(0, world, size))
    homes = [list(dict.fromkeys(_home(places[rank]) for rank in ranks)) for ranks in racks]
    for rack, hosts in enumerate(homes):
        torn = [h for h in hosts if sum(h in other for other in homes) > 1]
        if torn and len(hosts) > 1:
            rule = f"rack {rack} would be part of host {torn[0][0]} and of another one"
            remedy = "A rack is whole hosts, or a part of one: choose another number."
            raise ConfigError("ranks_per_rack", size, rule, remedy)
    return Racks(racks, source)


def _looked_up(places: Sequence[Place]) -> Racks | None:
    """The racks by the first source that distinguishes the ranks."""
    hosts = _groups([_home(place) for place in places])
    islands = [place.island for place in places]
    if len(hosts) == 1 and all(islands) and len(set(islands)) > 1:
        return Racks(_groups(islands), "the NCCL topology dump")
    depths = {len(place.levels) for place in places}
    if len(depths) > 1 and 0 not in depths:
        rule = f"nodes have {_listed(sorted(depths))} levels of switches"
        raise ConfigError("SLURM_TOPOLOGY_ADDR", places[0].levels, rule, SAY)
    for level in range(min(depths)):
        names = [place.levels[level] for place in places]
        if len(set(names)) > 1:
            switches = _groups(names)
            _refuse_torn(switches, hosts, "SLURM_TOPOLOGY_ADDR", names[0])
            return Racks(switches, f"SLURM_TOPOLOGY_ADDR ({_listed(list(dict.fromkeys(names)))})")
    numbers = [place.node_number for place in places]
    if None not in numbers:
        nodes = _groups(numbers)
        if nodes != hosts:
            names = sorted({place.host for place in places})
            rule = f"says {len(nodes)} nodes, and the ranks are on {_listed(names)}"
            raise ConfigError("SLURM_NODEID", numbers[0], rule, f"Unset SLURM_NODEID. Or: {SAY}")
        if len(nodes) > 1:
            return Racks(nodes, f"SLURM_NODEID ({_names([place.node for place in places])})")
    if len(hosts) == 1:
        return None
    return Racks(hosts, f"hosts ({_names([place.host for place in places])})")


def _refuse_torn(
    switches: tuple[tuple[int, ...], ...],
    hosts: tuple[tuple[int, ...], ...],
    field: str,
    value: str,
) -> None:
    """Refuse ranks of one host that are on different switches."""
    for ranks in hosts:
        if not any(set(ranks) <= set(rack) for rack in switches):
            rule = f"ranks {_listed(list(ranks))} share a host and not a switch"
            raise ConfigError(field, value, rule, f"Unset it. Or: {SAY}")


def _home(place: Place) -> tuple[str, str]:
    return place.host, place.boot


def _groups(keys: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks with equal keys, ordered by their first rank."""
    return tuple(
        tuple(rank for rank, other in enumerate(keys) if other == key)
        for key in dict.fromkeys(keys)
    )


def _names(each: Sequence[str]) -> str:
    return _listed(list(dict.fromkeys(each)))


def _listed(items: Sequence[object]) -> str:
    shown = [str(item) for item in items[:8]]
    return ", ".join(shown + ["..."] * (len(items) > 8)) or "none"
