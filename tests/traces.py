"""Pins what simulated jobs do, so that a change that should change nothing shows that it does not.

    python -m tests.traces                        compare with tests/sim/traces.txt
    python -m tests.traces --seeds 0:10           just these
    python -m tests.traces --pin                  write the file anew; the commit says why
    python -m tests.traces --seeds 0:2000 --against REV     compare with a revision of git, which
                                                  runs the same seeds: 40 minutes on two cores

A trace is everything that the processes of one seed noted, with its times: decisions, not bits,
so that it is the same on every machine and with every torch. It hashes numbers alone: those of
tests/trace_kinds.py for kinds and fields, and values. Names and sentences may change without it.
Exit status 1 when one differs. tests/sim/test_tapes.py compares the pinned seeds, too.

A change that must change nothing compares more seeds than are pinned with the revision before it.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from mend_lab.sim import World
from tests.trace_kinds import numbered

PINNED = Path(__file__).parent / "sim" / "traces.txt"
ROOT = PINNED.parents[2]


def trace_of_seed(seed: int) -> str:
    torch.set_num_threads(1)
    world = World(seed)
    world.run()
    return trace_of(world)


def trace_of(world: World) -> str:
    """12 hex digits of all notes of all processes, behind a run."""
    hashed = hashlib.sha256()
    for process in [*world.processes(), *world.past]:
        for event, at_ns in zip(process.notes, process.noted_ns, strict=True):
            hashed.update(repr((*process.me, at_ns, *numbered(event))).encode())
    return hashed.hexdigest()[:12]


def read_pinned(path: Path = PINNED) -> dict[int, str]:
    """seed -> its trace."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {int(seed): trace for seed, trace in lines}


def run_seeds(seeds: range, jobs: int) -> Iterator[tuple[int, str]]:
    """Ascending by seed."""
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from zip(seeds, pool.imap(trace_of_seed, seeds), strict=True)


def differences(found: Mapping[int, str], pinned: Mapping[int, str]) -> list[int]:
    """Seeds whose trace is not the pinned one, or has none."""
    return [seed for seed, trace in found.items() if pinned.get(seed) != trace]


def traces_of_revision(revision: str, seeds: str, jobs: int) -> dict[int, str]:
    """seed -> its trace by the code of this revision, which pins them in a worktree of its own.
    Raises CalledProcessError where git knows no such revision or the simulation fails."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            pin = ("-m", "tests.traces", "--seeds", seeds, "--jobs", str(jobs), "--pin")
            env = {**os.environ, "PYTHONPATH": str(tree / "src")}
            subprocess.run([sys.executable, *pin], cwd=tree, env=env, check=True)
            return read_pinned(tree / PINNED.relative_to(ROOT))
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", metavar="A:B", help="default: all that are pinned")
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--pin", action="store_true", help="write tests/sim/traces.txt anew")
    goal.add_argument("--against", metavar="REV", help="compare with this revision of git")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    asked = parser.parse_args()
    wanted = asked.seeds or f"0:{len(read_pinned())}"
    first, _, last = wanted.partition(":")
    seeds, found = range(int(first), int(last)), {}
    for seed, trace in run_seeds(seeds, asked.jobs):
        found[seed] = trace
        if sys.stderr.isatty():
            print(f"\r{len(found)} of {len(seeds)}", end="", file=sys.stderr)
    if asked.pin:
        PINNED.write_text("".join(f"{seed} {trace}\n" for seed, trace in found.items()))
        print(f"{len(found)} traces pinned in {PINNED}")
        return 0
    then = traces_of_revision(asked.against, wanted, asked.jobs) if asked.against else read_pinned()
    other = differences(found, then)
    print(f"{len(found)} seeds, {len(other)} with another trace", *other[:20])
    return bool(other)


if __name__ == "__main__":
    sys.exit(main())
