"""`mend doctor` as people start it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.process.racks import LIMIT_S, environment
from tests.unit.runtime.dumps import CLOUD


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mend.cli", "doctor", *arguments]
    return subprocess.run(
        command, env=environment(**env), capture_output=True, text=True, timeout=LIMIT_S
    )


def test_plain() -> None:
    ended = run(MEND_JOB_ID="run7", COLUMNS="160")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    for line in ("versions", "GPUs", "topology", "job_id", "MEND_JOB_ID", "ports", "addresses"):
        assert line in ended.stdout


def test_json_with_a_topology(tmp_path: Path) -> None:
    path = tmp_path / "topo.xml"
    path.write_text(CLOUD)
    ended = run("--json", "--topology", str(path), MEND_RANKS_PER_RACK="4", WORLD_SIZE="8")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert [gpu["near_nics"] for gpu in report["nccl_dump"]] == [["mlx5_0"], ["mlx5_0"]]
    found = report["topology"]
    assert (found["racks"], found["ranks_per_rack"]) == (2, 4)
    assert found["source"] == "MEND_RANKS_PER_RACK"


def test_a_broken_file_is_one_line_and_a_broken_setting_is_told_with_the_rest(
    tmp_path: Path,
) -> None:
    path = tmp_path / "topo.xml"
    path.write_text("<!DOCTYPE system []><system version='1'/>")
    ended = run("--topology", str(path))
    assert ended.returncode == 2
    assert ended.stderr.startswith("mend: ConfigError: --topology=")
    ended = run("--json", MEND_RACK="9")
    assert ended.returncode == 1
    report = json.loads(ended.stdout)
    assert "rack=9" in report["problems"][0]
    assert report["versions"]["mend"]
