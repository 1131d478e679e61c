"""`mend doctor` as people start it. One of them with an interpreter of its own, as that takes
seconds; the rest are forked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.racks import LIMIT_S, Forked, Nursery, environment
from tests.unit.hardware.dumps import CLOUD

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(nursery: Nursery, tmp_path: Path) -> Run:
    """(exit status, what it printed)."""

    def started(*arguments: str, **env: str) -> tuple[int, str]:
        log = tmp_path / "doctor.log"
        log.unlink(missing_ok=True)
        doctor = Forked(nursery, ["mend.tools", "doctor", *arguments], environment(**env), log)
        return doctor.wait(), log.read_text()

    return started


def test_doctor_without_options_prints_its_findings() -> None:
    command = [sys.executable, "-m", "mend.tools", "doctor"]
    env = environment(MEND_JOB_ID="run7", COLUMNS="160")
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    for line in ("versions", "GPUs", "topology", "job_id", "MEND_JOB_ID", "ports", "addresses"):
        assert line in ended.stdout
    assert "network cards" in ended.stdout
    assert "limits: open files" in ended.stdout


def test_json_with_a_topology(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "topo.xml"
    path.write_text(CLOUD)
    arguments = ("--json", "--topology", str(path))
    code, text = run(*arguments, MEND_RANKS_PER_RACK="4", WORLD_SIZE="8")
    assert code == 0, text
    report = json.loads(text)
    assert [gpu["near_nics"] for gpu in report["nccl_dump"]] == [["mlx5_0"], ["mlx5_0"]]
    found = report["topology"]
    assert (found["racks"], found["ranks_per_rack"]) == (2, 4)
    assert found["source"] == "MEND_RANKS_PER_RACK"


def test_a_broken_file_is_one_line_and_a_broken_setting_is_told_with_the_rest(
    tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "topo.xml"
    path.write_text("<!DOCTYPE system []><system version='1'/>")
    code, text = run("--topology", str(path))
    assert code == 2
    assert text.startswith("mend: ConfigError: --topology=")
    assert text.count("\n") == 1
    code, text = run("--json", MEND_RACK="9")
    assert code == 1
    report = json.loads(text)
    assert "rack=9" in report["problems"][0]
    assert report["versions"]["mend"]
