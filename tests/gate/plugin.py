"""The pytest plugin behind `make test`; tests/conftest.py registers it.

- A process test first takes tokens for its live processes (machine.Tokens, costs.txt).
- A worker of xdist has a network of its own, or else a range of ports.
- A test that failed while the system delayed this worker's sentinel is run once more, alone. Any
  other failure is final, and so are more retries than record.judge allows.
- Failures are printed and written to runs/gate at once.
- `--shard` chooses among slow tests (shards.py).
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Generator, Iterator
from functools import cached_property
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from tests.gate import costs, machine, record, shards
from tests.gate.record import Record

ROOT = Path(__file__).parents[2]
RUN = "GATE_RUN"
"""The run's folder, for its workers."""

DELAY_MS_MAX = 250
"""A failure while a sleeping process was woken so late may be the machine's."""

LEFT_OUT = "left_out"
COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""Before any is left out."""

NICE = 5
"""Of tests that only compute; ranks go first."""


def starts_processes(nodeid: str) -> bool:
    return nodeid.startswith(costs.PROCESSES)


def processes_of(item: pytest.Item, known: dict[str, costs.Cost]) -> int:
    """Most live processes at once. The nursery has counted none where a test starts others."""
    fixtures = item.fixturenames
    if "alone" in fixtures and "nursery" not in fixtures:
        return 1  # a job of one rack in this process
    cost = known.get(costs.function_of(item.nodeid), costs.UNKNOWN)
    return cost.processes or costs.UNKNOWN.processes


def worker() -> int | None:
    """The number of this worker of pytest-xdist; None: there is but one process."""
    name = os.environ.get("PYTEST_XDIST_WORKER", "")
    return int(name[2:]) if name.startswith("gw") else None


class Shard:
    """Chooses among slow tests, and says what it leaves out of changed rooms."""

    def __init__(self, config: pytest.Config) -> None:
        self.selection = shards.parse(config.option.shard)
        config.option.shard = self.selection.text()  # for the workers
        self.left_out = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        config.stash[COLLECTED] = [*items]
        table, slow = costs.read(), slow_of(items)
        choice = self.selection.choose(slow, table)
        self.left_out = choice.say(self.selection, table)
        left_out = {*slow} - choice.chosen
        if left_out:
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
            items[:] = [item for item in items if item.nodeid not in left_out]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # A pytest that a test of a worker starts has the worker's environment, and no controller.
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output[LEFT_OUT] = self.left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """All workers say the same."""
        self.left_out = getattr(node, "workeroutput", {}).get(LEFT_OUT, self.left_out)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left_out:
            terminalreporter.write_line(self.left_out)


def slow_of(items: list[pytest.Item]) -> list[str]:
    expensive = shards.expensive_of([item.nodeid for item in items], costs.read())
    return [
        item.nodeid
        for item in items
        if item.nodeid in expensive or next(item.iter_markers("slow"), None)
    ]


class Gate:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.usage: list[Callable[[], tuple[int, float]]] = []
        """Each returns the most live processes at once and the CPU seconds since its last call."""
        self.ended_s = 0.0
        """CPU time of nurseries that have ended: their tests had it before."""
        self.costs = costs.read()
        self.tokens = machine.Tokens()
        self.record = Record(Path(os.environ[RUN])) if worker() is not None else Record.create()
        self.begun = time.monotonic()
        self.ports = ""
        if worker() is None:  # workers get what this process has decided
            os.environ[RUN] = str(self.record.folder)
        if worker() is None or not machine.enter_own_network():
            self.ports = machine.take_port_range()

    @cached_property
    def is_brief(self) -> bool:
        """Whether to send the other process only what it prints: each message of a test costs both
        more than most tests take."""
        option = self.config.option
        return worker() is not None and option.verbose <= 0 and option.durations is None

    @cached_property
    def sentinel(self) -> machine.Sentinel:
        return machine.Sentinel()

    def pytest_unconfigure(self) -> None:
        if "sentinel" in self.__dict__:
            self.sentinel.close()

    # Running a test

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Outermost, as waiting for tokens does not count as time of the test."""
        again = item.stash.get(RETRIED, False)
        with self.turn(item, everything=again):
            done = yield
        if item.stash.get(RETRIED, False) and not again:
            item.session._setupstate.teardown_exact(None)  # what wider fixtures have set up, too
            return item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        return done

    @contextlib.contextmanager
    def turn(self, item: pytest.Item, everything: bool = False) -> Iterator[None]:
        processes = starts_processes(item.nodeid)
        if worker() is not None:
            with contextlib.suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, 0, 0 if processes else NICE)
        count = self.tokens.size if everything else processes_of(item, self.costs)
        with self.tokens.take(count) if processes or everything else contextlib.nullcontext():
            yield

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Run a test, and log it unless its failure gets a second try."""
        self.sentinel.reset()
        before = self.spent()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        failed = [report for report in reports if report.failed]
        delay_ms = self.sentinel.delay_ms()
        again = item.stash.get(RETRIED, False)
        if failed and not again and delay_ms > DELAY_MS_MAX and self.record.add_retry(item.nodeid):
            title = f"{item.nodeid} is run again: the system delayed this worker by {delay_ms} ms"
            self.record.add_failure(title, "\n".join(report.longreprtext for report in failed))
            item.stash[RETRIED] = True
            return
        processes, cpu_s = self.spent_since(before, item)
        facts = {"processes": processes, "cpu_s": cpu_s, "delay_ms": delay_ms, "retried": again}
        reports[-1].user_properties += facts.items()
        for report in reports:
            if not self.is_brief or report.when != "setup" or not report.passed:
                item.ihook.pytest_runtest_logreport(report=report)

    def spent(self) -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in used) - self.ended_s

    @contextlib.contextmanager
    def end_of(self, usage: Callable[[], tuple[int, float]]) -> Iterator[None]:
        """The last test pays for what `usage` still says, not for all that the nursery ever did."""
        self.usage.remove(usage)
        _, cpu_s = usage()
        before = self.spent()
        yield
        self.ended_s += self.spent() - before - cpu_s

    def spent_since(self, before: float, item: pytest.Item) -> tuple[int, float]:
        asks = "nursery" in item.fixturenames
        children = [usage() for usage in self.usage if asks]
        cpu_s = self.spent() - before + sum(cpu_s for _, cpu_s in children)
        return max((count for count, _ in children), default=0), round(cpu_s, 2)

    # Reports, in the process that prints

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if worker() is not None:
            return
        if report.failed:
            self.record.add_failure(f"{report.nodeid} ({report.when})", report.longreprtext)
            if self.config.getoption("dist", "no") != "no":  # else they follow soon
                self.write(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}")
        facts = dict(report.user_properties)
        if report.when == "teardown" and "cpu_s" in facts:
            if facts["retried"]:
                self.write(f"\nRETRIED {report.nodeid}: see {self.record.failures}")
            self.record.add_test(test=report.nodeid, outcome=self.outcome(report), **facts)

    def outcome(self, report: pytest.TestReport) -> str:
        stats = self.config.pluginmanager.get_plugin("terminalreporter").stats
        failed = {each.nodeid for kind in ("failed", "error") for each in stats.get(kind, ())}
        if report.failed or report.nodeid in failed:
            return "failed"
        skipped = report.nodeid in {each.nodeid for each in stats.get("skipped", ())}
        return "skipped" if skipped else "passed"

    def write(self, text: str) -> None:
        self.config.pluginmanager.get_plugin("terminalreporter").write_line(text)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if worker() is not None:
            return
        self.reasons = record.judge(self.record.retried(), record.history())
        if self.reasons and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.config.option.shard != shards.ALL:
            record.add_run(
                status=int(session.exitstatus), tests=session.testscollected,
                seconds=round(time.monotonic() - self.begun, 1),
                retried=self.record.retried(), shard=self.config.option.shard,
            )  # fmt: skip

    def pytest_terminal_summary(self) -> None:
        for nodeid in self.record.retried():
            self.write(f"RETRIED {nodeid}")
        for reason in self.reasons:
            self.write(f"FAILED {reason}")

    # xdist

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: object) -> object:
        if config.getvalue("dist") != "loadscope":
            return None
        from tests.gate.scheduler import Scheduler

        return Scheduler(config, log, self.costs)


RETRIED = pytest.StashKey[bool]()


class Runner:
    """Runs each test in place of pytest's own runner; apart from `Gate`, as both it and its wrapper
    are implementations of one hook."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        told = {} if self.gate.is_brief else {"nodeid": item.nodeid, "location": item.location}
        if told:
            item.ihook.pytest_runtest_logstart(**told)
        self.gate.run(item, nextitem)
        if told:
            item.ihook.pytest_runtest_logfinish(**told)
        return True
