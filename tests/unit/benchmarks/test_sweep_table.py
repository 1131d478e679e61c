"""A sweep as a table, as JSON and as plots."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.delay_sweep import run as sweep
from benchmarks.delay_sweep import table
from benchmarks.delay_sweep.plan import BLOCKING, CALIBRATION, CONCURRENT, NONE
from benchmarks.delay_sweep.plots import NAMES, write_plots
from benchmarks.delay_sweep.rows import Bits, compare_bits, rows
from benchmarks.delay_sweep.state import State
from mend.errors import UsageError
from tests.unit.benchmarks.sweeps import as_the_line_says, done, measured, settings

SWEEP = settings(distributions=("constant", "long_tail"))


def shown(width: int = 80) -> str:
    cells, to = as_the_line_says(settings()), StringIO()
    table.show(
        Console(file=to, width=width), settings(), rows(settings(), cells), compare_bits(cells)
    )
    return to.getvalue()


def test_the_terminal_gets_a_line_per_mode_in_80_columns() -> None:
    text = shown()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    (blocking,) = [line for line in lines if "130 [130, 130]" in line]
    assert blocking.split()[:3] == ["constant", "blocking", "4,917"]
    assert "0.680 [0.61, 0.75]" in blocking, "on one line"
    assert "0.698" in blocking, "the analytic line beside it"
    assert "equal to the last bit, 4 of 4" in " ".join(text.split())


def test_markdown_says_all_with_intervals_and_how_it_was_made() -> None:
    cells = as_the_line_says(settings())
    text = table.markdown(settings(), rows(settings(), cells), compare_bits(cells), missing=3)
    row = next(line for line in text.splitlines() if "| blocking |" in line and "100 ms" in line)
    assert row.split(" | ")[2:5] == ["8", "240 ms", "blocking"]
    assert "130.0 [130.0, 130.0] ms" in row
    assert "`train.py --seed '{seed}'`" in text
    assert "cpu abacus" in text
    assert "3 cells are missing" in text
    assert text.count("\n| ") == 1 + 6


def test_verdict_names_differences_and_missing_comparisons() -> None:
    differ = Bits(
        2, 1, 5, ("loss of rack 0 rank 0, number 3: 1.0 and 2.0: differs in a and b",), ""
    )
    assert table.verdict(differ)[0].startswith("NOT EQUAL: loss of rack 0")
    own = Bits(2, 1, 5, (), "loss of rack 1")
    assert "the script itself does not repeat its bits" in table.verdict(own)[1]
    silent = Bits(2, 1, 0, (), "")
    assert "runtime.record(loss=loss.item())" in table.verdict(silent)[-1]
    assert table.verdict(Bits(0, 0, 0, (), "")) == [
        "no two cells were there to be compared bit for bit"
    ]


def test_a_cell_is_told_in_a_line() -> None:
    assert table.line_of(done(2, 100.0, BLOCKING, measured(40.0, 55.5))) == (
        "seed 2 constant-100ms blocking: 5,000 tokens/s, stall 55.5 ms/round"
    )
    assert table.line_of(done(CALIBRATION, 0.0, NONE, measured(40.0))).startswith("calibration")


def kept(tmp_path: Path, *, broken: bool = False) -> State:
    state = State.begin(tmp_path / "out", settings(), fresh=False)
    for one in as_the_line_says(settings()):
        if broken and one.cell.mode == CONCURRENT:
            one = done(0, one.cell.place.delay_ms, CONCURRENT, measured(20.0, commits={"0": []}))
        state.add(one)
    return state


def test_a_sweep_ends_with_files_and_status_0(tmp_path: Path) -> None:
    state = kept(tmp_path)
    assert sweep.conclude(state, Console(file=StringIO(), width=80)) == 0
    whole = json.loads((state.out / "sweep.json").read_text())
    assert whole["complete"] is True
    assert whole["exchange_ms"] == pytest.approx(30)
    assert len(whole["cells"]) == 12
    assert len(whole["rows"]) == 6
    assert whole["bits"]["equal"] is True
    assert "losses" not in whole["cells"][0]
    assert (state.out / "table.md").read_text().startswith("# Delay sweep")
    assert all((state.out / name).stat().st_size > 1000 for name in NAMES)


def test_bits_that_differ_are_status_1(tmp_path: Path) -> None:
    console = Console(file=StringIO(), width=80)
    assert sweep.conclude(kept(tmp_path, broken=True), console) == sweep.EXIT_DIFFERENT


def test_a_sweep_without_a_baseline_yet_says_so(tmp_path: Path) -> None:
    said = StringIO()
    state = State.begin(tmp_path / "out", settings(), fresh=False)
    assert sweep.conclude(state, Console(file=said, width=80)) == 0
    assert "so there is no baseline" in " ".join(said.getvalue().split())


# ------------------------------------------------------------------ plots


def test_plots_repeat_byte_for_byte_and_have_a_column_per_distribution(tmp_path: Path) -> None:
    cells = as_the_line_says(SWEEP)
    found = rows(SWEEP, cells)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_plots(tmp_path / name, SWEEP, found)
    first, second = ((tmp_path / name / NAMES[1]).read_text() for name in ("one", "two"))
    assert first == second
    assert "long_tail delay" not in first, "nobody ran it"
    for words in ("constant delay", "blocking: analytic line", "concurrent: measured",
                  "tau x step", "stall per round, ms"):  # fmt: skip
        assert words in first
    assert (tmp_path / "one" / NAMES[0]).read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_table_is_there_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    state, said = kept(tmp_path), StringIO()
    assert sweep.conclude(state, Console(file=said, width=80)) == 0
    assert "pip install matplotlib" in said.getvalue()
    assert (state.out / "table.md").exists()
    with pytest.raises(UsageError, match="matplotlib"):
        write_plots(tmp_path, settings(), [])
