"""Two racks in the real Ray Train, on a Ray of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.jobs import LIMIT_S, ROOT, ROUNDS

pytestmark = pytest.mark.timeout(2 * LIMIT_S)  # two jobs, each of which starts Ray
pytest.importorskip("ray")


def ends(
    folder: Path, *arguments: object, ranks: int = 1, **environment: str
) -> list[dict[str, Any]]:
    """What all ranks wrote at their end, by rack: merged, and with equal weights."""
    folder.mkdir(exist_ok=True)
    script = [str(ROOT / "tests/frameworks/ray_train.py"), "--folder", str(folder)]
    more = ["--ranks", str(ranks), *map(str, arguments)]
    fixed = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, *script, *more], cwd=ROOT,
        env={**os.environ, **fixed, **ROUNDS, **environment},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = [
        json.loads((folder / f"end-{rack}-{rank}.json").read_text())
        for rack in range(2)
        for rank in range(ranks)
    ]
    for each in found:
        assert (each["outcome"], each["ranks"]) == ("merged", ranks)
        for key in ("step", "digest", "weights"):
            assert each[key] == found[0][key], key
    return found


def test_racks_that_all_die_resume_and_end_with_the_weights_of_one_run(tmp_path: Path) -> None:
    whole = ends(tmp_path / "whole")
    assert (whole[0]["step"], whole[0]["tokens"]) == (24, 24 * 16)
    both = json.dumps([[0, 0], [1, 0]])
    again = ends(tmp_path / "killed", "--die-in", 20, "--die", both, "--save-every", 8)
    assert [each["first"] for each in again] == [17, 17]
    for key in ("step", "tokens", "digest", "weights"):
        assert again[0][key] == whole[0][key], key


def test_death_in_a_rack_of_two_ranks_resumes_all_racks(tmp_path: Path) -> None:
    """The other rack may go on until Ray notices, and makes no checkpoint in that time."""
    one = ["--die-in", 20, "--die", "[[1, 1]]", "--save-every", 8, "--steps", 23]
    found = ends(tmp_path, *one, ranks=2)
    assert {(each["first"], each["step"]) for each in found} == {(17, 23)}


def test_rack_that_dies_alone_is_replaced_and_joins_the_others(tmp_path: Path) -> None:
    one = ["--die-in", 20, "--die", "[[1, 0]]", "--steps", 1000, "--pause", 0.01]
    found = ends(tmp_path, *one, MEND_LOCKSTEP="false")
    assert [each["step"] for each in found] == [1000, 1000]
    assert found[0]["first"] == 1, "the other rack was not started again"
    assert found[1]["joined"].startswith("copied from rack 0")
