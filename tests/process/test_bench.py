"""`mend bench run` as a command, on two rows of the source tree, at the size of --quick."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent.parent


def test_two_rows_are_measured_and_a_peer_beside_them(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    out = tmp_path / "bench.json"
    done = subprocess.run(
        [sys.executable, "-m", "mend.tools", "bench", "run", "--quick", "encode", "tape",
         "--out", str(out)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path, "COLUMNS": "160"},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "memcpy, 1 thread: " in done.stdout
    assert "not judged" in done.stdout
    encode, tape = json.loads(out.read_text())["rows"]
    speed = encode["variants"]["float32 offer"]["GBps"]
    assert 0 < speed["min"] <= speed["median"] <= speed["max"]
    assert tape["bytes_per_event"] > 0
    theirs = encode["peers"]["tsugi-mend"]
    try:
        metadata.version("tsugi-mend")
    except metadata.PackageNotFoundError:
        assert "pip install" in theirs["absent"]
        assert "not installed: tsugi-mend" in done.stdout
    else:
        assert theirs["measured"] > 0
