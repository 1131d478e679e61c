"""The gate's own rules, shown on small test suites that it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from tests.gate import costs, forks, machine, record, shards
from tests.gate.costs import Cost
from tests.gate.machine import Sentinel, Tokens
from tests.gate.plugin import processes_of
from tests.process.nursery import import_tests
from tests.process.racks import Nursery

ROOT = Path(__file__).parents[2]

CONFTEST = """
from pathlib import Path
import pytest
from tests.gate import record
from tests.gate.plugin import Gate, Runner, Shard

record.RUNS = Path(__file__).parent / "runs"

def pytest_addoption(parser):
    parser.addoption("--shard", default="auto")

def pytest_configure(config):
    config.addinivalue_line("markers", "slow")
    config.option.shard = "0"
    config.pluginmanager.register(Shard(config))
    gate = Gate(config)
    config.pluginmanager.register(gate, "gate")
    config.pluginmanager.register(Runner(gate))

@pytest.fixture
def late(request):
    \"\"\"Stop the sentinel for so long that the test looks delayed.\"\"\"
    import os, signal, time
    gate = request.config.pluginmanager.get_plugin("gate")
    os.kill(gate.sentinel._process.pid, signal.SIGSTOP)
    while gate.sentinel.delay_ms() <= 300:
        time.sleep(0.01)
    yield
    os.kill(gate.sentinel._process.pid, signal.SIGCONT)

TRIES = {}

@pytest.fixture(scope="module")
def tries():
    return TRIES
"""

FAILS_ONCE = """
    tries["{name}"] = tries.get("{name}", 0) + 1
    assert tries["{name}"] == 2, "the first try fails"
"""


class Suite:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "conftest.py").write_text(CONFTEST)

    def run(self, text: str, *arguments: str) -> tuple[int, str]:
        (self.folder / "test_it.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
        # Tokens of its own: those of the machine are held by the tests around this one.
        env |= {
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "TMPDIR": str(self.folder),
        }
        env.pop("GATE_RUN", None)
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def tests(self) -> list[dict[str, object]]:
        (*_, newest) = sorted((self.folder / "runs").glob("2*/tests.jsonl"))
        return [json.loads(line) for line in newest.read_text().splitlines()]


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


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
        return processes_of(item, known)  # type: ignore[arg-type]

    assert tokens(Cost(5, 0.1), "jobs", "nursery") == 5
    assert tokens(None, "jobs", "nursery") == costs.UNKNOWN.processes
    assert tokens(Cost(0, 9.0)) == costs.UNKNOWN.processes, "it starts what nobody counts"
    assert tokens(None, "alone") == 1


def test_costs_are_of_tests_that_start_processes_or_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "RUNS", tmp_path)
    (tmp_path / "one").mkdir()
    lines = [("a[1]", 2, 0.1), ("a[2]", 3, 0.3), ("short", 0, 0.2), ("long", 0, 9.0)]
    (tmp_path / "one/tests.jsonl").write_text("".join(
        json.dumps({"test": name, "outcome": "passed", "processes": count, "cpu_s": cpu_s}) + "\n"
        for name, count, cpu_s in lines
    ))  # fmt: skip
    assert costs.measured() == {"a": Cost(3, 0.2), "long": Cost(0, 9.0)}


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


class Marked(NamedTuple):
    """What `Selection.wants` asks of a test."""

    nodeid: str
    marks: list[pytest.Mark]

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        return (mark for mark in self.marks if mark.name == name)


def test_slow_test_runs_in_its_shard_and_after_changes_of_its_room() -> None:
    slow = Marked("tests/unit/codec/test_it.py::test_it", [pytest.mark.slow.mark])
    fast = slow._replace(marks=[])
    own = shards.shard_of(slow.nodeid)
    other = own + 1
    for shard, changed, wanted in [
        (own, "", True),
        (other, "", False),
        (other, "codec", True),
        (other, "tests/unit/codec/test_it.py", True),
        (other, "merge", False),
    ]:
        selection = shards.parse(f"{shard}:{changed}")
        assert selection.wants(slow) is wanted, (shard, changed)  # type: ignore[arg-type]
        assert selection.wants(fast)  # type: ignore[arg-type]


def test_expensive_test_is_slow_but_the_cheapest_of_its_file_is_not() -> None:
    table = {
        "a.py::test_dear": costs.Cost(3, 9.0), "a.py::test_many": costs.Cost(0, 0.5),
        "a.py::test_some": costs.Cost(0, 0.9), "b.py::test_dear": costs.Cost(3, 9.0),
        "b.py::test_less": costs.Cost(3, 2.0),
    }  # fmt: skip
    many = [f"a.py::test_many[{case}]" for case in range(12)]
    others = ["a.py::test_dear", "a.py::test_some", "a.py::test_without_a_line"]
    dear = ["b.py::test_dear", "b.py::test_less[1]", "b.py::test_less[2]"]
    found = shards.expensive_of([*many, *others, *dear], table)
    assert found == {*many, "a.py::test_dear", "b.py::test_dear", "b.py::test_less[2]"}
    item = Marked("a.py::test_dear", [])
    other = shards.Selection(shards.shard_of(item.nodeid) + 1, frozenset())
    assert not other.wants(item, found)  # type: ignore[arg-type]


def test_run_leaves_out_slow_tests_of_other_shards(suite: Suite) -> None:
    other = 1 if shards.shard_of("test_it.py::test_it") == 0 else 0
    conftest = suite.folder / "conftest.py"
    conftest.write_text(CONFTEST.replace('"0"', f'"{other}"'))
    _, output = suite.run(
        "import pytest\n@pytest.mark.slow\ndef test_it(): pass\ndef test_fast(): pass\n"
    )
    assert "1 passed, 1 deselected" in output, output


def test_suite_of_its_own_runs_in_its_shard_and_after_changes_of_its_room() -> None:
    name, rooms = "tests/frameworks", ["integrations"]
    own = shards.shard_of(name)
    other = (own + 1) % shards.SHARDS
    for shard, changed, wanted in (
        (own, set(), True), (None, set(), True), (other, {"engine", "tests/unit/a.py"}, False),
        (other, {"integrations"}, True), (other, {"tests/frameworks/jobs.py"}, True),
    ):  # fmt: skip
        assert shards.Selection(shard, frozenset(changed)).wants_suite(name, rooms) is wanted


def test_every_slow_test_is_in_one_shard() -> None:
    names = [f"tests/sim/test_x.py::test_y[{seed}]" for seed in range(1000)]
    assert {shards.shard_of(name) for name in names} == set(range(shards.SHARDS))


def test_changed_paths_name_rooms_and_test_files() -> None:
    paths = ["src/mend/codec/int8.py", "src/mend/api.py", "tests/sim/bugs.py", "docs/faq.md"]
    assert "benchmarks" not in shards.about(["benchmarks/results/gate.md"]), "no row of a run"
    paths.append("benchmarks/merge.py")
    assert shards.about(paths) == {"codec", "api", "tests/sim/bugs.py", "benchmarks"}
    assert shards.about(["src/mend_lab/sim/world.py"]) == {"mend_lab"}
    assert shards.about(["tests/gate/costs.py"]) == {"gate", "tests/gate/costs.py"}


def test_files_and_rooms_of_the_shards_are_there() -> None:
    rooms = {path.stem for path in (ROOT / "src/mend").iterdir()}
    rooms |= {"benchmarks", "examples", "gate", "mend_lab"}
    for begin, named in shards.ROOMS.items():
        assert list(ROOT.glob(f"{begin}*")), begin
        assert rooms.issuperset(named), begin


def test_selection_survives_the_way_to_workers() -> None:
    chosen = shards.Selection(3, frozenset({"codec", "engine"}))
    assert shards.parse(chosen.text()) == chosen


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
