"""Which slow tests a run has."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.gate import changes, costs, estimate, plugin, shards
from tests.gate.costs import Cost
from tests.gate.suite import CONFTEST, Suite

ROOT = Path(__file__).parents[2]


def test_slow_test_runs_in_its_shard_and_after_changes_of_its_room() -> None:
    slow = "tests/unit/codec/test_it.py::test_it"
    own = shards.shard_of(slow)
    other = own + 1
    for shard, changed, wanted in [
        (own, "", True),
        (other, "", False),
        (other, "codec", True),
        (other, "tests/unit/codec/test_it.py", True),
        (other, "merge", False),
    ]:
        choice = shards.parse(f"{shard}:{changed}").choose([slow], {})
        assert (slow in choice.chosen) is wanted, (shard, changed)
        assert choice.left_out == ()


def many(name: str, count: int, file: str = "tests/process/test_faults.py") -> list[str]:
    return [f"{file}::test_{name}[{number}]" for number in range(count)]


def test_changed_room_whose_tests_exceed_the_budget_gets_what_fits_and_its_shard_whole() -> None:
    slow = many("dear", 200)
    table = {"tests/process/test_faults.py::test_dear": Cost(3, shards.BUDGET_S / 20.5)}
    selection = shards.Selection(3, frozenset({"engine"}))
    choice = selection.choose(slow, table)
    of_shard = {nodeid for nodeid in slow if shards.shard_of(nodeid) == 3}
    assert of_shard
    assert of_shard < choice.chosen
    assert len(choice.chosen - of_shard) == 20
    assert choice.chosen.isdisjoint(choice.left_out)
    assert choice.chosen.union(choice.left_out) == set(slow)


def test_tests_left_out_are_those_whose_shards_come_next_and_one_line_says_so() -> None:
    slow = many("dear", 200)
    table = {"tests/process/test_faults.py::test_dear": Cost(3, shards.BUDGET_S / 100)}
    selection = shards.Selection(14, frozenset({"engine"}))
    choice = selection.choose(slow, table)
    drawn = [nodeid for nodeid in choice.chosen if shards.shard_of(nodeid) != 14]
    first, last = (
        {selection.wait_of(nodeid) for nodeid in nodeids} for nodeids in (choice.left_out, drawn)
    )
    assert max(first) <= min(last)
    assert first | last == set(range(1, shards.SHARDS))
    left_s = len(choice.left_out) * shards.BUDGET_S / 100
    said = choice.say(selection, table)
    assert said.startswith(f"{len(choice.left_out)} slow tests of changed rooms ({left_s:.0f} s")
    assert f"next {max(first)} commits, the first in 1." in said
    assert shards.Choice(choice.chosen, ()).say(selection, table) == ""


def test_changed_test_file_comes_first_then_those_that_name_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that most files have says less than one that few have."""
    monkeypatch.setattr(shards, "ROOT", tmp_path)
    shards.words_of.cache_clear()
    texts = {
        "changed": "run(); load()", "rare": "admit()", "common": "run(); load()",
        "commoner": "run()", "none": "pass",
    }  # fmt: skip
    names = {key: f"tests/sim/test_{key}.py" for key in texts}
    (tmp_path / "tests/sim").mkdir(parents=True)
    for key, text in texts.items():
        (tmp_path / names[key]).write_text(text)
    nodeids = {key: f"{file}::test_it" for key, file in names.items()}
    shard = min({*range(shards.SHARDS)} - {shards.shard_of(nodeid) for nodeid in nodeids.values()})
    table = {nodeid: Cost(0, 10.0) for nodeid in nodeids.values()}
    changed = frozenset({"consensus", names["changed"]})
    selection = shards.Selection(shard, changed, frozenset({"run", "load", "admit"}))
    order = []
    for count in range(1, 6):  # so many fit into the budget
        monkeypatch.setattr(shards, "BUDGET_S", 10.0 * count)
        (drawn,) = selection.choose([*nodeids.values()], table).chosen.difference(order)
        order.append(drawn)
    shards.words_of.cache_clear()
    assert order == [*nodeids.values()]


def test_path_of_a_test_file_names_the_module_that_it_is_about() -> None:
    words = shards.words_of("tests/process/test_rare_settings.py")
    assert {"rare_settings", "settings", "process"} <= words


def test_expensive_test_is_slow_but_the_cheapest_of_its_file_is_not() -> None:
    table = {
        "a.py::test_dear": Cost(3, 9.0), "a.py::test_many": Cost(0, 0.25),
        "a.py::test_some": Cost(0, 0.45), "b.py::test_dear": Cost(3, 9.0),
        "b.py::test_less": Cost(3, 2.0),
    }  # fmt: skip
    many = [f"a.py::test_many[{case}]" for case in range(12)]
    others = ["a.py::test_dear", "a.py::test_some", "a.py::test_without_a_line"]
    dear = ["b.py::test_dear", "b.py::test_less[1]", "b.py::test_less[2]"]
    found = shards.expensive_of([*many, *others, *dear], table)
    assert found == {*many, "a.py::test_dear", "b.py::test_dear", "b.py::test_less[2]"}


def test_test_without_a_line_costs_little_unless_it_starts_processes() -> None:
    assert costs.cpu_s_of("tests/process/test_x.py::test_y[1]", {}) == costs.UNKNOWN.cpu_s
    assert costs.cpu_s_of("tests/sim/test_x.py::test_y", {}) == costs.UNLISTED_S["tests/sim/"]
    assert costs.cpu_s_of("tests/unit/test_x.py::test_y", {}) == costs.UNLISTED_S["tests/"]
    table = {"tests/unit/test_x.py::test_y": Cost(0, 7.0)}
    assert costs.cpu_s_of("tests/unit/test_x.py::test_y[1]", table) == 7.0


def test_run_leaves_out_slow_tests_of_other_shards(suite: Suite) -> None:
    other = 1 if shards.shard_of("test_it.py::test_it") == 0 else 0
    (suite.folder / "conftest.py").write_text(CONFTEST.replace('"0"', f'"{other}"'))
    _, output = suite.run(
        "import pytest\n@pytest.mark.slow\ndef test_it(): pass\ndef test_fast(): pass\n"
    )
    assert "1 passed, 1 deselected" in output, output


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")], ids=["alone", "workers"])
def test_run_prints_what_it_leaves_out_of_a_changed_room(
    suite: Suite, workers: tuple[str, ...]
) -> None:
    other = 1 if shards.shard_of("test_it.py::test_it") == 0 else 0
    (suite.folder / "conftest.py").write_text(
        CONFTEST.replace('"0"', f'"{other}:test_it.py"')
        + "\nfrom tests.gate import shards\nshards.BUDGET_S = -1.0\n"
    )
    _, output = suite.run(
        "import pytest\n@pytest.mark.slow\ndef test_it(): pass\ndef test_fast(): pass\n", *workers
    )
    assert "1 passed" in output, output
    assert output.count("1 slow tests of changed rooms (0 s of CPU) are left out") == 1, output


def test_run_after_a_change_of_all_rooms_is_within_its_limit_by_the_table(
    pytestconfig: pytest.Config,
) -> None:
    """`python -m tests.gate.estimate` shows what takes so long."""
    found = estimate.Collected()
    found.pytest_collection_modifyitems(pytestconfig.stash[plugin.COLLECTED])
    if len(found.all) < 8000:
        pytest.skip("needs all tests to be collected")
    taken_s, _ = estimate.longest(found, found.rooms(), costs.read())
    assert taken_s <= estimate.LIMIT_S


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
    none = changes.rooms_and_tests(["benchmarks/results/gate.md"])
    assert "benchmarks" not in none, "no row of a run"
    paths.append("benchmarks/merge.py")
    assert changes.rooms_and_tests(paths) == {"codec", "api", "tests/sim/bugs.py", "benchmarks"}
    assert changes.rooms_and_tests(["src/mend_lab/sim/world.py"]) == {"mend_lab"}
    assert changes.rooms_and_tests(["tests/gate/costs.py"]) == {"gate", "tests/gate/costs.py"}


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=n", "-c", "user.email=e@e")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With one commit, and behind it two changed files and a new one."""
    monkeypatch.setattr(changes, "ROOT", tmp_path)
    monkeypatch.setattr(shards, "ROOT", tmp_path)
    package = tmp_path / "src/mend"
    package.mkdir(parents=True)
    (package / "old.py").write_text("a = 1\ndef same():\n    b = 2\nclass C:\n    c = 3\n")
    (package / "words.txt").write_text("no code\n" * 3)
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    (package / "old.py").write_text("a = 4\ndef same():\n    b = 2\nclass C:\n    c = 5\n")
    (package / "words.txt").write_text("no code\n" * 2 + "none\n")
    (package / "new.py").write_text("async def f():\n    class D: pass\n")
    return tmp_path


def test_changed_lines_are_those_of_the_diff_and_of_new_files(repository: Path) -> None:
    changed = changes.changed_lines("HEAD", "src/mend")
    assert changed == {"src/mend/old.py": {1, 5}, "src/mend/new.py": None}
    assert changes.changed_lines("nowhere", "src/mend") is None


def test_changed_names_are_the_modules_and_what_has_the_changed_lines(repository: Path) -> None:
    assert changes.changed_names("HEAD") == {"old", "C", "new", "f", "D"}


def test_selection_by_git_has_rooms_names_and_the_count_of_first_parents(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(repository, "checkout", "-qb", "side")
    for _ in range(3):
        git(repository, "commit", "-q", "--allow-empty", "-m", "beside")
    git(repository, "checkout", "-q", "main")
    git(repository, "merge", "-q", "--no-ff", "-m", "merged", "side")
    monkeypatch.setenv("GATE_BASE", "HEAD")
    found = shards.from_git()
    assert found.shard == 2
    assert found.changed == {"old", "new", "words.txt"}
    assert found.names == {"old", "C", "new", "f", "D"}


def test_files_and_rooms_of_the_shards_are_there() -> None:
    rooms = {path.stem for path in (ROOT / "src/mend").iterdir()}
    rooms |= {"benchmarks", "examples", "gate", "mend_lab"}
    for begin, named in shards.ROOMS.items():
        assert list(ROOT.glob(f"{begin}*")), begin
        assert rooms.issuperset(named), begin


def test_every_file_of_process_tests_has_its_rooms() -> None:
    for file in sorted((ROOT / "tests/process").glob("test_*.py")):
        path = str(file.relative_to(ROOT))
        assert len(shards.about_of(path)) > 1, path


def test_selection_survives_the_way_to_workers() -> None:
    chosen = shards.Selection(3, frozenset({"codec", "engine"}), frozenset({"admit", "Door"}))
    assert shards.parse(chosen.text()) == chosen
