"""Starts a script of a framework as a job of two racks, as its user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
ROUNDS = {
    "MEND_SYNC_PERIOD_STEPS": "8", "MEND_OVERLAP_STEPS": "2", "MEND_FRAGMENTS": "2",
    "MEND_LOCKSTEP": "true",
}  # fmt: skip


def launch(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Two racks of one rank, to their end."""
    path = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.run(
        [
            sys.executable, "-m", "mend.tools", "launch", "--racks", "2",
            str(ROOT / "tests/frameworks" / script), *map(str, arguments),
        ],
        cwd=ROOT, env={**os.environ, **path, **ROUNDS, **environment},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def ends(script: str, *arguments: object, **environment: str) -> list[dict[str, Any]]:
    """What both racks print at their end, which is merged and has equal weights."""
    done = launch(script, *arguments, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines() if "[rack " in line]
    found = [json.loads(line) for line in lines if line.startswith('{"rack"')]
    first, second = sorted(found, key=lambda each: each["rack"])
    assert (first["outcome"], second["outcome"]) == ("merged", "merged")
    for key in ("step", "digest", "weights", "loss"):
        assert first[key] == second[key], key
    return [first, second]
