"""Starts a script of a framework as a job of two racks, as its user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 900
"""Of a job. On a busy machine Ray alone takes three minutes to start its workers."""
ROUNDS = {
    "MEND_SYNC_PERIOD_STEPS": "8", "MEND_OVERLAP_STEPS": "2", "MEND_FRAGMENTS": "2",
    "MEND_LOCKSTEP": "true",
}  # fmt: skip


def launch(
    script: str, *arguments: object, ranks: int = 1, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Two racks of `ranks` ranks, to their end."""
    path = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.run(
        [
            sys.executable, "-m", "mend.tools", "launch", "--racks", "2",
            "--nproc-per-rack", str(ranks),
            str(ROOT / "tests/frameworks" / script), *map(str, arguments),
        ],
        cwd=ROOT, env={**os.environ, **path, **ROUNDS, **environment},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def ends(
    script: str, *arguments: object, ranks: int = 1, **environment: str
) -> list[dict[str, Any]]:
    """What all ranks print at their end, by rack: merged, and with equal weights."""
    done = launch(script, *arguments, ranks=ranks, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines() if "[rack " in line]
    found = [json.loads(line) for line in lines if line.startswith('{"rack"')]
    found.sort(key=lambda each: each["rack"])
    assert [each["rack"] for each in found] == [rack for rack in range(2) for _ in range(ranks)]
    for each in found:
        assert each["outcome"] == "merged"
        for key in ("step", "digest", "weights", "loss"):
            assert each[key] == found[0][key], key
    return found
