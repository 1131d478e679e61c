"""Pins what simulated jobs do, so that a change that should change nothing shows that it does not.

    python -m tests.traces                        compare with tests/sim/traces.txt
    python -m tests.traces --seeds 0:10           just these
    python -m tests.traces --pin                  write the file anew; the commit says why
    python -m tests.traces --all                  2,000 seeds (20 minutes on two cores), with
                                                  tests/sim/traces_by_hundred.txt; --all --pin

A trace is everything that the processes of one seed noted, with its times: decisions, not bits,
so that it is the same on every machine and with every torch. It hashes numbers alone: those of
tests/trace_kinds.py for kinds and fields, and values. Names and sentences may change without it.
Exit status 1 when one differs. tests/sim/test_tapes.py compares the pinned seeds, too.

Of all seeds, one digest is pinned per hundred: which seed it was, `--seeds` of that hundred says in
two checkouts. A change that must change nothing pins all before it, and compares behind it.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from mend_lab.sim import World
from tests.trace_kinds import numbered

PINNED = Path(__file__).parent / "sim" / "traces.txt"
BY_HUNDRED = PINNED.with_name("traces_by_hundred.txt")
ALL, HUNDRED = 2_000, 100


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
    if not path.exists():
        sys.exit(f"nothing is pinned in {path}: run the same with --pin, before your change")
    lines = (line.split() for line in path.read_text().splitlines())
    return {int(seed): trace for seed, trace in lines}


def run_seeds(seeds: range, jobs: int) -> Iterator[tuple[int, str]]:
    """Ascending by seed."""
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from zip(seeds, pool.imap(trace_of_seed, seeds), strict=True)


def differences(found: Mapping[int, str], pinned: Mapping[int, str]) -> list[int]:
    """Seeds whose trace is not the pinned one, or has none."""
    return [seed for seed, trace in found.items() if pinned.get(seed) != trace]


def by_hundred(traces: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """First seed of each hundred that is whole -> one digest of its traces, as soon as it is."""
    hashed = hashlib.sha256()
    for seed, trace in traces:
        hashed.update(f"{seed} {trace}\n".encode())
        if (seed + 1) % HUNDRED == 0:
            yield seed + 1 - HUNDRED, hashed.hexdigest()[:12]
            hashed = hashlib.sha256()


def compare_all(jobs: int, pin: bool) -> int:
    """Tells of each hundred when it is done; returns the exit status."""
    pinned = {} if pin else read_pinned(BY_HUNDRED)
    found = dict[int, str]()
    for first, digest in by_hundred(run_seeds(range(ALL), jobs)):
        found[first] = digest
        verdict = "" if pin else "equal" if pinned.get(first) == digest else "DIFFERENT"
        print(f"{first} to {first + HUNDRED - 1}: {digest} {verdict}", flush=True)
    if pin:
        BY_HUNDRED.write_text("".join(f"{first} {digest}\n" for first, digest in found.items()))
        return 0
    return bool(differences(found, pinned))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", metavar="A:B", help="default: all that are pinned")
    parser.add_argument("--pin", action="store_true", help="write tests/sim/traces.txt anew")
    parser.add_argument("--all", action="store_true", help=f"{ALL} seeds, a digest per {HUNDRED}")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    asked = parser.parse_args()
    if asked.all:
        return compare_all(asked.jobs, asked.pin)
    first, _, last = (asked.seeds or f"0:{len(read_pinned())}").partition(":")
    seeds, found = range(int(first), int(last)), {}
    for seed, trace in run_seeds(seeds, asked.jobs):
        found[seed] = trace
        if sys.stderr.isatty():
            print(f"\r{len(found)} of {len(seeds)}", end="", file=sys.stderr)
    if asked.pin:
        PINNED.write_text("".join(f"{seed} {trace}\n" for seed, trace in found.items()))
        print(f"{len(found)} traces pinned in {PINNED}")
        return 0
    other = differences(found, read_pinned())
    print(f"{len(found)} seeds, {len(other)} with another trace", *other[:20])
    return bool(other)


if __name__ == "__main__":
    sys.exit(main())
