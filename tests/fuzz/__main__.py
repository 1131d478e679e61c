"""Feeds whatever takes bytes from outside with what it should not get. `make fuzz` runs it all.

    python -m tests.fuzz                        the full numbers, a table at the end
    python -m tests.fuzz --only wire --wire 5000 --seed 3
    python -m tests.fuzz --minutes 10           no target is given more time than its share
    python -m tests.fuzz --replay wire FILE     one input again, with its traceback

An input that is not survived is kept in runs/fuzz, and the table is followed by the line that runs
it again. Exit status 1 when there is one, or when the process has grown by more than its limit.
"""

from __future__ import annotations

import argparse
import logging
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.fuzz.config import Config
from tests.fuzz.harness import RSS_GROWTH_BYTES_MAX, Result, Target, fuzz, limit_memory
from tests.fuzz.machines import Machines, Sieges
from tests.fuzz.shots import Shots
from tests.fuzz.sockets import KeyedSideband, Lane, RelayedLane, SealedLane, Sideband
from tests.fuzz.state import State, Sums
from tests.fuzz.tape import MachineState, Tape
from tests.fuzz.wire import Looks, Wire

TARGETS: dict[str, Callable[[int], Target]] = {
    "wire": Wire, "looks": Looks, "machines": Machines, "sieges": Sieges, "shots": Shots,
    "config": Config, "tape": Tape, "machine-state": MachineState, "state": State,
    "sums": Sums, "lane": Lane, "sideband": Sideband, "sealed-lane": SealedLane,
    "keyed-sideband": KeyedSideband, "relayed-lane": RelayedLane,
}  # fmt: skip

KEEP = Path("runs/fuzz")

HEADINGS = ("target", "inputs", "accepted", "refused", "crashes", "slowest", "RSS grew by", "time")


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    logging.getLogger("mend").setLevel(logging.CRITICAL)
    limit_memory()
    if arguments.replay:
        name, path = arguments.replay
        print(TARGETS[name](arguments.seed).take(Path(path).read_bytes()))
        return 0
    names = arguments.only.split(",") if arguments.only else list(TARGETS)
    results = []
    for place, name in enumerate(names):
        since = time.monotonic()
        left_s = arguments.minutes * 60 if arguments.minutes else None
        until_s = since + left_s / (len(names) - place) if left_s else None
        results.append(
            _run(name, getattr(arguments, name.replace("-", "_")), arguments.seed, until_s)
        )
        if arguments.minutes:
            arguments.minutes = max(0.02, arguments.minutes - (time.monotonic() - since) / 60)
    text = table(results)
    print("\n" + text)
    if arguments.table:
        Path(arguments.table).write_text(_page(text), encoding="utf-8")
    return 1 if any(each.crashes or _leaks(each) for each in results) else 0


def _arguments() -> argparse.Namespace:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tests.fuzz", description=__doc__, formatter_class=how
    )
    for name, kind in TARGETS.items():
        inputs = getattr(kind, "inputs")  # noqa: B009  # of the class: a Callable has none
        parser.add_argument(f"--{name}", type=int, default=inputs, metavar="N")
    parser.add_argument("--only", default="", help="names of targets, with commas between")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0.0, help="in all; 0: until all is done")
    parser.add_argument("--table", default="", help="write the table to this file, too")
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "FILE"))
    return parser.parse_args()


def _run(name: str, inputs: int, seed: int, until_s: float | None) -> Result:
    def say(result: Result) -> None:
        print(f"{name}: {result.inputs:,} of {inputs:,}, {result.crashes} crashes", flush=True)

    target = TARGETS[name](seed)
    try:
        result = fuzz(target, inputs, seed, until_s=until_s, keep=KEEP, watch=True, say=say)
    finally:
        target.close()
    say(result)
    return result


def _leaks(result: Result) -> bool:
    return result.grown_bytes > RSS_GROWTH_BYTES_MAX


def table(results: list[Result]) -> str:
    """One row per target, why inputs were refused, and how to see each crash again."""
    rows = [HEADINGS, ("---",) * len(HEADINGS), *map(_row, results)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", "What became of the inputs:", ""]
    for result in results:
        told = ", ".join(f"{reason} {count:,}" for reason, count in result.reasons.most_common())
        lines.append(f"- {result.name}: {told}")
    defects = [(result, each) for result in results for each in result.defects.values()]
    for result, each in defects:
        lines += ["", f"{result.name}: {each.what}, {each.count} times. See it again with"]
        lines.append(f"    python -m tests.fuzz --replay {result.name} {each.path}")
    return "\n".join(lines) + "\n"


def _row(result: Result) -> tuple[str, ...]:
    grown = f"{max(0, result.grown_bytes) / 2**20:.1f} MiB" + (" (leak)" if _leaks(result) else "")
    return (
        result.name, f"{result.inputs:,}", f"{result.accepted:,}", f"{result.refused:,}",
        str(result.crashes), f"{result.slowest_s * 1000:.1f} ms", grown, f"{result.seconds:.0f} s",
    )  # fmt: skip


def _page(text: str) -> str:
    command = " ".join(["python -m tests.fuzz", *sys.argv[1:]])
    machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    return f"# Fuzzing, as run\n\n`{command}`: one core, {machine}.\n\n{text}"


if __name__ == "__main__":
    sys.exit(main())
