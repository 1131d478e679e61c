"""What expensive tests cost: live processes at once, and seconds of CPU. costs.txt has what was
measured; a process test that is not in it gets the default.

`python -m tests.gate.costs` takes the figures of the last runs (runs/gate) over into costs.txt.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("costs.txt")
ROOT = Path(__file__).parents[2]
RUNS = ROOT / "runs" / "gate"


class Cost(NamedTuple):
    processes: int
    cpu_s: float


UNKNOWN = Cost(3, 1.4)
"""Two racks, and a witness or a launcher."""

UNLISTED_S = {"tests/sim/": 0.2, "tests/": 0.006}
"""CPU time of another test that is not in costs.txt, by the beginning of its path."""

PROCESSES = ("tests/process/", "tests/storm/test_storm")
"""By the beginning of a path: tests that start processes."""

CHEAP_S = 0.5
"""A function all of whose cases cost less needs no line, unless it starts processes or is about the
simulator."""

CASE_S, FEW = 2.0, 3
"""A case that costs so much more or less than the average of its function has a line of its own;
an average is of so many cases at least, where the function had one before."""

MORE = {"tests/process/test_equal_bits.py": 4, "tests/process/test_attacks.py": 2}
"""Least number of processes by file, where processes of the tests fork others."""


def function_of(nodeid: str) -> str:
    """The test without its parameters."""
    return nodeid.partition("[")[0]


def read() -> dict[str, Cost]:
    """By test function, of one case on average; and by case where one differs by CASE_S."""
    found = {}
    for line in TABLE.read_text().splitlines():
        name, processes, cpu_s = line.rsplit(maxsplit=2)
        least = MORE.get(name.partition("::")[0], 0)
        found[name] = Cost(max(least, int(processes)), float(cpu_s))
    return found


def measured(known: Mapping[str, Cost]) -> dict[str, Cost]:
    """From the recorded runs, the newest of each test last. A few cases are no average of a
    function that has one."""
    cases: dict[str, Cost] = {}
    for path in sorted(RUNS.glob("*/tests.jsonl")):
        for line in path.read_text().splitlines():
            test = json.loads(line)
            if test["outcome"] == "passed":
                cases[test["test"]] = Cost(test["processes"], test["cpu_s"])
    functions: dict[str, dict[str, Cost]] = defaultdict(dict)
    for nodeid, cost in cases.items():
        functions[function_of(nodeid)][nodeid] = cost
    found = dict[str, Cost]()
    for name, own in functions.items():
        processes = max(cost.processes for cost in own.values())
        mean = Cost(processes, sum(cost.cpu_s for cost in own.values()) / len(own))
        if name in known and name not in own and len(own) < FEW:
            mean = known[name]
        if (
            mean.processes
            or mean.cpu_s * len(own) > CHEAP_S
            or name.startswith((*PROCESSES, "tests/sim/"))  # without a line they count as dear
        ):
            found[name] = mean
            found |= {
                nodeid: cost
                for nodeid, cost in own.items()
                if nodeid != name and abs(cost.cpu_s - mean.cpu_s) > CASE_S
            }
    return found


def cpu_s_of(nodeid: str, table: Mapping[str, Cost]) -> float:
    for name in (nodeid, function_of(nodeid)):
        if name in table:
            return table[name].cpu_s
    if nodeid.startswith(PROCESSES):
        return UNKNOWN.cpu_s
    return next((cpu_s for begin, cpu_s in UNLISTED_S.items() if nodeid.startswith(begin)), 0.0)


def is_there(function: str) -> bool:
    path, _, name = function_of(function).partition("::")
    file = ROOT / path
    return file.exists() and f"def {name.rpartition('::')[2]}(" in file.read_text()


def main() -> None:
    known = read()
    found = {name: cost for name, cost in {**known, **measured(known)}.items() if is_there(name)}
    lines = [f"{name} {cost.processes} {cost.cpu_s:.2f}\n" for name, cost in sorted(found.items())]
    TABLE.write_text("".join(lines))


if __name__ == "__main__":
    main()
