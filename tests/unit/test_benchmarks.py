"""Every benchmark runs, at a size that takes seconds, and prints the JSON that the results hold. No
test looks at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent.parent
KEYS = {"name", "goal", "measured", "spread", "pass", "parameters", "machine", "command"}
MACHINE_KEYS = {"cpu", "cores", "memory_gb", "load_1min", "torch", "python", "system"}
TINY = {
    "heartbeat": ["--numel", "50000", "--members", "2", "--merges", "1"],
    "hooks": ["--steps", "10", "--blocks", "3"],
    "lane": ["--megabytes", "2", "--repeats", "2"],
    "merge": ["--numel", "50000", "--racks", "2", "--threads", "2", "--repeats", "2"],
    "outer_sync": ["--numel", "20000", "--repeats", "2", "--fragments", "2", "--momentum", "0.5"],
    "sideband": ["--seconds", "1", "--runs", "1", "--peers", "1"],
    "stall": [
        *("--numel", "20000", "--fragments", "2", "--gap", "3", "--overlap", "2"),
        *("--rounds", "2", "--step-ms", "10"),
    ],
    "takeover": [
        "--repeats",
        "1",
        "--steps",
        "150",
        "--kill-at",
        "20",
        "--step-ms",
        "20",
        "--stall-max-s",
        "0",
    ],
    "tape": ["--events", "500", "--repeats", "2"],
}

OF_GPUS = {
    *("h200", "h200_cells", "h200_machine", "h200_meeting", "h200_rank", "h200_table"),
    *("qwen", "torchft_cell"),
}
"""Started by `mend launch` on a machine with GPUs; tests/process/test_h200.py tries them."""


def printed(name: str, *arguments: str) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, text=True, timeout=100,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_benchmark_is_tried_here() -> None:
    found = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert {name for name in found if not name.startswith("_")} == set(TINY) | OF_GPUS


@pytest.mark.parametrize("name", sorted(TINY))
def test_it_prints_one_json_object_with_what_a_result_needs(name: str) -> None:
    found = json.loads(printed(name, *TINY[name]))
    assert found.keys() >= KEYS
    assert found["name"] == name
    assert isinstance(found["pass"], bool)
    assert found["measured"] in (found["spread"]["median"], found["spread"]["max"])
    assert found["machine"].keys() == MACHINE_KEYS
    assert found["command"] == " ".join([f"python -m benchmarks.{name}", *TINY[name]])


@pytest.mark.parametrize("name", sorted(TINY))
def test_help_teaches_how_to_read_the_figures(name: str) -> None:
    said = printed(name, "--help")
    assert f"python -m benchmarks.{name}" in said
    assert "`measured` is" in said
    assert "--save" in said


def test_the_racks_of_a_benchmark_do_the_work_they_are_timed_for() -> None:
    """A sync that skipped its parts would be the fastest of all: each of them took some time."""
    found = json.loads(printed("outer_sync", "--numel", "300000", "--repeats", "2"))
    parts = found["cpu_ms"]
    assert all(parts[name] > 0 for name in ("capture", "encode", "merge", "apply")), parts
    stall = json.loads(printed("stall", *TINY["stall"]))
    assert stall["at_steps_ms"]["apply"]["max"] > stall["at_steps_ms"]["other"]["min"]
