"""Shared parts of the benchmarks: options, timing, statistics, the JSON result, racks as processes.

Every benchmark prints {name, goal, better, unit, measured, spread, samples, limit, pass,
parameters, machine, command} and its own fields. `measured` is the median, or the maximum where the
goal is one; `spread` gives the quartiles and extremes of the `samples`. `limit` is the figure of
something plainer on the same machine in the same run (memcpy, one socket, a step without mend), so
that results of two machines can be compared; null where there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

Option = tuple[Any, str]
"""Default and help."""


@dataclass(frozen=True, slots=True)
class Goal:
    """`text` says it: the `measure` of the values has the `bound`, in `unit`. `digits`: to which
    the values are rounded in the result."""

    text: str
    bound: float
    unit: str
    better: Literal["lower", "higher"] = "lower"
    measure: Literal["median", "max"] = "median"
    digits: int = 3

    def is_met(self, values: Sequence[float]) -> bool:
        figure = max(values) if self.measure == "max" else statistics.median(values)
        return figure <= self.bound if self.better == "lower" else figure >= self.bound


def parser_of(name: str, doc: str) -> argparse.ArgumentParser:
    """A parser whose --help is the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def read_options(name: str, doc: str, wanted: Mapping[str, Option]) -> argparse.Namespace:
    """The options of a benchmark, from the command line; every benchmark has --save.

    `wanted`: name -> (default, help). The default decides what an option accepts: False makes it a
    flag, a list whole numbers separated by commas, a mapping some of its keys separated by commas
    (all by default), a tuple one of its elements (the first by default), anything else one value of
    its type. An empty help hides the option.
    """
    parser = parser_of(name, doc)
    parser.add_argument("--save", action="store_true", help="also write to benchmarks/results")
    for key, (default, text) in wanted.items():
        more: dict[str, Any] = {"default": default, "type": type(default)}
        shown = f"{text} (default {default})" if text else argparse.SUPPRESS
        if default is False:
            more, shown = {"action": "store_true"}, text
        elif isinstance(default, list):
            more, shown = {"default": default, "type": _numbers}, f"{text} (default {default})"
        elif isinstance(default, Mapping):
            more, shown = {"default": ",".join(default)}, f"{text} (default: all)"
        elif isinstance(default, tuple):
            more = {"default": default[0], "choices": default}
            shown = f"{text} (default {default[0]})"
        parser.add_argument(f"--{key.replace('_', '-')}", help=shown, **more)
    options = parser.parse_args()
    for key, (known, _) in wanted.items():
        given = getattr(options, key)
        if isinstance(known, Mapping) and (unknown := set(given.split(",")) - set(known)):
            parser.error(f"--{key}: {min(unknown)!r} is none of {', '.join(known)}")
    return options


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def with_options(options: argparse.Namespace, **values: object) -> argparse.Namespace:
    """A copy of the options with other or further values."""
    return argparse.Namespace(**{**vars(options), **values})


def take_turns(
    runs: Mapping[str, Callable[[], object]],
    repeats: int,
    before: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each run in each repeat. All runs take turns in every repeat, so that a
    disturbance of the machine meets all of them; a first repeat warms up and is not counted.
    `before` is called before each run and is not timed."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            if before is not None:
                before()
            started = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def ratios(values: Iterable[float], bases: Iterable[float]) -> list[float]:
    """values / bases, pair by pair."""
    return [value / base for value, base in zip(values, bases, strict=True)]


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Least, quartiles, greatest."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else [values[0]] * 3
    )
    named = {"min": min(values), "q1": low, "median": middle, "q3": high, "max": max(values)}
    return {key: round(value, digits) for key, value in named.items()}


def spreads(values: Mapping[str, Sequence[float]], digits: int = 3) -> dict[str, object]:
    """The spread of each entry."""
    return {name: spread(each, digits) for name, each in values.items()}


def machine() -> dict[str, object]:
    """The machine that the figures depend on, without a name or an owner. `gpu`: where this process
    uses one."""
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_initialized() else {}  # type: ignore[no-untyped-call]
    return {
        **gpu,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(proc_bytes("meminfo", "MemTotal") / 1e9, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def limit(what: str, unit: str, values: Sequence[float], digits: int = 3) -> dict[str, object]:
    """The figure of something plainer, on the same machine in the same run."""
    return {"what": what, "unit": unit, **spread(values, digits)}


def report(
    name: str,
    goal: Goal,
    values: Sequence[float],
    options: argparse.Namespace,
    plain: Mapping[str, object] | None,
    more: Mapping[str, object],
    *,
    also: bool = True,
) -> None:
    """Print the result as JSON, and write it to RESULTS with --save. `plain`: the limit of this
    run; `more`: fields of this benchmark alone; `also`: further conditions to pass."""
    around = spread(values, goal.digits)
    parameters = {key: value for key, value in vars(options).items() if key != "save"}
    result = {
        "name": name,
        "goal": goal.text,
        "better": goal.better,
        "unit": goal.unit,
        "measured": around[goal.measure],
        "spread": around,
        "samples": len(values),
        "limit": plain,
        "pass": goal.is_met(values) and also,
        **more,
        "parameters": parameters,
        "machine": machine(),
        "command": " ".join([f"python -m benchmarks.{name}", *sys.argv[1:]]),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(text + "\n")


def noise(numel: int, seed: int) -> Tensor:
    """fp32 values of a repeated random tile: cheap at any size."""
    tile = torch.randn(min(_TILE, numel), generator=torch.Generator().manual_seed(seed))
    return tile.repeat(-(-numel // tile.numel()))[:numel].contiguous()


def copies_s(numel: int) -> list[float]:
    """Seconds of COPIES plain copies of `numel` fp32 elements by one thread."""
    torch.set_num_threads(1)
    model = noise(numel, 1)
    copy = torch.zeros_like(model)
    return take_turns({"copy": lambda: copy.copy_(model)}, COPIES)["copy"]


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
    """Arguments of a rack's process. `folder` starts empty and is shared by all racks."""

    pipe: Connection
    rack: int
    ports: list[int]
    folder: str
    options: Any
    witness_addr: str

    def config(self, **settings: Any) -> MendConfig:
        """Settings of this rack, on loopback unless `settings` name its peers. MEND_* of the shell
        are ignored. There is no ramp, so that a round is measured as it is for most of a run."""
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
    started again; `pipes` lead to the newest process of each. `parents`: racks start processes of
    their own, as some peers do; those survive a benchmark that is killed."""

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
        # One process imports torch, and all others are its forks, which start at once.
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
            args = (self._witness_addr, count, JOB)
            self._witness = self._spawn.Process(target=witness.run, args=args, daemon=True)
            self._witness.start()

    def start_all(self) -> list[Connection]:
        """Start every rack; returns their pipes."""
        return [self.start(rack) for rack in range(self.count)]

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
        """Process id of the rack's newest process."""
        return int(self._newest[rack].pid)

    def kill(self, rack: int) -> float:
        """Send SIGKILL; returns the time.monotonic() of it."""
        at_s = time.monotonic()
        self._newest[rack].kill()
        self._newest[rack].join()
        return at_s

    def close(self) -> None:
        for pipe in self.pipes.values():
            pipe.close()  # a rack that waits for a message gets an end of file
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
        yield job.start_all()
    finally:
        job.close()


def freeze_garbage() -> None:
    """Take all objects of this process out of garbage collection. A full collection visits every
    one, which takes 200 to 400 ms in a process with torch; where it falls is chance."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def cpu_name() -> str:
    """Model name of the CPU, or the architecture where the kernel gives none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def proc_bytes(file: str, key: str) -> int:
    """A line of /proc/FILE that is given in kB, in bytes; 0 where the kernel has no such line."""
    for line in Path("/proc", file).read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0
