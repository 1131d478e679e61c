"""Runs pytest once per mutant in forks of a process that has loaded what tests load.

    python -P tests/mutant_server.py COPY

COPY is a tree of its own, with src and tests. Each line of the standard input is a job, as JSON:
the file to write (its name below COPY and its text), the arguments of pytest, a limit in seconds.
Each line of the output is its result: the exit status of pytest (None: beyond the limit), the
first failure, the seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

LOADED = ("torch", "numpy", "zmq", "msgspec", "xxhash", "cryptography", "rich")
"""Nothing of mend or its tests, which a mutant may change, and no plugin, which pytest rewrites."""

OPTIONS = ("-x", "-q", "--tb=line", "-p", "no:cacheprovider", "--shard", "0:")
POLL_S = 0.02


def run(copy: Path, job: dict[str, Any]) -> tuple[int | None, str, float]:
    path = copy / job["file"]
    before, output = path.read_text(encoding="utf-8"), copy / "output.txt"
    if job["text"] is not None:
        put(path, job["text"])
    started = time.monotonic()
    try:
        status = wait(begin(copy, job, output), started + job["limit_s"])
    finally:
        put(path, before)
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return status, (failed or lines[-1:] or [""])[0], time.monotonic() - started


def put(path: Path, text: str) -> None:
    """And forget what was compiled of the former text, which may be as old, to the second."""
    path.write_text(text, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


def begin(copy: Path, job: dict[str, Any], output: Path) -> int:
    """Returns the process id of a fork that runs the tests."""
    if child := os.fork():
        return child
    os.setsid()
    os.chdir(copy)
    file = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path.insert(0, str(copy / "src"))
    import pytest

    status: int = 3
    try:
        status = int(pytest.main([*OPTIONS, *job["tests"]]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(child: int, deadline_s: float) -> int | None:
    try:
        while time.monotonic() < deadline_s:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(POLL_S)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # also processes that a test has left behind
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def main() -> None:
    copy = Path(sys.argv[1]).resolve()
    os.environ |= {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    for name in LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(run(copy, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
