"""What expensive tests cost: live processes at once, and seconds of CPU. costs.txt has what was
measured; a process test that is not in it gets the default.

`python -m tests.gate.costs` takes the figures of the last runs (runs/gate) over into costs.txt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("costs.txt")
ROOT = Path(__file__).parents[2]
RUNS = ROOT / "runs" / "gate"


class Cost(NamedTuple):
    processes: int
    cpu_s: float


UNKNOWN = Cost(3, 2.0)
"""Two racks, and a witness or a launcher."""

UNLISTED_S = 0.02
"""CPU time of another test that is not in costs.txt."""

PROCESSES = ("tests/process/", "tests/storm/test_storm")
"""By the beginning of a path: tests that start processes."""

CHEAP_S = 1.0
"""A function all of whose cases cost less, and that starts no process, needs no line."""

MORE = {"tests/process/test_equal_bits.py": 4, "tests/process/test_attacks.py": 2}
"""Least number of processes by file, where processes of the tests fork others."""


def function_of(nodeid: str) -> str:
    """The test without its parameters."""
    return nodeid.partition("[")[0]


def read() -> dict[str, Cost]:
    """By test function; its CPU time is that of one case, on average."""
    found = {}
    for line in TABLE.read_text().splitlines():
        name, processes, cpu_s = line.rsplit(maxsplit=2)
        least = MORE.get(name.partition("::")[0], 0)
        found[name] = Cost(max(least, int(processes)), float(cpu_s))
    return found


def measured() -> dict[str, Cost]:
    """From the recorded runs, the newest of each test last."""
    cases: dict[str, Cost] = {}
    for path in sorted(RUNS.glob("*/tests.jsonl")):
        for line in path.read_text().splitlines():
            test = json.loads(line)
            if test["outcome"] == "passed":
                cases[test["test"]] = Cost(test["processes"], test["cpu_s"])
    functions: dict[str, list[Cost]] = {}
    for nodeid, cost in cases.items():
        functions.setdefault(function_of(nodeid), []).append(cost)
    found = {
        name: Cost(
            max(cost.processes for cost in costs), sum(cost.cpu_s for cost in costs) / len(costs)
        )
        for name, costs in functions.items()
    }
    return {
        name: cost
        for name, cost in found.items()
        if cost.processes or cost.cpu_s * len(functions[name]) > CHEAP_S
    }


def cpu_s_of(nodeid: str, table: Mapping[str, Cost]) -> float:
    if (name := function_of(nodeid)) in table:
        return table[name].cpu_s
    return UNKNOWN.cpu_s if nodeid.startswith(PROCESSES) else UNLISTED_S


def is_there(function: str) -> bool:
    path, _, name = function.partition("::")
    file = ROOT / path
    return file.exists() and f"def {name.rpartition('::')[2]}(" in file.read_text()


def main() -> None:
    found = {name: cost for name, cost in {**read(), **measured()}.items() if is_there(name)}
    lines = [f"{name} {cost.processes} {cost.cpu_s:.2f}\n" for name, cost in sorted(found.items())]
    TABLE.write_text("".join(lines))


if __name__ == "__main__":
    main()
