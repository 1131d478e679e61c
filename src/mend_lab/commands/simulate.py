"""`python -m mend_lab simulate`: runs one job per seed, and tells the story of each that fails."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mend.config import MendConfig
from mend.config.wiring import policy_of
from mend.errors import ConfigError, require
from mend.types import MOMENT_PERIODS, MS, SECOND
from mend_lab.sim import World, draw, python_of, shrink, tell
from mend_lab.sim.scenario import Scenario
from mend_lab.sim.story import setup

FAILURES_SHOWN = 10
SEEDS_AT_ONCE = 8
"""Seeds in one task of a worker process."""

Fixed = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one seed, as it crosses processes."""

    seed: int
    problems: tuple[str, ...]
    commits: int
    cpu_ns: int
    virtual_ns: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """The seeds to run: [first, stop), or from `first` on until so many minutes are over."""

    first: int = 0
    stop: int | None = 300
    minutes: float | None = None
    jobs: int = 2
    shrink: bool = True
    as_json: bool = False
    config: Path | None = None
    regressions: Path | None = None


@dataclass
class Tally:
    """Sums of the results so far."""

    seeds: int = 0
    commits: int = 0
    cpu_ns: int = 0
    virtual_ns: int = 0
    failed: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.commits += outcome.commits
        self.cpu_ns += outcome.cpu_ns
        self.virtual_ns += outcome.virtual_ns
        if outcome.problems:
            self.failed.append(outcome)


def span_of(text: str) -> tuple[int, int]:
    """`A:B` is A .. B-1, `N` is 0 .. N-1. Raises ConfigError."""
    first, colon, last = text.rpartition(":")
    if not (last.isdecimal() and (first.isdecimal() or not colon)):
        raise ConfigError("seeds", text, "must be N or A:B", "Give --seeds 2000 or 100:200.")
    start, stop = int(first or 0), int(last)
    if stop <= start:
        raise ConfigError(
            "seeds", text, "contains no seed", "A:B runs the seeds A to B-1; give B > A."
        )
    return start, stop


def fixed_by(config: Path | None) -> dict[str, Any]:
    """The fields of a scenario that a user's settings decide; the rest stays drawn."""
    if config is None:
        return {}
    os.environ["MEND_CONFIG"] = str(config)
    settings = MendConfig()
    moments = tuple(settings.moment_periods.get(order, 0) for order in MOMENT_PERIODS)
    return {
        "racks": settings.racks,
        "fragments": settings.fragments,
        "period_steps": settings.sync_period_steps,
        "overlap_steps": settings.tau,
        "overlapped": settings.concurrent_outer_step,
        "k": settings.merge_min_racks,
        "grace_ns": policy_of(settings, settings.racks).grace_ns,
        "lockstep": settings.lockstep,
        "staleness_max_rounds": settings.staleness_max_rounds,
        "apply_mode": settings.apply_mode,
        "payload": settings.codec,
        "merge": settings.merge,
        "momentum": settings.outer_momentum,
        "ramp": settings.ramp_rounds,
        "overlap_ramp": settings.ramp_rounds,
        "moments": moments if any(moments) else (),
        "witness": bool(settings.witness_addr),
    }


def run_seed(seed: int, fixed: Fixed | None = None) -> Outcome:
    """One job to its end. An exception of the simulated code is a problem like any other."""
    torch.set_num_threads(1)
    started_ns = time.process_time_ns()
    virtual_ns = 0
    try:
        report = World(draw(seed, fixed)).run()
        problems, commits = tuple(report.problems), report.commits
        virtual_ns = report.virtual_ns
    except Exception as error:
        problems, commits = (f"{type(error).__name__}: {error}",), 0
    return Outcome(seed, problems, commits, time.process_time_ns() - started_ns, virtual_ns)


def run_seeds(seeds: range, fixed: Fixed) -> list[Outcome]:
    """Run the seeds in a worker process, until everybody has to stop."""
    return [run_seed(seed, fixed) for seed in seeds if not _stop.is_set()]


def simulate(wanted: Wanted, console: Console) -> int:
    """Run the seeds; returns how many broke an invariant. Ctrl-C ends with the results so far."""
    fixed, tally = fixed_by(wanted.config), Tally()
    if wanted.config is not None:
        draw(wanted.first, fixed)  # a setting that no scenario can have is refused at once
    interrupted = False
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    started_ns = time.monotonic_ns()
    with Progress(*columns, console=console, transient=True, disable=wanted.as_json) as progress:
        bar = progress.add_task("", total=None)
        try:
            for outcome in _outcomes(wanted, fixed):
                tally.add(outcome)
                progress.update(bar, description=_progress(wanted, tally))
                if outcome.problems:
                    _report_failure(outcome, wanted, fixed, tally, console)
        except KeyboardInterrupt:
            interrupted = True
    _summary(wanted, tally, time.monotonic_ns() - started_ns, interrupted, console)
    return len(tally.failed)


def _progress(wanted: Wanted, tally: Tally) -> str:
    of = f" of {wanted.stop - wanted.first}" if wanted.stop is not None else ""
    return f"{tally.seeds}{of} seeds, {tally.commits} commits, {len(tally.failed)} broken"


def _outcomes(wanted: Wanted, fixed: Fixed) -> Iterator[Outcome]:
    """Seeds go out a few at a time, so that the end of the time or Ctrl-C comes soon."""
    ends_ns = None
    if wanted.minutes is not None:
        ends_ns = time.monotonic_ns() + int(wanted.minutes * 60 * SECOND)
    tasks = _tasks(wanted, ends_ns)
    if wanted.jobs == 1:
        for seeds in tasks:
            for seed in seeds:
                yield run_seed(seed, fixed)
        return
    # Fresh processes: a fork would copy the locks that the progress display's thread holds.
    fresh = multiprocessing.get_context("spawn")
    stop = fresh.Event()  # which also starts Python's resource tracker, before `_submit` does
    running: set[Future[list[Outcome]]] = set()
    with ProcessPoolExecutor(wanted.jobs, fresh, _enter, (stop,)) as pool:
        try:
            while True:
                for seeds in itertools.islice(tasks, 2 * wanted.jobs - len(running)):
                    running.add(_submit(pool, seeds, fixed))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for each in done:
                    yield from each.result()
        finally:
            stop.set()


def _submit(pool: ProcessPoolExecutor, seeds: range, fixed: Fixed) -> Future[list[Outcome]]:
    """Ctrl-C goes to the whole group of processes; the parent alone answers it. A process that
    this starts inherits the mask, so it is deaf from its first moment on. The parent answers once
    it has handed over what that process is to run; the mask does not bind its other threads."""
    late: list[int] = []
    former = signal.signal(signal.SIGINT, lambda number, _: late.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(run_seeds, seeds, fixed)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, former)
        if late:
            signal.raise_signal(signal.SIGINT)


_stop: Event
"""Set when the parent of this worker process wants no more."""


def _enter(stop: Event) -> None:
    """First thing in a worker process."""
    global _stop
    _stop = stop
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    """One that was killed stops nobody; its workers would wait for ever for the next seeds."""
    require(multiprocessing.parent_process(), "a worker has a parent").join()
    os._exit(1)


def _tasks(wanted: Wanted, ends_ns: int | None) -> Iterator[range]:
    """One seed at a time where the time is limited and nobody shares it."""
    size = 1 if wanted.jobs == 1 else SEEDS_AT_ONCE
    stop = wanted.stop if wanted.stop is not None else 1 << 62
    for first in range(wanted.first, stop, size):
        if ends_ns is not None and time.monotonic_ns() >= ends_ns:
            return
        yield range(first, min(first + size, stop))


# ------------------------------------------------------------------ telling


def _report_failure(
    outcome: Outcome, wanted: Wanted, fixed: Fixed, tally: Tally, console: Console
) -> None:
    """A seed that broke something: shrunk, reported, and kept."""
    if len(tally.failed) > FAILURES_SHOWN or (wanted.as_json and wanted.regressions is None):
        return
    scenario = draw(outcome.seed, fixed)
    smallest = shrink(scenario, list(outcome.problems)) if wanted.shrink else scenario
    if wanted.regressions is not None:
        keep(wanted.regressions, outcome, smallest)
    if wanted.as_json:
        return
    shrunk = ", shrunk to the smallest scenario that still does" if smallest != scenario else ""
    say(console, f"\nseed {outcome.seed} broke an invariant{shrunk}:\n")
    say(console, story_of(smallest))


def story_of(scenario: Scenario) -> str:
    world = World(scenario)
    return tell(world, world.run())


def keep(path: Path, outcome: Outcome, scenario: Scenario) -> None:
    """Append the scenario to the file that the tests run again."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{python_of(scenario)}  # seed {outcome.seed}: {outcome.problems[0]}\n")


def _summary(
    wanted: Wanted, tally: Tally, wall_ns: int, interrupted: bool, console: Console
) -> None:
    count = max(1, tally.seeds)
    if wanted.as_json:
        report = {
            "first": wanted.first,
            "seeds": tally.seeds,
            "commits": tally.commits,
            "interrupted": interrupted,
            "cpu_ms_per_seed": tally.cpu_ns / MS / count,
            "virtual_s": tally.virtual_ns / SECOND,
            "wall_s": wall_ns / SECOND,
            "failed": [{"seed": o.seed, "problems": list(o.problems)} for o in tally.failed],
        }
        console.print_json(json.dumps(report))
        return
    early = "interrupted after " if interrupted else ""
    say(
        console,
        f"{early}{tally.seeds} seeds from {wanted.first}: {len(tally.failed)} broke an invariant; "
        f"{tally.commits} commits, {tally.virtual_ns / SECOND:.0f} virtual seconds, "
        f"{tally.cpu_ns / MS / count:.0f} ms of CPU each",
    )
    if tally.failed:
        numbers = " ".join(str(outcome.seed) for outcome in tally.failed[:FAILURES_SHOWN])
        more = "for details: python -m mend_lab simulate --seed N --trace"
        say(console, f"{more}, with N one of {numbers}")


def trace(seed: int | None, console: Console, config: Path | None = None) -> int:
    """One seed with everything that its ranks noted, in virtual time; returns the problems.

    Raises ConfigError without a seed."""
    if seed is None:
        raise ConfigError("trace", True, "needs one seed", "Give --seed N.")
    torch.set_num_threads(1)
    world = World(draw(seed, fixed_by(config)))
    say(console, setup(world.scenario) + "\n")
    for process in world.processes():
        process.tell = partial(say, console)
    world.broken.tell = lambda when_ns, text: say(console, f"{when_ns / SECOND:9.3f} s {text}")
    report = world.run()
    for problem in report.problems:
        say(console, f"    {problem}")
    say(
        console,
        f"seed {seed}: {report.commits} commits in {report.virtual_ns / 1e9:.2f} virtual seconds, "
        f"{report.events} events, {len(report.problems)} problems, trace {report.trace[:16]}",
    )
    return len(report.problems)


def say(console: Console, text: str) -> None:
    """Print it without colours, a line as a line, for grep."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
