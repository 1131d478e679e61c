"""cli.doctor: `mend doctor`, what this machine and environment look like to mend. Reads, prints,
and listens for a moment on the ports a job would take; sends nothing anywhere.
"""

from __future__ import annotations

import json
import os
import platform
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mend.cli import versions
from mend.cli.ports import LOOPBACK
from mend.config.origins import in_force
from mend.config.settings import PORT_FIRST, MendConfig
from mend.config.topology import RANKS_PER_RACK, Hints, read_hints
from mend.errors import ConfigError, TransportError
from mend.runtime.near import Machine, bus_id_of, host, near_cores
from mend.runtime.topology import Dump, read_dump
from mend.transport.pull import PullLane

WITNESS_PORT = PORT_FIRST - 1
"""By habit; `mend coordinate` needs --bind."""

PORTS_MAX = 64
"""Of a range of data ports, so many are tried."""

Report = dict[str, Any]


def examine(topology: Path | None) -> Report:
    """Everything as plain data. `problems` are what stops a job from starting here.

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
    return {
        "versions": dict(each.split("=", 1) for each in versions().split(" ") if "=" in each),
        "machine": {
            "host": host(),
            "system": f"{platform.system()} {platform.release()}",
            "cores": os.cpu_count(),
            "cores_allowed": _allowed(),
        },
        "devices": _devices(dump),
        "nccl_dump": _dumped(dump),
        "topology": _topology(hints, config, dump, problems),
        "settings": settings,
        "ports": _ports(config, problems),
        "addresses": _addresses(config),
        "notes": notes,
        "problems": problems,
    }


def _settings(problems: list[str]) -> tuple[MendConfig | None, list[Report], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config, named = in_force()
        except ConfigError as error:
            problems.append(str(error))
            return None, [], []
    rows = [{"field": s.field, "value": _plain(s.value), "source": s.origin} for s in named]
    return config, rows, list(dict.fromkeys(str(each.message) for each in caught))


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _allowed() -> int | None:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else None


# ------------------------------------------------------------------ devices and racks


def _devices(dump: Dump | None) -> list[Report]:
    """The GPUs that torch sees; none on a machine without."""
    machine, found = Machine(), []
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
    """What one process can know: only rack_mesh hears the others."""
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
    """Those of this machine: the defaults, and what the settings name for this rack."""
    wanted = {("witness, by habit", LOOPBACK, WITNESS_PORT): False}
    for rack in range(config.racks if config is not None else 2):
        wanted["default of rack " + str(rack), LOOPBACK, PORT_FIRST + rack] = False
    if config is not None and config.rack is not None and not config.bind_address.endswith(":0"):
        where, _, number = config.bind_address.removeprefix("tcp://").rpartition(":")
        leads = where.strip("[]"), int(number)
        wanted = {key: must for key, must in wanted.items() if key[1:] != leads}
        wanted["this rack's leader", *leads] = True
    low, high = (config.data_port_range if config is not None else None) or (1, 0)
    for port in range(low, min(high, low + PORTS_MAX - 1) + 1):
        wanted["data", LOOPBACK, port] = False
    found = []
    for (what, at, port), must in wanted.items():
        free, why = _free(at, port)
        found.append({"what": what, "host": at, "port": port, "free": free})
        if must and not free:
            problems.append(f"{what} cannot listen at {at}:{port} ({why})")
    return found


def _free(where: str, port: int) -> tuple[bool, str]:
    try:
        with closing(PullLane(where, (port, port), token=bytes(16))):
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


# ------------------------------------------------------------------ printing


def doctor(topology: Path | None, as_json: bool) -> int:
    """Print it; the exit status is 1 where there is a problem."""
    report = examine(topology)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _show(report, Console(emoji=False))  # a bus id such as 0000:ab:00.0 has one
    return 1 if report["problems"] else 0


def _show(report: Report, console: Console) -> None:
    _pairs(console, "versions", report["versions"])
    machine = report["machine"]
    _pairs(console, "machine", machine)
    if report["devices"]:
        _rows(console, "GPUs", report["devices"])
    else:
        console.print("[bold]GPUs[/bold]\n  no GPU: torch sees none here")
    if report["nccl_dump"]:
        _rows(console, "GPUs of the NCCL topology dump", report["nccl_dump"])
    elif report["nccl_dump"] is not None:
        console.print("[bold]GPUs of the NCCL topology dump[/bold]\n  no GPU in it")
    _pairs(console, "topology", report["topology"])
    if report["settings"]:
        _rows(console, "settings in force", report["settings"])
    else:
        console.print("[bold]settings in force[/bold]\n  the defaults")
    shown = [{**each, "free": "free" if each["free"] else "TAKEN"} for each in report["ports"]]
    _rows(console, "ports", shown)
    _pairs(console, "addresses", report["addresses"])
    for note in report["notes"]:
        console.print(f"[yellow]note[/yellow] {escape(note)}", soft_wrap=True)
    for problem in report["problems"]:
        console.print(f"[red]problem[/red] {escape(problem)}", soft_wrap=True)
    if not report["problems"]:
        console.print("no problem found; whether other machines can be reached is not tried")


def _pairs(console: Console, title: str, pairs: Report) -> None:
    console.print(f"[bold]{title}[/bold]")
    for name, value in pairs.items():
        console.print(f"  {name}: {escape(_said(value))}", soft_wrap=True)


def _rows(console: Console, title: str, rows: list[Report]) -> None:
    console.print(f"[bold]{title}[/bold]")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(escape(_said(value)) for value in row.values()))
    console.print(table)


def _said(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_said(inner)}" for name, inner in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
