"""How long `.ci/run` takes after a change of each room, by costs.txt.

`python -m tests.gate.estimate` collects all tests and runs none. It shows the shard that takes
longest with each room, and ends with 1 if that is longer than LIMIT_S. The costs are those of a
machine that makes 20 million additions in Python in 0.9 s.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterable, Mapping, Sequence

import pytest

from tests.gate import costs, shards
from tests.gate.plugin import slow_of

CORES = 2
BUSY = 0.7
"""Of the cores' time. Ranks wait for each other, and the last tests for nobody."""
START_S = 50.0
"""CPU time of loading and collecting the tests, in all workers, and of what they tell of each."""
CHECK_S = 25.0
"""`make check`, on the clock."""
SUITES = {"integrations": "tests/frameworks/"}
"""By room: tests with environments of their own, which run one after the other."""
LIMIT_S = 6.5 * 60.0
"""After a change of any rooms but those of SUITES."""


class Collected:
    """A pytest plugin."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self.slow: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        run = [item for item in items if is_run(item)]
        self.all, self.slow = [item.nodeid for item in run], slow_of(run)

    def rooms(self) -> list[str]:
        """All whose change adds slow tests to a run."""
        files = {shards.file_of(nodeid) for nodeid in self.slow}
        return sorted({room for file in files for room in shards.about_of(file) - {file}})


def is_run(item: pytest.Item) -> bool:
    """By `make test`, without a GPU."""
    return "test_neighbours" not in item.nodeid and not item.get_closest_marker("gpu")


def collect() -> Collected:
    found = Collected()
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"], [found])
    return found


def cpu_s(nodeids: Iterable[str], table: Mapping[str, costs.Cost]) -> float:
    return sum(costs.cpu_s_of(nodeid, table) for nodeid in nodeids)


def seconds(found: Collected, chosen: frozenset[str], table: Mapping[str, costs.Cost]) -> float:
    """On the clock, of a run with these of the slow tests."""
    left_out = set(found.slow) - chosen
    spent_s = START_S + cpu_s((nodeid for nodeid in found.all if nodeid not in left_out), table)
    return CHECK_S + spent_s / (CORES * BUSY)


def longest(
    found: Collected, rooms: Sequence[str], table: Mapping[str, costs.Cost]
) -> tuple[float, shards.Choice]:
    changed = frozenset(rooms)
    choices = [
        shards.Selection(shard, changed).choose(found.slow, table) for shard in range(shards.SHARDS)
    ]
    return max(((seconds(found, each.chosen, table), each) for each in choices), key=lambda x: x[0])


def main() -> int:
    found, table = collect(), costs.read()
    every = found.rooms()
    print(f"{len(found.all)} tests, {cpu_s(found.all, table):.0f} s of CPU; of them "
          f"{len(found.slow)} slow ones, {cpu_s(found.slow, table):.0f} s")  # fmt: skip
    worst_s = 0.0
    rooms = [*every, *SUITES]
    for name, changed in [("none", []), *((room, [room]) for room in rooms), ("all", every)]:
        taken_s, choice = longest(found, changed, table)
        if name in SUITES:
            suite = (cost.cpu_s for test, cost in table.items() if test.startswith(SUITES[name]))
            taken_s += sum(suite)
        left_s = cpu_s(choice.left_out, table)
        minutes, rest = divmod(round(taken_s), 60)
        left_out = f"left out: {len(choice.left_out)} tests, {left_s:.0f} s of CPU"
        print(f"{name:14} {minutes:2}:{rest:02}   {left_out}")
        worst_s = worst_s if name in SUITES else max(worst_s, taken_s)
    return 0 if worst_s <= LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
