"""benchmarks.lock: the work of mend's threads that holds the interpreter's lock. Prints one JSON
object.

    python -m benchmarks.lock --racks 2,4

Racks on loopback with mend's default settings and events and tapes in a folder. Each steps a small
model every `step-ms`, and sleeps meanwhile, so whatever its threads take is mend's. In an idle job
no round comes; in the other one every fragment has a round every H steps. Rack 0, which
coordinates, is measured, and the last rack, which does not.

Per thread: CPU time (its own clock, which other processes change only through caches and wake-ups)
and calls of Python functions, in runs of their own under cProfile. A round's share is what the job
with rounds takes more than the idle one. Calls of compiled kernels and of the system let go of the
lock, so the CPU time of workers and lanes is an upper limit; that of the loop is nearly all Python.

`measured` is CPU milliseconds per second of the loop of an idle rack that coordinates nothing.
`functions` (with --most N): the N functions that the loop calls most often.
"""

from __future__ import annotations

import cProfile
import select
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import mend
from benchmarks._common import (
    Flat,
    Goal,
    RackArgs,
    racks,
    read_options,
    report,
    with_options,
)

GOAL = Goal("<= 10 ms of each second", 10.0, "ms/s", digits=2)
LOOP, TRAINING = "mend-loop", "training"
NEVER = 1_000_000_000
WARM_UP_S = 2.0
MOVED = 64
"""Elements of each parameter that a step moves: as few as make an offer."""
OPTIONS = {
    "racks": ([2, 4], "numbers of racks, one job after the other"),
    "numel": (1 << 20, "fp32 elements of the model"),
    "step_ms": (25.0, "between two steps"),
    "seconds": (10.0, "that are measured"),
    "repeats": (3, "of the jobs whose CPU time is measured; their median counts"),
    "most": (0, "functions of the loop to show, with their calls from the start of the process"),
    "cpu_only": (False, "leave the calls out"),
    "no_files": (False, "no folder for events and tapes"),
}

Taken = dict[str, float]
"""thread -> CPU ms, or calls."""


def main() -> None:
    options = read_options("lock", __doc__, OPTIONS)
    table: dict[str, Any] = {}
    idle_ms = list[float]()
    for count in options.racks:
        found = _measure(options, count)
        table[f"{count} racks"] = found
        idle_ms.append(found["last"][LOOP]["idle_ms_per_s"])
    report("lock", GOAL, idle_ms, options, None, {"threads": table})


def _measure(options: Any, count: int) -> dict[str, dict[str, dict[str, float]]]:
    kinds = ["cpu"] * options.repeats + ([] if options.cpu_only else ["calls"])
    runs: dict[str, list[Any]] = {"cpu": [], "calls": []}
    for kind in kinds:
        idle, busy = (
            _job(with_options(options, kind=kind, rounds=rounds), count) for rounds in (False, True)
        )
        runs[kind].append((idle, busy))
    shown: dict[str, dict[str, dict[str, float]]] = {}
    for place, rack in enumerate(("first", "last")):
        threads: dict[str, dict[str, float]] = {}
        for kind, unit in (("cpu", "ms"), ("calls", "calls")):
            if not runs[kind]:
                continue
            rows = [_rows(idle[place], busy[place]) for idle, busy in runs[kind]]
            for name in sorted({name for row in rows for name in row}):
                pairs = [row.get(name, (0.0, 0.0)) for row in rows]
                a, b = (round(statistics.median(each), 2) for each in zip(*pairs, strict=True))
                threads.setdefault(name, {})[f"idle_{unit}_per_s"] = a
                threads[name][f"{unit}_per_round"] = b
        shown[rack] = threads
    if options.most and runs["calls"]:
        for place, job in (("idle", 0), ("busy", 1)):
            most = runs["calls"][0][job][1]["most"]
            print(place, *(f"{n:9} {name}" for name, n in most), sep="\n", file=sys.stderr)
    return shown


def _rows(idle: dict[str, Any], busy: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """thread -> (taken per idle second, per round)."""
    names = {*idle["taken"], *busy["taken"]}
    found = {}
    for name in names:
        each_s = idle["taken"].get(name, 0.0) / idle["seconds"]
        more = busy["taken"].get(name, 0.0) - each_s * busy["seconds"]
        found[name] = each_s, more / busy["rounds"]
    return found


def _job(options: Any, count: int) -> list[dict[str, Any]]:
    """What the first and the last rack have taken."""
    with racks(_rack, options, count) as pipes:
        for pipe in pipes:
            pipe.recv()  # it trains
        time.sleep(WARM_UP_S)
        for word in ("begin", "end"):
            for pipe in pipes:
                pipe.send(word)
            time.sleep(options.seconds if word == "begin" else 0)
        found = [pipe.recv() for pipe in pipes]
    return [found[0], found[-1]]


def _rack(args: RackArgs) -> None:
    options = args.options
    torch.set_num_threads(1)
    calls = _Calls() if options.kind == "calls" else None
    model = Flat(options.numel, 4)
    more: dict[str, Any] = {} if options.rounds else {"sync_period_steps": NEVER}
    if not options.rounds:
        more["overlap_steps"] = NEVER // 4
    if not options.no_files:
        more["diagnostics_dir"] = str(Path(args.folder) / "diagnostics")
    runtime = mend.mend_init(model, args.config(**more))
    args.pipe.send("trains")
    look = calls.by_thread if calls is not None else _cpu_ms
    asked = select.poll()
    asked.register(args.pipe.fileno(), select.POLLIN)
    parts = [parameter.data[:MOVED] for parameter in model.parameters()]
    before: tuple[float, int, Taken] | None = None
    due_s = time.perf_counter()
    while True:
        due_s = max(due_s + options.step_ms / 1e3, time.perf_counter())
        time.sleep(max(0.0, due_s - time.perf_counter()))
        for part in parts:
            part.add_(1e-4 * (1 + args.rack))
        runtime.step(tokens=1)
        if asked.poll(0):
            rounds = runtime.status().rounds_committed
            if args.pipe.recv() == "begin":
                before = time.perf_counter(), rounds, look()
            else:
                break
    began_s, first, taken = before or (0.0, 0, {})
    seconds = time.perf_counter() - began_s
    now = look()
    most = calls.of_loop().most_common(options.most) if calls is not None else []
    args.pipe.send(
        {
            "taken": {name: now[name] - taken.get(name, 0.0) for name in now},
            "seconds": seconds,
            "rounds": max(1, rounds - first),
            "most": most,
        }
    )
    mend.mend_shutdown(model)


def _cpu_ms() -> Taken:
    """CPU time of each Python thread that lives."""
    found: Taken = {}
    for thread in threading.enumerate():
        if thread.ident is not None:
            clock = time.pthread_getcpuclockid(thread.ident)
            name = _name_of(thread)
            found[name] = found.get(name, 0.0) + time.clock_gettime(clock) * 1e3
    return found


def _name_of(thread: threading.Thread) -> str:
    """Lanes have a thread per connection; all are one row."""
    if thread is threading.main_thread():
        return TRAINING
    return "mend-lane" if thread.name.startswith("mend-lane") else thread.name


class _Calls:
    """Calls of Python functions by thread, from now on: those of this thread, and of threads that
    start."""

    def __init__(self) -> None:
        self._profiles: dict[threading.Thread, cProfile.Profile] = {}
        run, profiled = threading.Thread.run, self._profiled

        def run_profiled(thread: threading.Thread) -> None:
            profiled(thread)
            run(thread)

        threading.Thread.run = run_profiled  # type: ignore[method-assign]
        profiled(threading.current_thread())

    def _profiled(self, thread: threading.Thread) -> None:
        self._profiles[thread] = profile = cProfile.Profile()
        profile.enable()

    def by_thread(self) -> Taken:
        found: Taken = {}
        for thread, profile in list(self._profiles.items()):
            name = _name_of(thread)
            count = sum(each.callcount for each in _functions(profile))
            found[name] = found.get(name, 0.0) + count
        return found

    def of_loop(self) -> Counter[str]:
        """Of each function, by its place."""
        found = Counter[str]()
        for thread, profile in list(self._profiles.items()):
            for each in _functions(profile) if thread.name == LOOP else ():
                code = each.code
                where = code.co_filename.rpartition("/src/")[2].rpartition("/lib/")[2]
                found[f"{where}:{code.co_qualname}"] += each.callcount
        return found


def _functions(profile: cProfile.Profile) -> list[Any]:
    """The entries of functions that are written in Python."""
    return [each for each in profile.getstats() if not isinstance(each.code, str)]


if __name__ == "__main__":
    main()
