"""Run `.ci/run` and add a row to benchmarks/results/gate.md:
`python3 -m tests.gate [TIMES] [--busy LOOPS]`.

Needs no package, as `.ci/run` may have to make .venv first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.gate.costs import RUNS
from tests.gate.record import ROOT, TABLE

COLUMNS = (
    "when", "commit", "result", "seconds", "of them tests", "CPU s", "cores", "load", "tests",
    "shard", "retried",
)  # fmt: skip
HEAD = f"""# Runs of .ci/run

`make gate` adds a row. `load`: of the machine in the minute before; a run beside other work has a
high one, and `+ 4` is a run beside four busy loops (`make gate ARGS="--busy 4"`). `CPU`: user and
system time of the run and all its processes. `retried`: tests that failed while the system delayed
their worker by more than 250 ms, and passed when they ran again, alone.

| {" | ".join(COLUMNS)} |
|{"---|" * len(COLUMNS)}
"""


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many processes that only compute."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def run_once(loops: int) -> int:
    runs = RUNS / "runs.jsonl"
    before = len(runs.read_text().splitlines()) if runs.exists() else 0
    load, begun, used = os.getloadavg()[0], time.monotonic(), os.times()
    with busy(loops):
        done = subprocess.run([str(ROOT / ".ci/run")], cwd=ROOT)
        # Before the loops end: their CPU time is not the run's.
        seconds, after = time.monotonic() - begun, os.times()
    cpu_s = after.children_user + after.children_system
    cpu_s -= used.children_user + used.children_system
    lines = runs.read_text().splitlines()[before:] if runs.exists() else []
    tests = json.loads(lines[-1]) if lines else {}
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    cells = [
        time.strftime("%Y-%m-%d %H:%M"), commit, "green" if done.returncode == 0 else "red",
        f"{seconds:.0f}", f"{tests.get('seconds', 0):.0f}", f"{cpu_s:.0f}", str(os.cpu_count()),
        f"{load:.1f}" + (f" + {loops}" if loops else ""), str(tests.get("tests", 0)),
        tests.get("shard", "").partition(":")[0],
        "<br>".join(tests.get("retried", ())) or "none",
    ]  # fmt: skip
    text = TABLE.read_text() if TABLE.exists() else HEAD
    TABLE.write_text(f"{text}| {' | '.join(cells)} |\n")
    return done.returncode


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m tests.gate")
    parser.add_argument("times", type=int, nargs="?", default=1)
    parser.add_argument("--busy", type=int, default=0, metavar="LOOPS")
    options = parser.parse_args()
    sys.exit(max(run_once(options.busy) for _ in range(options.times)))


if __name__ == "__main__":
    main()
