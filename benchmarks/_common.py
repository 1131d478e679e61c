"""benchmarks._common: what the benchmarks share: arguments, statistics, one JSON object, two racks.

Every benchmark prints {name, goal, measured, spread, pass, parameters, machine, command} and what
is special to it. `measured` is a median, where the goal is no maximum; `spread` names the quartiles
and the extremes around it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mend import MendConfig
from mend.cli.ports import free_ports

RESULTS = Path(__file__).parent / "results"
END_S = 30.0
_TILE = 1 << 20


def arguments(name: str, doc: str) -> argparse.ArgumentParser:
    """A parser whose --help is the module's docstring."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--save", action="store_true", help=f"also write the JSON to benchmarks/results/{name}.json"
    )
    return parser


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Least, quartiles, greatest."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else [values[0]] * 3
    )
    named = {"min": min(values), "q1": low, "median": middle, "q3": high, "max": max(values)}
    return {key: round(value, digits) for key, value in named.items()}


def machine() -> dict[str, object]:
    """What the figures depend on; nothing that says whose machine it is."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(_meminfo("MemTotal") / 1e9, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def free_bytes() -> int:
    """Memory that can be taken without swapping."""
    return _meminfo("MemAvailable")


def report(
    name: str,
    *,
    goal: str,
    values: Sequence[float],
    passed: bool,
    options: argparse.Namespace,
    more: dict[str, object],
    measure: str = "median",
    digits: int = 3,
) -> None:
    """Print the JSON, and keep it where --save was given. `measure`: which of the spread counts."""
    around = spread(values, digits)
    parameters = {key: value for key, value in vars(options).items() if key != "save"}
    found = {
        "name": name,
        "goal": goal,
        "measured": around[measure],
        "spread": around,
        "pass": passed,
        **more,
        "parameters": parameters,
        "machine": machine(),
        "command": " ".join([f"python -m benchmarks.{name}", *sys.argv[1:]]),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(text + "\n")


def noise(numel: int, seed: int) -> Tensor:
    """fp32, cheap at any size; no benchmark depends on the values."""
    tile = torch.randn(min(_TILE, numel), generator=torch.Generator().manual_seed(seed))
    return tile.repeat(-(-numel // tile.numel()))[:numel].contiguous()


class Flat(nn.Module):
    """`parts` parameters of about equal size: a model of exactly `numel` elements."""

    def __init__(self, numel: int, parts: int) -> None:
        super().__init__()
        cuts = [numel * part // parts for part in range(parts + 1)]
        whole = noise(numel, 7)
        self.parts = nn.ParameterList(
            nn.Parameter(whole[start:stop].clone()) for start, stop in pairwise(cuts)
        )


# ------------------------------------------------------------------ racks as processes


class RackArgs:
    """What a rack's process is started with. `folder` is empty and shared by all of them."""

    def __init__(
        self, pipe: Connection, rack: int, ports: list[int], folder: str, options: Any
    ) -> None:
        self.pipe, self.rack, self.ports, self.folder, self.options = (
            pipe,
            rack,
            ports,
            folder,
            options,
        )

    def config(self, **settings: Any) -> MendConfig:
        """Settings of this rack on loopback; no MEND_* of whoever runs the benchmark."""
        for key in [key for key in os.environ if key.startswith("MEND_")]:
            del os.environ[key]
        peers = {rack: f"tcp://127.0.0.1:{port}" for rack, port in enumerate(self.ports)}
        return MendConfig(
            rack=self.rack,
            racks=len(self.ports),
            job_id="benchmark",
            sideband_peers=peers,
            **settings,
        )


@contextlib.contextmanager
def racks(
    target: Callable[[RackArgs], None], options: argparse.Namespace, count: int = 2
) -> Iterator[list[Connection]]:
    """Start `target` in a process per rack; gives a pipe to each. Ends them on the way out."""
    spawn = multiprocessing.get_context("spawn")
    ports = free_ports(count)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rack in range(count):
            ours, theirs = spawn.Pipe()
            args = (RackArgs(theirs, rack, ports, folder, options),)
            process = spawn.Process(target=target, args=args, daemon=True)
            process.start()
            theirs.close()  # so that the death of the process is an end of file here
            pipes.append(ours)
            processes.append(process)
        try:
            yield pipes
        finally:
            for process in processes:
                process.join(END_S)
                if process.is_alive():
                    process.kill()
                    process.join()


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)
