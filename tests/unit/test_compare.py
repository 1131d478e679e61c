"""benchmarks/compare.py says what has become worse, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare

ROOT = Path(__file__).parent.parent.parent
HERE = {"cpu": "a CPU", "cores": 4, "system": "Linux x86_64", "torch": "2.13", "load_1min": 0.1}


def row(name: str, *values: float, **more: Any) -> dict[str, Any]:
    """A result with these as least, quartiles and greatest."""
    named = dict(zip(("min", "q1", "median", "q3", "max"), values, strict=True))
    return {
        "name": name, "goal": "<= 5 us", "unit": "us", "better": "lower", "samples": 20,
        "measured": named["median"], "spread": named, "parameters": {"steps": 300},
        "machine": HERE, **more,
    }  # fmt: skip


def compared(
    tmp_path: Path, old: list[dict[str, Any]], new: list[dict[str, Any]], *options: str, **of: Any
) -> subprocess.CompletedProcess[str]:
    paths = []
    for name, rows in (("old", old), ("new", new)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"rows": rows, "failed": of.get("failed", {}) if name == "new"
                                    else {}, "quick": of.get("quick", False)}))  # fmt: skip
        paths.append(str(path))
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "compare.py"), *paths, *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


STEADY = row("hooks", 0.8, 0.9, 1.0, 1.1, 1.2)


def test_a_row_that_became_worse_beyond_its_spread_is_flagged(tmp_path: Path) -> None:
    done = compared(tmp_path, [STEADY], [row("hooks", 1.3, 1.4, 1.5, 1.6, 1.7)])
    assert done.returncode == 1
    assert "DRIFTED" in done.stdout
    assert "1.50" in done.stdout


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        pytest.param(row("hooks", 0.5, 1.05, 1.5, 1.6, 1.7), "same", id="quartiles overlap"),
        pytest.param(row("hooks", 1.0, 1.101, 1.09, 1.2, 1.3), "same", id="less than 10 %"),
        pytest.param(row("hooks", 0.4, 0.4, 0.5, 0.6, 0.6), "better", id="faster"),
        pytest.param(
            row("hooks", 1.15, 1.4, 1.5, 1.6, 1.7, samples=3), "same", id="few: the extremes count"
        ),
        pytest.param(
            row("hooks", 9, 9, 9, 9, 9, parameters={"steps": 1}), "not compared", id="other sizes"
        ),
        pytest.param(row("lane", 9, 9, 9, 9, 9), "only in NEW", id="a new row"),
    ],
)
def test_a_row_that_is_not_shown_to_be_worse_is_not_flagged(
    new: dict[str, Any], verdict: str
) -> None:
    old = STEADY if new["samples"] != 3 else {**STEADY, "samples": 3}
    line = compare.line_of(new["name"], old if new["name"] == "hooks" else None, new)
    assert line.verdict.startswith(verdict)
    assert not line.drifted


def test_which_direction_is_bad_is_the_rows_to_say() -> None:
    """Results of before `better` was noted have only their goal to say it."""
    fast = row("lane", 1.8, 1.9, 2.0, 2.1, 2.2, better="higher")
    slow = row("lane", 0.8, 0.9, 1.0, 1.1, 1.2, better="higher")
    assert compare.line_of("lane", fast, slow).drifted
    assert not compare.line_of("lane", slow, fast).drifted
    for each in (fast, slow):
        del each["better"]
        each["goal"] = ">= 0.9 of one raw socket"
    assert compare.line_of("lane", fast, slow).drifted


def test_a_row_names_by_how_much_it_may_become_worse() -> None:
    """A tenth of the speed of training was lost once, and 10 % would have let it pass."""
    old = row("gpu", 0.99, 0.994, 0.995, 0.996, 1.0, better="higher", worse=0.01)
    new = row("gpu", 0.89, 0.895, 0.9, 0.905, 0.91, better="higher", worse=0.01)
    assert compare.line_of("gpu", old, new).drifted
    assert not compare.line_of("gpu", old, {**new, "worse": 0.2}).drifted


def test_a_stall_that_was_zero_may_not_become_one() -> None:
    none, some = row("rejoin", 0, 0, 0, 0, 0), row("rejoin", 1, 1, 1, 1, 1)
    assert compare.line_of("rejoin", none, some).drifted
    assert compare.line_of("rejoin", none, none).verdict == "same"
    assert compare.line_of("rejoin", some, none).verdict == "better"


def test_a_row_that_does_not_run_any_more_is_flagged(tmp_path: Path) -> None:
    done = compared(tmp_path, [STEADY], [], failed={"hooks": "ImportError: gone"})
    assert done.returncode == 1
    assert "ImportError: gone" in done.stdout


def test_another_machine_is_refused_unless_asked_for(tmp_path: Path) -> None:
    elsewhere = {**STEADY, "machine": {**HERE, "cores": 16, "load_1min": 99.0}}
    refused = compared(tmp_path, [STEADY], [elsewhere])
    assert refused.returncode == 2
    assert "cores was 4, is 16" in refused.stderr
    asked = compared(tmp_path, [STEADY], [elsewhere], "--any-machine")
    assert asked.returncode == 0
    assert "NEW hooks: load 99 on 16 cores" in asked.stdout


def test_quick_figures_are_refused(tmp_path: Path) -> None:
    done = compared(tmp_path, [STEADY], [STEADY], quick=True)
    assert done.returncode == 2
    assert "--quick" in done.stderr


def test_the_results_of_the_repository_compare_with_themselves() -> None:
    """A folder, of old and new form, with files that are no results; variants by file name."""
    rows, failed = compare.read(ROOT / "benchmarks" / "results")
    assert {"merge", "hooks", "outer_sync", "outer_sync_4_fragments"} <= rows.keys()
    assert failed == {}
    assert all(compare.line_of(name, each, each).verdict == "same" for name, each in rows.items())


def test_unreadable_or_missing_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(compare.Refused, match="cannot be read"):
        compare.read(tmp_path / "broken.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(compare.Refused, match="no result"):
        compare.read(tmp_path / "empty")
