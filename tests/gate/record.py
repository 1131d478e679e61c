"""What runs leave behind, and when retries count as failures.

A run's folder, runs/gate/<time>-<pid>: `failures.txt` (each failure as it happens), `tests.jsonl`
(each test as it ends), `retried.txt`. `runs/gate/runs.jsonl`: one line per run of `make test`.
`benchmarks/results/gate.md`: the runs of `.ci/run`, see `__main__.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from tests.gate.costs import RUNS

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks/results/gate.md"
RETRIES_MAX = 2
WINDOW = 10
"""A test that was retried in two of so many runs counts as failed."""
KEPT = 20


class Record:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failures, self.tests = folder / "failures.txt", folder / "tests.jsonl"
        self._retried = folder / "retried.txt"

    @classmethod
    def create(cls) -> Record:
        made = RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        made.mkdir(parents=True)
        old = sorted(path for path in RUNS.iterdir() if path.is_dir())[:-KEPT]
        for path in old:
            if not is_alive(int(path.name.rpartition("-")[2])):  # a long run beside many short ones
                shutil.rmtree(path, ignore_errors=True)
        return cls(made)

    def add_failure(self, title: str, reason: str) -> None:
        append(self.failures, f"=== {title}\n{reason}\n")

    def add_test(self, **fields: Any) -> None:
        append(self.tests, json.dumps(fields) + "\n")

    def add_retry(self, nodeid: str) -> bool:
        """Returns False, and adds nothing, once there were too many for the run to pass."""
        if len(self.retried()) > RETRIES_MAX:
            return False
        append(self._retried, nodeid + "\n")
        return True

    def retried(self) -> list[str]:
        return self._retried.read_text().splitlines() if self._retried.exists() else []


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def append(path: Path, text: str) -> None:
    """One write, so that the lines of several workers do not mix."""
    with path.open("a") as file:
        file.write(text)


def judge(retried: list[str], earlier: list[list[str]]) -> list[str]:
    """Why the retries of a run fail it; `earlier`: those of the runs before, the newest last."""
    reasons = []
    if len(retried) > RETRIES_MAX:
        reasons.append(f"{len(retried)} tests were retried, of which {RETRIES_MAX} are allowed")
    recent = {nodeid for run in earlier[-(WINDOW - 1) :] for nodeid in run}
    reasons += [
        f"{nodeid} was also retried in one of the last {WINDOW - 1} runs"
        for nodeid in dict.fromkeys(retried)
        if nodeid in recent
    ]
    return reasons


def history() -> list[list[str]]:
    """The retries of earlier runs, the newest last. Of the committed table where this checkout has
    recorded no run."""
    path = RUNS / "runs.jsonl"
    if path.exists():
        return [json.loads(line)["retried"] for line in path.read_text().splitlines()]
    rows = TABLE.read_text().splitlines() if TABLE.exists() else []
    cells = [row.strip("| ").split(" | ") for row in rows if row.startswith("| 2")]
    return [row[-1].split("<br>") if row[-1] != "none" else [] for row in cells]


def add_run(**fields: Any) -> None:
    append(RUNS / "runs.jsonl", json.dumps(fields) + "\n")
