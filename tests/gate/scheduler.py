"""Which worker of pytest-xdist gets which tests next.

Half of the workers prefer tests that start processes, which wait for each other much of the time;
the others prefer tests that compute. The most expensive come first.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.gate.costs import Cost, cpu_s_of
from tests.gate.plugin import starts_processes

ROOT = Path(__file__).parents[2]
SPREAD = ("tests/process/", "tests/storm/", "tests/sim/", "tests/test_mutants.py")
"""One test at a time; of the rest whole files, whose tests take milliseconds."""


@functools.cache
def shares_a_job(path: str) -> bool:
    """Whether tests of a file share what only one worker should set up."""
    file = ROOT / path
    return file.exists() and 'scope="module"' in file.read_text()


class Scheduler(LoadScopeScheduling):
    def __init__(self, config: pytest.Config, log: object, costs: dict[str, Cost]) -> None:
        super().__init__(config, log)
        self.config.option.loadscopereorder = False
        self._costs = costs
        self._units_s: dict[str, float] = {}

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return nodeid if path.startswith(SPREAD) and not shares_a_job(path) else path

    def _cost_s(self, scope: str) -> float:
        if scope not in self._units_s:
            unit = self.workqueue[scope]
            self._units_s[scope] = sum(cpu_s_of(nodeid, self._costs) for nodeid in unit)
        return self._units_s[scope]

    def _assign_work_unit(self, node: WorkerController) -> None:
        """The most expensive unit of the kind that this worker prefers, or of the other one."""
        prefers = 2 * int(node.gateway.id.removeprefix("gw")) < self.numnodes
        chosen = max(
            self.workqueue,
            key=lambda scope: (starts_processes(scope) == prefers, self._cost_s(scope)),
        )
        self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        """A worker needs to know one test beyond the running one. More would wait behind it."""
        if self.workqueue and self._pending_of(self.assigned_work[node]) == 2:
            return
        super()._reschedule(node)
