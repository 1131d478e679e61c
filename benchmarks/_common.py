"""benchmarks._common: what the benchmarks share: arguments, statistics, one JSON object, two racks.

Every benchmark prints {name, goal, better, unit, measured, spread, samples, limit, pass,
parameters, machine, command} and what is special to it. `measured` is a median, where the goal is
no maximum; `spread` names the quartiles and the extremes of so many `samples` around it. `limit` is
what the machine gave to something plainer in the same run (memcpy, one socket, a step without
mend), so that a figure can be read on another machine; null where there is nothing of the kind.
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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mend import MendConfig
from mend.engine import witness
from mend.tools.ports import LOOPBACK, free_ports

RESULTS = Path(__file__).parent / "results"
END_S = 30.0
JOB = "benchmark"
COPIES = 5
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


def limit(what: str, unit: str, values: Sequence[float], digits: int = 3) -> dict[str, object]:
    """What the same machine gave to something plainer, in the same run."""
    return {"what": what, "unit": unit, **spread(values, digits)}


def report(
    name: str,
    *,
    goal: str,
    values: Sequence[float],
    passed: bool,
    options: argparse.Namespace,
    more: Mapping[str, object],
    unit: str,
    beside: Mapping[str, object] | None,
    better: Literal["lower", "higher"] = "lower",
    measure: str = "median",
    digits: int = 3,
) -> None:
    """Print the JSON, and keep it where --save was given. `measure`: which of the spread counts;
    `beside`: the limit of this run."""
    around = spread(values, digits)
    parameters = {key: value for key, value in vars(options).items() if key != "save"}
    found = {
        "name": name,
        "goal": goal,
        "better": better,
        "unit": unit,
        "measured": around[measure],
        "spread": around,
        "samples": len(values),
        "limit": beside,
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


def copies_s(numel: int) -> list[float]:
    """Seconds of one plain copy of so many fp32 elements, by one thread; of several."""
    torch.set_num_threads(1)
    model, found = noise(numel, 1), []
    out = torch.zeros_like(model)
    for _ in range(COPIES):
        began_s = time.perf_counter()
        out.copy_(model)
        found.append(time.perf_counter() - began_s)
    return found


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


@dataclass(frozen=True, slots=True)
class RackArgs:
    """What a rack's process is started with. `folder` is empty and shared by all of them."""

    pipe: Connection
    rack: int
    ports: list[int]
    folder: str
    options: Any
    witness_addr: str

    def config(self, **settings: Any) -> MendConfig:
        """Settings of this rack, on loopback unless `settings` name its peers; no MEND_* of whoever
        runs the benchmark. Without a ramp: what is measured is a round as it is for most of a
        run."""
        for key in [key for key in os.environ if key.startswith("MEND_")]:
            del os.environ[key]
        peers = {rack: f"tcp://{LOOPBACK}:{port}" for rack, port in enumerate(self.ports)}
        steady = {"outer_ramp_rounds": 0, "outer_optimizer_momentum": 0.0, "sideband_peers": peers}
        return MendConfig(
            rack=self.rack,
            racks=len(self.ports),
            job_id=JOB,
            witness_addr=self.witness_addr,
            **{**steady, **settings},
        )


class Racks:
    """One job on loopback: a process per rack, and a witness if wanted. A rack can be killed and
    started again. `pipes` leads to the newest life of each. `parents`: racks start processes of
    their own, as some peers do; then a killed benchmark leaves them behind."""

    def __init__(
        self,
        target: Callable[[RackArgs], None],
        options: argparse.Namespace,
        count: int = 2,
        with_witness: bool = False,
        parents: bool = False,
    ) -> None:
        self._target, self._options, self.count = target, options, count
        self._parents = parents
        # One process imports torch, and all others are its forks: they start in no time.
        self._spawn = multiprocessing.get_context("forkserver")
        self._spawn.set_forkserver_preload(["benchmarks._work"])
        *self.ports, extra = free_ports(count + 1)
        self._folder = tempfile.TemporaryDirectory()
        self.pipes: dict[int, Connection] = {}
        self._newest: dict[int, Any] = {}
        self._processes: list[Any] = []
        self._witness: Any = None
        self._witness_addr = f"tcp://{LOOPBACK}:{extra}" if with_witness else ""
        if with_witness:
            args = (self._witness_addr, count)
            self._witness = self._spawn.Process(target=_witness, args=args, daemon=True)
            self._witness.start()

    def start(self, rack: int) -> Connection:
        ours, theirs = self._spawn.Pipe()
        args = RackArgs(
            theirs, rack, self.ports, self._folder.name, self._options, self._witness_addr
        )
        process = self._spawn.Process(target=self._target, args=(args,), daemon=not self._parents)
        process.start()
        theirs.close()  # so that the death of the process is an end of file here
        self.pipes[rack], self._newest[rack] = ours, process
        self._processes.append(process)
        return ours

    def pid(self, rack: int) -> int:
        """Of its newest life."""
        return int(self._newest[rack].pid)

    def kill(self, rack: int) -> float:
        """SIGKILL. Returns when it was sent, by time.monotonic."""
        at_s = time.monotonic()
        self._newest[rack].kill()
        self._newest[rack].join()
        return at_s

    def close(self) -> None:
        for pipe in self.pipes.values():
            pipe.close()  # who still waits for a word finds its end
        for process in self._processes:
            process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join()
        if self._witness is not None:  # it would wait for the racks that were killed
            self._witness.terminate()
            self._witness.join(END_S)
        self._folder.cleanup()


@contextlib.contextmanager
def racks(
    target: Callable[[RackArgs], None], options: argparse.Namespace, count: int = 2
) -> Iterator[list[Connection]]:
    """Start `target` in a process per rack; gives a pipe to each. Ends them on the way out."""
    job = Racks(target, options, count)
    try:
        yield [job.start(rack) for rack in range(count)]
    finally:
        job.close()


def _witness(address: str, count: int) -> None:
    """The process of the witness."""
    witness.run(address, count, JOB)


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
