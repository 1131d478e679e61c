"""Plants bugs of the protocol, one at a time, and draws seeds until a checker speaks.

    python -m tests.mutation_table                 all of them, a table at the end
    python -m tests.mutation_table --only 5,9      just these, with the seeds that show them

The bugs are in tests/sim/bugs.py. Each runs in a process of its own, from seed 0 on; the seed that
shows it is run once more without it and must be clean, or it proves nothing. Exit status 1 when a
bug survives all seeds. A full run writes benchmarks/results/mutation_table.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mend_lab.sim import draw, loop, problems_of
from tests.sim.bugs import BUGS, ELSEWHERE, NOT_HERE, Bug, planted

RESULT = Path(__file__).parent.parent / "benchmarks/results/mutation_table.md"
SEEDS = 2_000
EVENTS_MAX = 300_000
"""Of a seed; clean ones take a tenth. With a bug two coordinators may argue for ever."""

TOLD_EVERY_S = 30.0
CAUSE_CHARS = 220


@dataclass(frozen=True, slots=True)
class Shown:
    """`seed` -1: no seed showed it. `clean`: what that seed breaks without the bug."""

    bug: Bug
    seed: int
    problem: str
    clean: tuple[str, ...]
    seconds: float


def look(work: tuple[Bug, int, int]) -> Shown:
    """Draw seeds first..stop until one shows the bug."""
    bug, first, stop = work
    torch.set_num_threads(1)
    loop.EVENTS_MAX = EVENTS_MAX
    started = told = time.monotonic()
    for seed in range(first, stop):
        with planted(bug):
            problems = problems_of(draw(seed), first=True)
        now = time.monotonic()
        if problems:
            clean = tuple(problems_of(draw(seed)))
            return Shown(bug, seed, problems[0], clean, now - started)
        if now - told > TOLD_EVERY_S:
            told = now
            print(f"  bug {bug.name}: {seed + 1 - first} seeds, nothing yet", flush=True)
    return Shown(bug, -1, "", (), time.monotonic() - started)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names, with commas between; 5 is also 5b")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="at most so many for each")
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    given = parser.parse_args(arguments)
    names = [name for name in given.only.split(",") if name]
    chosen = [bug for bug in BUGS if not names or {bug.name, bug.name.rstrip("bcd")} & {*names}]
    started, found = time.monotonic(), dict[str, Shown]()
    work = [(bug, given.first, given.first + given.seeds) for bug in chosen]
    context = multiprocessing.get_context("fork")
    with context.Pool(given.jobs, maxtasksperchild=1) as pool:
        for shown in pool.imap_unordered(look, work, chunksize=1):
            found[shown.bug.name] = shown
            tell(shown, given.first)
    results = [found[bug.name] for bug in chosen]
    whole = not names and not given.first and given.seeds >= SEEDS
    if whole:
        RESULT.write_text(table(results, given.seeds, time.monotonic() - started), "utf-8")
    missed = [shown.bug.name for shown in results if shown.seed < 0]
    unclean = [shown for shown in results if shown.clean]
    print(f"{len(results) - len(missed)} of {len(results)} bugs were shown by a seed")
    surprising = [name for name in missed if name not in ELSEWHERE]
    if surprising:
        print(f"not shown: {', '.join(surprising)}")
    return 1 if surprising or unclean or not results else 0


def tell(shown: Shown, first: int) -> None:
    bug, count = shown.bug, shown.seed - first + 1
    verdict = f"{count:5} seeds" if shown.seed >= 0 else "NOT SHOWN  "
    if shown.seed < 0 and bug.name in ELSEWHERE:
        verdict = "elsewhere  "
    print(f"{bug.name:>3} {verdict} {shown.seconds:6.1f} s  {bug.says}", flush=True)
    print(f"{'':24}{shown.problem[:CAUSE_CHARS] or ELSEWHERE.get(bug.name, '')}", flush=True)
    for problem in shown.clean:
        print(f"{'':24}seed {shown.seed} breaks without the bug, too: {problem}", flush=True)


def table(results: Sequence[Shown], seeds: int, seconds: float) -> str:
    """What a full run found, for people."""
    rows = [
        f"| {shown.bug.name} | {shown.bug.says} | {shown.seed + 1} | {shown.seed} | "
        f"{cell(shown.problem)} |"
        for shown in results
        if shown.seed >= 0
    ]
    missed = [
        f"| {shown.bug.name} | {shown.bug.says} | {ELSEWHERE.get(shown.bug.name, 'nothing')} |"
        for shown in results
        if shown.seed < 0
    ]
    lines = [
        "# Planted bugs, and the seeds that show them",
        "",
        f"`make mutation-table` (`python -m tests.mutation_table`): {len(results)} bugs, one at a "
        f"time, at most {seeds:,} seeds each, {seconds / 60:.0f} minutes on 2 cores of a shared "
        f"machine ({platform.machine()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}). Every seed in the table is clean without its bug. `python -m "
        "tests.mutation_table --only NAME` shows one again; tests/sim/bugs.py has them.",
        "",
        "| bug | what the code does | seeds needed | seed | what the checkers said first |",
        "|---|---|---|---|---|",
        *rows,
    ]
    if missed:
        lines += [
            "", f"No seed of {seeds:,} shows:", "", "| bug | what the code does | what does |",
        ]  # fmt: skip
        lines += ["|---|---|---|", *missed]
    lines += ["", "Of the list of bugs these have no exact counterpart in what there is:", ""]
    lines += [f"- {name}: {why}" for name, why in NOT_HERE.items()]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    short = text if len(text) <= CAUSE_CHARS else text[: CAUSE_CHARS - 3] + "..."
    return short.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
