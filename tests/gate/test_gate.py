"""The gate's own rules, shown on small test suites that it runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gate import costs, forks, machine, record
from tests.gate.costs import Cost
from tests.gate.machine import Sentinel, Tokens
from tests.gate.plugin import processes_of
from tests.gate.suite import CONFTEST, Suite
from tests.process.nursery import import_tests
from tests.process.racks import Nursery

ROOT = Path(__file__).parents[2]

FAILS_ONCE = """
    tries["{name}"] = tries.get("{name}", 0) + 1
    assert tries["{name}"] == 2, "the first try fails"
"""


def failing_once(*names: str) -> str:
    return "".join(
        f"def test_{name}(late, tries):{FAILS_ONCE.format(name=name)}\n" for name in names
    )


def test_failure_without_delay_is_final(suite: Suite) -> None:
    code, output = suite.run(failing_once("it").replace("late, ", ""))
    assert code == 1, output
    assert [(test["outcome"], test["retried"]) for test in suite.tests()] == [("failed", False)]


def test_failure_under_delay_runs_again_and_is_listed(suite: Suite) -> None:
    code, output = suite.run(failing_once("it"))
    assert code == 0, output
    assert "1 passed" in output
    assert "RETRIED test_it.py::test_it" in output
    assert [(test["outcome"], test["retried"]) for test in suite.tests()] == [("passed", True)]
    (failures,) = suite.folder.glob("runs/2*/failures.txt")
    assert "the first try fails" in failures.read_text()


def test_second_failure_under_delay_is_final(suite: Suite) -> None:
    code, output = suite.run("def test_it(late):\n    raise ValueError('always')\n")
    assert code == 1, output
    assert "1 failed" in output


def test_retried_test_sets_up_module_fixtures_anew(suite: Suite) -> None:
    code, output = suite.run("""
import pytest
@pytest.fixture(scope="module")
def shared(tries):
    tries["made"] = tries.get("made", 0) + 1
    return tries["made"]
def test_it(late, shared):
    assert shared == 2
""")
    assert code == 0, output


def test_three_retries_fail_a_run_whose_tests_pass(suite: Suite) -> None:
    code, output = suite.run(failing_once("a", "b", "c"))
    assert code == 1, output
    assert "3 passed" in output
    assert "3 tests were retried, of which 2 are allowed" in output


def test_test_retried_in_two_runs_fails_the_second(suite: Suite) -> None:
    assert suite.run(failing_once("it"))[0] == 0
    code, output = suite.run(failing_once("it"))
    assert code == 1, output
    assert "test_it.py::test_it was also retried in one of the last 9 runs" in output


def test_retry_older_than_the_window_is_forgotten() -> None:
    empty: list[list[str]] = [[] for _ in range(8)]
    assert record.judge(["a"], [["a"], *empty])
    assert record.judge(["a"], [["a"], *empty, []]) == []


def test_failure_is_on_disk_before_the_run_ends(suite: Suite) -> None:
    code, output = suite.run("""
from pathlib import Path
def test_fails():
    assert False, "the reason"
def test_reads():
    (path,) = Path(__file__).parent.glob("runs/2*/failures.txt")
    assert "the reason" in path.read_text()
""")
    assert "1 failed, 1 passed" in output
    assert code == 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_gate_with_busy_loops_runs_beside_them_and_marks_the_row(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests/gate", tmp_path / "tests/gate")
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / ".ci").mkdir()
    run = tmp_path / ".ci/run"
    run.write_text("#!/bin/sh\nwc -w < /proc/$PPID/task/$PPID/children >> children\n")
    run.chmod(0o755)
    for arguments in (["2", "--busy", "3"], []):
        subprocess.run([sys.executable, "-m", "tests.gate", *arguments], cwd=tmp_path, check=True)
    assert (tmp_path / "children").read_text().split() == ["4", "4", "1"], "the run is one"
    rows = (tmp_path / "benchmarks/results/gate.md").read_text().splitlines()[-3:]
    loads = [row.strip("| ").split(" | ")[7] for row in rows]
    assert [load.partition(" + ")[2] for load in loads] == ["3", "3", ""]


def test_record_of_a_run_that_lasts_outlives_many_short_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was deleted, and with the next test the run ended with an internal error."""
    monkeypatch.setattr(record, "RUNS", tmp_path)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    lasts, gone = tmp_path / f"20200101-000000-{os.getpid()}", tmp_path / f"20200102-0-{ended.pid}"
    for folder in (lasts, gone, *(tmp_path / f"20210101-{each:06}-1" for each in range(30))):
        folder.mkdir()
    record.Record.create()
    assert lasts.exists()
    assert not gone.exists()


LISTENS = """
import socket, time
from pathlib import Path
def meet(name):
    with socket.create_server(("127.0.0.1", 20123)):
        (Path(__file__).parent / name).touch()
        limit = time.monotonic() + 60
        while not all((Path(__file__).parent / each).exists() for each in "ab"):
            assert time.monotonic() < limit, "the other test never listened"
            time.sleep(0.01)
def test_a(): meet("a")
def test_b(): meet("b")
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_two_workers_listen_on_one_port(suite: Suite) -> None:
    code, output = suite.run(LISTENS, "-p", "xdist", "-n", "2", "--dist", "load")
    assert code == 0, output


TAKES_RANGE = """
import sys
from tests.gate.machine import take_port_range
print(take_port_range(), flush=True)
sys.stdin.read()
"""


def holder(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def test_live_processes_have_disjoint_port_ranges() -> None:
    with holder(TAKES_RANGE) as one, holder(TAKES_RANGE) as other:
        assert one.stdout is not None
        assert other.stdout is not None
        ranges = [one.stdout.readline().strip(), other.stdout.readline().strip()]
        one.communicate()
        other.communicate()
    assert len(set(ranges)) == 2
    assert all(int(end) - int(begin) + 1 == machine.PORTS
               for begin, end in (each.split("-") for each in ranges))  # fmt: skip


TAKES_TOKENS = """
import sys
from tests.gate.machine import Tokens
with Tokens(3, sys.argv[1]).take(2):
    print("taken", flush=True)
    sys.stdin.read()
"""


def test_tokens_of_a_killed_process_are_free_again(tmp_path: Path) -> None:
    name = f"test-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", TAKES_TOKENS, name], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        tokens = Tokens(3, name)
        with tokens.take(1):
            assert [tokens._locks.try_take(byte) for byte in range(3)].count(True) == 1
            # the byte that this process itself holds counts as free to it
        other.kill()
        other.wait()
        with tokens.take(3):
            pass


def test_test_takes_a_token_for_each_of_its_processes() -> None:
    def tokens(cost: Cost | None, *fixtures: str) -> int:
        item = SimpleNamespace(nodeid="tests/process/test_x.py::test_y[1]", fixturenames=fixtures)
        known = {} if cost is None else {"tests/process/test_x.py::test_y": cost}
        return processes_of(item, known)

    assert tokens(Cost(5, 0.1), "jobs", "nursery") == 5
    assert tokens(None, "jobs", "nursery") == costs.UNKNOWN.processes
    assert tokens(Cost(0, 9.0)) == costs.UNKNOWN.processes, "it starts what nobody counts"
    assert tokens(None, "alone") == 1


def test_costs_have_a_line_for_what_takes_long_or_starts_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "RUNS", tmp_path)
    (tmp_path / "one").mkdir()
    cheap = ("tests/process/test_x.py::test_it", 0, 0.1)
    few = [("few[1]", 2, 9.0), ("few[2]", 2, 6.0)]
    lines = [("a[1]", 2, 0.1), ("a[2]", 3, 0.3), ("short", 0, 0.2), ("long", 0, 9.0), cheap, *few]
    (tmp_path / "one/tests.jsonl").write_text("".join(
        json.dumps({"test": name, "outcome": "passed", "processes": count, "cpu_s": cpu_s}) + "\n"
        for name, count, cpu_s in lines
    ))  # fmt: skip
    expected = {"a": Cost(3, 0.2), "long": Cost(0, 9.0), cheap[0]: Cost(0, 0.1)}
    new = costs.measured({})
    assert new == {**expected, "few": Cost(2, 7.5)}
    known = {"few": Cost(2, 5.0), "long": Cost(0, 1.0)}
    assert costs.measured(known) == {**expected, "few": Cost(2, 5.0), "few[1]": Cost(2, 9.0)}
    assert costs.cpu_s_of("few[1]", known | {"few[1]": Cost(2, 9.0)}) == 9.0


@pytest.mark.slow  # loads torch
def test_last_test_does_not_pay_for_the_whole_nursery(suite: Suite) -> None:
    """It had the CPU time of all tests before it, and the loading of torch."""
    (suite.folder / "conftest.py").write_text(
        CONFTEST
        + """
from tests.conftest import nursery
"""
    )
    code, output = suite.run("""
import subprocess
def work(nursery, seconds):
    code = f"import time; all(time.process_time() < {seconds} for _ in iter(int, 1))"
    subprocess.run([nursery.python, "-c", code], check=True)
def test_first(nursery): work(nursery, 1.5)
def test_last(nursery): work(nursery, 0.5)
""")
    assert code == 0, output
    first, last = (test["cpu_s"] for test in suite.tests())
    assert first > 1.4, "or the second has it"
    assert 0.4 < last < first


def test_test_that_wants_more_tokens_than_there_are_takes_all() -> None:
    with Tokens(2, f"all-{os.getpid()}").take(99):
        pass


def test_stopped_sentinel_counts_as_delay_at_once() -> None:
    sentinel = Sentinel()
    try:
        while sentinel.delay_ms() < 100:  # until it has ticked, and then a while
            os.kill(sentinel._process.pid, signal.SIGSTOP)
            time.sleep(0.01)
        os.kill(sentinel._process.pid, signal.SIGCONT)
    finally:
        sentinel.close()


def test_worker_is_a_fork_and_has_an_interpreter_of_its_own() -> None:
    if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1" or sys.platform != "linux":
        pytest.skip("the only process that runs tests has nobody to share imports with")
    assert forks.COMMAND in os.environ
    assert b"tests.process.nursery" in Path("/proc/self/cmdline").read_bytes()
    assert Path(sys.executable).name.startswith("python")
    done = subprocess.run([sys.executable, "-c", "import sys; print('torch' in sys.modules)"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout == "False\n"


def test_module_that_workers_cannot_import_is_not_left_half_imported(tmp_path: Path) -> None:
    """A run with workers was green, and left out all tests of a file whose import failed."""
    file = tmp_path / "test_it.py"
    file.write_text("def test_it(): pass\nimport nothing_of_that_name\n")
    options = ["--noconftest", "--import-mode=importlib", f"--rootdir={tmp_path}"]
    import_tests([*options, "-o", "asyncio_default_fixture_loop_scope=function", str(file)])
    assert str(file) not in {getattr(each, "__file__", None) for each in sys.modules.values()}


NETWORK = "import os; print(os.readlink('/proc/self/ns/net'))"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_process_of_the_nursery_has_the_network_of_its_worker(
    nursery: Nursery, tmp_path: Path
) -> None:
    script = tmp_path / "network.py"
    script.write_text(NETWORK)
    done = subprocess.run([nursery.python, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == os.readlink("/proc/self/ns/net")
