"""`mend bench run` with rows that need no torch: what it runs, shows, writes and refuses."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks import _run, peers
from benchmarks._run import Row, Wanted, choose, figure, file_stem, run, table
from mend.errors import ConfigError

ROWS = (Row("good", "runs", quick="--tiny", peers=("rival",)), Row("bad", "fails", quick=""))
GOOD = """
import json, sys
around = {"min": 0.5, "q1": 0.6, "median": 0.91, "q3": 1.0, "max": 1.5}
print(json.dumps({
    "name": "good", "goal": "<= 5 us", "unit": "us", "better": "lower", "measured": 0.91,
    "spread": around, "samples": 3, "limit": {"what": "memcpy", "unit": "GB/s", "median": 20.0},
    "pass": True, "parameters": {"given": sys.argv[1:]},
}))
"""
PEERS = """
import json, sys
print(json.dumps({"rival": {"absent": "pip"}, "asked": {"failed": " ".join(sys.argv[1:])}}))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A source tree with two rows."""
    folder = tmp_path / "checkout" / "benchmarks"
    folder.mkdir(parents=True)
    bad = "raise SystemExit('MemoryError: no room for it')"
    for name, text in {"good": GOOD, "bad": bad, "peers": PEERS, "__init__": ""}.items():
        (folder / f"{name}.py").write_text(text)
    return folder.parent


def shown(drawn: Table) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(drawn)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rows_are_measured_shown_and_written(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    out = checkout / "runs" / "bench.json"
    assert run(Wanted(("good",), out=out), ROWS, checkout) == 0
    said = capsys.readouterr()
    assert "1/1 good: runs" in said.err
    assert "0.91 us [0.5, 1.5]" in said.out
    assert "memcpy: 20 GB/s" in said.out
    assert "met" in said.out
    assert "not installed: rival" in said.out
    written = json.loads(out.read_text())
    assert written["rows"][0]["spread"]["q3"] == 1.0
    assert written["rows"][0]["peers"]["rival"] == {"absent": "pip"}
    assert (written["failed"], written["quick"]) == ({}, False)
    told = written["rows"][0]["peers"]["asked"]["failed"]
    assert told == 'good --parameters {"given": []}', "peers do the work that was measured"


def test_a_row_that_fails_is_told_and_the_others_are_measured(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Wanted(quick=True, peers=False, out=checkout / "out.json"), ROWS, checkout) == 1
    said = capsys.readouterr()
    assert "MemoryError: no room for it" in said.err
    written = json.loads((checkout / "out.json").read_text())
    assert written["failed"] == {"bad": "MemoryError: no room for it"}
    assert written["rows"][0]["parameters"]["given"] == ["--tiny"]
    assert "peers" not in written["rows"][0]
    assert "not judged" in said.out


def test_further_arguments_are_the_rows(checkout: Path) -> None:
    out = checkout / "out.json"
    assert (
        run(Wanted(("good",), ("--numel", "7"), peers=False, out=out, save=False), ROWS, checkout)
        == 0
    )
    assert json.loads(out.read_text())["rows"][0]["parameters"]["given"] == ["--numel", "7"]


def test_saved_results_are_one_file_per_row(checkout: Path) -> None:
    assert run(Wanted(("good",), peers=False, save=True), ROWS, checkout) == 0
    kept = json.loads((checkout / "benchmarks" / "results" / "good.json").read_text())
    assert kept["measured"] == 0.91


def test_file_name_of_a_gpu_result_contains_the_gpu() -> None:
    found: dict[str, Any] = {"name": "gpu", "machine": {"gpu": "NVIDIA H100 80GB HBM3"}}
    assert file_stem(found) == "gpu_nvidia_h100_80gb_hbm3"
    assert file_stem({"name": "lane", "machine": {"cpu": "Xeon"}}) == "lane"


def test_rows_that_need_a_gpu_run_without_one_only_by_their_name(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (replace(ROWS[0], gpu=True),)
    monkeypatch.setattr(_run, "_has_gpu", lambda: False)
    assert run(Wanted(peers=False), rows, checkout) == 0
    assert "0.91" not in capsys.readouterr().out
    assert run(Wanted(("good",), peers=False), rows, checkout) == 0
    assert "0.91" in capsys.readouterr().out


def test_rows_go_by_the_names_that_people_type() -> None:
    named = [row.name for row in choose(_run.ROWS, ["outer-sync", "coordinator-kill", "merge"])]
    assert named == ["outer_sync", "takeover", "merge"]
    assert choose(_run.ROWS, []) == list(_run.ROWS)
    with pytest.raises(ConfigError, match=r"'marge': no row has this name. There are: merge"):
        choose(_run.ROWS, ["marge"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"arguments": ("--numel", "7")}, "Name exactly one row"),
        ({"arguments": ("--numel", "7"), "names": ("a", "b")}, "Name exactly one row"),
        ({"save": True, "quick": True}, "Leave --quick"),
        ({"save": True, "names": ("a",), "arguments": ("--numel", "7")}, "Leave --quick"),
    ],
)
def test_conflicting_options_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Wanted(**given)


def result(**more: Any) -> dict[str, Any]:
    around = {"min": 90.0, "q1": 95.0, "median": 100.0, "q3": 102.0, "max": 140.0}
    found = {"name": "heartbeat", "goal": "< 150 ms", "unit": "ms", "measured": 100.0}
    return {**found, "spread": around, "limit": None, "pass": True, **more}


def test_a_missed_goal_is_shown_as_missed_and_a_peers_failure_with_its_reason() -> None:
    theirs = {
        "tsugi-mend": {**result(), "version": "0.1.5", "note": "merges on the loop"},
        "torchft": {"version": "0.2.0", "failed": "ImportError: no [gloo]"},
    }
    text = shown(table([result(**{"pass": False, "peers": theirs})], {}, judged=True))
    assert "missed" in text
    assert "merges on the loop" in text
    assert "ImportError: no [gloo]" in text
    assert "not installed" not in text


def test_a_figure_is_never_a_bare_point() -> None:
    assert figure(result()) == "100 ms [90, 140]"
    assert figure(result(measured=140.0)) == "at most 140 ms [90, 140]"


def test_peers_answer_in_one_line_or_say_why_not() -> None:
    found = peers.Found([1.0, 2.0, 9.0], "ms", "as it is", measure="max")
    said = f"chatter\n{peers.ANSWER}{json.dumps(found.fields())}\n"
    answer = peers.answer_of(said, "warnings\n", 0)
    assert (answer["measured"], answer["spread"]["median"], answer["samples"]) == (9.0, 2.0, 3)
    why = peers.answer_of("chatter\n", "Traceback\n  line\nRuntimeError: no peers found\n\n", 1)
    assert why == {"failed": "RuntimeError: no peers found"}
    assert peers.answer_of("", "", -9) == {"failed": "exit status -9 without a word"}


def test_every_peer_of_a_row_has_an_adapter() -> None:
    folder = Path(_run.__file__).parent
    for row in _run.ROWS:
        assert isinstance(row, Row)
        for peer in row.peers:
            source = folder / f"{peers.ADAPTERS[peer].rpartition('.')[2]}.py"
            assert f'"{row.name}": {row.name}' in source.read_text(), (row.name, peer)
