"""`mend plan` as a person runs it: what it prints for a shell is what a job then takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mend.config import MendConfig
from tests.process.racks import LIMIT_S


def test_exports_printed_by_plan_configure_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [
        *(sys.executable, "-m", "mend.tools", "plan", "--params", "1.5B", "--step-ms", "400"),
        *("--link", "1gbit,20ms", "--racks", "2", "--nproc-per-rack", "8"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line.strip() for line in ended.stdout.splitlines()]
    exported = [line.removeprefix("export ") for line in lines if line.startswith("export MEND_")]
    assert len(exported) == 5, ended.stdout
    for line in exported:
        monkeypatch.setenv(*line.split("=", 1))
    config = MendConfig()
    assert config.racks == 2
    assert f"overlap_steps = {config.tau}" in lines
    assert 4 * config.tau <= config.sync_period_steps
    (row,) = (line for line in lines if line.startswith("->"))
    assert row.split()[1:5] == [
        *(str(config.sync_period_steps), config.codec),
        *(str(config.fragments), str(config.tau)),
    ]
