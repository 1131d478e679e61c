"""`mend bench delay-sweep` as a user runs it: stopped in the middle, gone on with, looked at."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.delay_sweep import read as sweep_read
from mend.errors import ConfigError
from tests.process.racks import Nursery

pytestmark = pytest.mark.slow

SETTINGS = (
    "--delays", "40", "--distributions", "bimodal", "--seeds", "1", "--size", "tiny", "--tau", "4",
    "--period", "8", "--fragments", "1", "--rounds", "3", "--warm-up", "4", "--step-ms", "10",
    "--device", "cpu",
)  # fmt: skip
LIMIT_S = 140.0


@contextmanager
def started(python: str, out: Path) -> Iterator[subprocess.Popen[str]]:
    command = [python, "-m", "mend.tools", "bench", "delay-sweep", *SETTINGS]
    with subprocess.Popen(
        [*command, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()  # its racks die with it


def done(out: Path) -> list[str]:
    path = out / "cells.jsonl"
    lines = path.read_text().splitlines(keepends=True)[1:] if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


@pytest.mark.timeout(300)
def test_a_sweep_that_was_stopped_goes_on_and_ends_with_table_and_json(
    nursery: Nursery, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with started(nursery.python, out) as first:
        while not done(out) and first.poll() is None:
            time.sleep(0.05)
        first.send_signal(signal.SIGINT)
        said, _ = first.communicate(timeout=LIMIT_S)
    before = done(out)
    assert first.returncode == 128 + signal.SIGINT, said
    finished = f"the {len(before)} finished cells"  # one; the signal may be late on a busy machine
    assert f"the same command continues after {finished}" in " ".join(said.split()), said
    assert json.loads((out / "sweep.json").read_text())["cells_missing"] == 3 - len(before)

    with started(nursery.python, out) as second:
        said, _ = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, said
    assert f"{len(before)} cells are finished" in " ".join(said.split())
    assert done(out)[: len(before)] == before, "what was done is not done again"
    whole = json.loads((out / "sweep.json").read_text())
    assert whole["complete"] is True
    modes = {row["mode"]: row for row in whole["rows"]}
    assert set(modes) == {"none", "blocking", "concurrent"}
    # 40 ms x 0.71 is the least that bimodal draws; nothing but the delay is as long.
    assert modes["blocking"]["stall_ms"]["mean"] > 0.71 * 40
    assert modes["none"]["stall_ms"]["mean"] == 0
    assert whole["bits"] == {
        "compared": 2, "pairs": 1, "losses": 56, "differences": [], "script_differs": "",
        "equal": True,
    }  # fmt: skip
    assert "equal to the last bit, 1 of 1 repeats" in " ".join(said.split())
    assert "| 40 ms | bimodal | 4 |" in (out / "table.md").read_text()

    events = next((out / "runs").glob("*-concurrent")) / "events"
    files = sweep_read.event_files(events, 2)
    fits = {"exchange": True, "sync_period_steps": 8, "overlap_steps": 4}
    sweep_read.check_settings(events, files, fits)
    with pytest.raises(ConfigError, match="the script sets it itself, where this cell wants 99"):
        sweep_read.check_settings(events, files, {**fits, "sync_period_steps": 99})
