"""cli.simulate: many simulated jobs, one per seed; tells the story of each that went wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.progress import Progress

from mend.sim import World, draw

FAILURES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one seed, as it crosses processes."""

    seed: int
    problems: tuple[str, ...]
    commits: int
    cpu_ns: int


def run_seed(seed: int) -> Outcome:
    """One job to its end. An exception of the simulated code is a problem like any other."""
    torch.set_num_threads(1)
    started_ns = time.process_time_ns()
    try:
        report = World(seed).run()
        problems, commits = tuple(report.problems), report.commits
    except Exception as error:
        problems, commits = (f"{type(error).__name__}: {error}",), 0
    return Outcome(seed, problems, commits, time.process_time_ns() - started_ns)


def simulate(first: int, count: int, jobs: int, console: Console) -> int:
    """Run the seeds; returns how many broke an invariant."""
    seeds = range(first, first + count)
    failed: list[Outcome] = []
    commits = cpu_ns = 0
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(f"seeds {seeds.start}..{seeds.stop - 1}", total=count)
        for outcome in _outcomes(seeds, jobs):
            progress.advance(bar)
            commits, cpu_ns = commits + outcome.commits, cpu_ns + outcome.cpu_ns
            if outcome.problems:
                failed.append(outcome)
                if len(failed) <= FAILURES_SHOWN:
                    show_failure(outcome, console)
    _say(
        console,
        f"{count} seeds from {first}: {len(failed)} broke an invariant; {commits} commits, "
        f"{cpu_ns / 1e6 / count:.0f} ms of CPU each",
    )
    if failed:
        seeds_text = " ".join(str(outcome.seed) for outcome in failed[:FAILURES_SHOWN])
        _say(console, f"look closer: mend simulate --seed N --trace, N of {seeds_text}")
    return len(failed)


def _outcomes(seeds: range, jobs: int) -> Iterator[Outcome]:
    if jobs == 1:
        yield from map(run_seed, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run_seed, seeds, chunksize=4)


def show_failure(outcome: Outcome, console: Console) -> None:
    _say(console, draw(outcome.seed).story())
    for problem in outcome.problems:
        _say(console, f"    {problem}")


def trace(seed: int, console: Console) -> int:
    """One seed with everything that its ranks noted, in virtual time."""
    torch.set_num_threads(1)
    world = World(seed)
    _say(console, world.scenario.story())
    for process in world.processes():
        process.tell = partial(_say, console)
    report = world.run()
    for problem in report.problems:
        _say(console, f"    {problem}")
    _say(
        console,
        f"seed {seed}: {report.commits} commits in {report.virtual_ns / 1e9:.2f} virtual seconds, "
        f"{report.events} events, {len(report.problems)} problems, trace {report.trace[:16]}",
    )
    return len(report.problems)


def _say(console: Console, text: str) -> None:
    """As it is: no colours, and a line stays a line, for grep."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
