"""Reads versions, devices, settings and ports of this machine. Listens for a moment on the ports of
a job; sends nothing to any rack."""

from __future__ import annotations

import os
import platform
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from mend.config.keyfile import MAKE_ONE, protection_of, secrets_of
from mend.config.origins import in_force
from mend.config.placing import place
from mend.config.settings import PORT_FIRST, MendConfig
from mend.config.topology import RANKS_PER_RACK, Hints, read_hints
from mend.errors import ConfigError, TransportError
from mend.hardware.cpu_affinity import HostTopology, allowed_cores, bus_id_of, host, near_cores
from mend.hardware.nccl_topology import Dump, read_dump
from mend.tools import versions
from mend.tools.doctor.local import network_of, of_network
from mend.tools.doctor.terms import Finding, ok, problem, remark
from mend.tools.ports import LOOPBACK
from mend.transport.bulk_client import BulkLane
from mend.transport.whereabouts import Whereabouts

WITNESS_PORT = PORT_FIRST - 1
"""Usual port of a witness; `mend coordinate` needs --bind."""

PORTS_MAX = 64
"""Most ports of a range of data ports that are tried."""

CANNOT_LISTEN = "cannot listen at"

PROTECTIONS = {
    "keys": "a key: traffic between racks is encrypted, and only holders of the key take part",
    "loopback": "this rack listens on the loopback interface only; no key is needed",
}

Report = dict[str, Any]


def examine(topology: Path | None) -> tuple[Report, list[Finding]]:
    """Everything as plain data, and what follows from it.

    Raises ConfigError for a topology file that was asked for and cannot be used.
    """
    problems: list[str] = []
    dump = read_dump(topology, "--topology") if topology is not None else None
    hints = None
    try:
        hints = read_hints()
        if dump is None and hints.dump is not None and hints.dump.exists():
            dump = read_dump(hints.dump)
    except ConfigError as error:
        problems.append(str(error))
    config, settings, notes = _settings(problems)
    network = network_of(config) if config is not None else None
    gpu = torch.cuda.is_available()
    found = of_network(network, racks=config.racks, gpu=gpu) if network and config else []
    found += of_keys(config) if config is not None else []
    report = {
        "versions": dict(each.split("=", 1) for each in versions().split(" ") if "=" in each),
        "machine": {
            "host": host(),
            "system": f"{platform.system()} {platform.release()}",
            "cores": os.cpu_count(),
            "cores_allowed": len(cores) if (cores := allowed_cores()) else None,
        },
        "devices": _devices(dump),
        "nccl_dump": _dumped(dump),
        "topology": _topology(hints, config, dump, problems),
        "settings": settings,
        "ports": _ports(config, problems),
        "addresses": _addresses(config),
        "network": network.plain() if network is not None else None,
        "notes": notes,
        "readable": config is not None and hints is not None,
    }
    first = [problem("this rack", text) for text in problems]
    return report, [*first, *(remark("settings", text) for text in notes), *found]


def _settings(problems: list[str]) -> tuple[MendConfig | None, list[Report], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config, named = in_force()
        except ConfigError as error:
            problems.append(str(error))
            return None, [], []
        try:
            config = place(config, Whereabouts())
        except ConfigError as error:
            if config.rack is not None or error.field != "rack":  # that a script may say
                problems.append(str(error))
    rows = [{"field": s.field, "value": _plain(s.value), "source": s.origin} for s in named]
    return config, rows, list(dict.fromkeys(str(each.message) for each in caught))


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def of_keys(config: MendConfig) -> list[Finding]:
    """Judge what keeps others out of the job. Empty: no address is known; a script may name it."""
    placed = config.rack is not None or bool(config.sideband_addr)
    if not placed and config.key_file is None:
        return []
    bind = config.bind_address if placed else ""  # a key is judged without
    protection = protection_of(config, bind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it says follows
        try:
            secrets_of(config, bind)
        except ConfigError as error:
            return [problem("keys", f"{error.field}: {error.rule}.", error.remedy)]
    if protection == "insecure":
        found = (
            f"{bind} is open to anyone who reaches it: MEND_INSECURE is set, and there is no key."
        )
        return [remark("keys", found, f"{MAKE_ONE} Set MEND_KEY_FILE on every rack.")]
    if protection == "keys" and not config.encrypt_payloads:
        found = "a key: only who has it is in. Payloads are authenticated and not encrypted."
        remedy = "Leave encrypt_payloads out where weights must not be read on the way."
        return [remark("keys", found, remedy)]
    return [ok("keys", PROTECTIONS[protection])]


# ------------------------------------------------------------------ devices and racks


def _devices(dump: Dump | None) -> list[Report]:
    """The GPUs that torch sees; none on a machine without."""
    machine, found = HostTopology(), []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        bus_id = bus_id_of(index, machine)
        gpu = dump.gpu(bus_id) if dump is not None and bus_id is not None else None
        numa = machine.numa(bus_id) if bus_id is not None else None
        found.append(
            {
                "index": index,
                "name": torch.cuda.get_device_properties(index).name,
                "bus_id": bus_id,
                "numa": gpu.numa if numa is None and gpu is not None else numa,
                "near_cores": _ranges(near_cores(index, machine=machine, dump=dump)),
                "near_nics": list(gpu.nics) if gpu is not None else None,
            }
        )
    return found


def _dumped(dump: Dump | None) -> list[Report] | None:
    if dump is None:
        return None
    return [
        {
            "bus_id": gpu.bus_id,
            "dev": gpu.dev,
            "rank": gpu.rank,
            "numa": gpu.numa,
            "switch": gpu.switch or None,
            "near_cores": _ranges(gpu.cores),
            "near_nics": list(gpu.nics),
            "joined_to": dump.island(gpu.bus_id),
        }
        for gpu in dump.gpus
    ]


def _ranges(cores: frozenset[int] | None) -> str | None:
    """`0-3,8`, as the kernel writes it."""
    if not cores:
        return None
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{low}-{high}" if low < high else f"{low}" for low, high in runs)


def _topology(
    hints: Hints | None, config: MendConfig | None, dump: Dump | None, problems: list[str]
) -> Report:
    """Return what one process can know of the racks; only rack_mesh hears the other processes."""
    world = None if hints is None else hints.world
    found: Report = {"rack": None, "racks": None, "ranks_per_rack": None, "world_size": world}
    source = "nothing: with one torchrun over several hosts, every host would be a rack"
    if config is not None and config.rack is not None:
        found |= {"rack": config.rack, "racks": config.racks, "ranks_per_rack": world or 1}
        source = "MEND_RACK: this rack has a torchrun of its own"
    elif hints is not None and hints.ranks_per_rack is not None:
        racks, left = divmod(world or 0, hints.ranks_per_rack)
        if left:
            problems.append(f"{RANKS_PER_RACK}={hints.ranks_per_rack} does not divide {world}")
        found |= {"racks": racks or None, "ranks_per_rack": hints.ranks_per_rack}
        source = RANKS_PER_RACK
    elif dump is not None and len({dump.island(gpu.bus_id) for gpu in dump.gpus}) > 1:
        source = "the NCCL topology dump, if all ranks are on this machine"
    elif hints is not None and hints.levels:
        source = f"SLURM_TOPOLOGY_ADDR: {' > '.join(hints.levels)}, where nodes begin to differ"
    elif hints is not None and hints.node_number is not None:
        source = f"SLURM_NODEID: node {hints.node_number} ({hints.node}) would be a rack"
    return {**found, "source": source}


# ------------------------------------------------------------------ ports and addresses


def _ports(config: MendConfig | None, problems: list[str]) -> list[Report]:
    """Try the default ports of this machine, and those that the settings name for this rack."""
    wanted = {("witness, by habit", LOOPBACK, WITNESS_PORT): False}
    lane = LOOPBACK
    for rack in range(config.racks if config is not None else 2):
        wanted["default of rack " + str(rack), LOOPBACK, PORT_FIRST + rack] = False
    if config is not None and config.rack is not None and not config.bind_address.endswith(":0"):
        where, _, number = config.bind_address.removeprefix("tcp://").rpartition(":")
        lane, leads = where.strip("[]"), (where.strip("[]"), int(number))
        wanted = {key: must for key, must in wanted.items() if key[1:] != leads}
        wanted["this rack's leader", *leads] = True
    low, high = (config.data_port_range if config is not None else None) or (1, 0)
    for port in range(low, min(high, low + PORTS_MAX - 1) + 1):
        wanted["data", lane, port] = False
    found = []
    for (what, at, port), must in wanted.items():
        free, why = _free(at, port)
        found.append({"what": what, "host": at, "port": port, "free": free})
        if must and not free:
            problems.append(f"{what} {CANNOT_LISTEN} {at}:{port} ({why})")
    return found


def _free(where: str, port: int) -> tuple[bool, str]:
    try:
        # It is closed at once, so any address does where `where` is 0.0.0.0.
        with closing(BulkLane(where, (port, port), token=bytes(16), advertise=LOOPBACK)):
            return True, ""
    except (TransportError, OSError) as error:
        return False, str(error)


def _addresses(config: MendConfig | None) -> Report:
    if config is None:
        return {}
    return {
        "listens": config.bind_address if config.rack is not None else None,
        "advertises": config.advertise_host or None,
        "racks": {str(rack): address for rack, address in config.peer_addresses.items()},
        "witness": config.witness_addr or None,
    }
