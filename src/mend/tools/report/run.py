"""Reads a folder of events and tapes, and writes a page."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from mend.errors import ConfigError
from mend.tools.report.page import Run, page
from mend.tools.report.read import read_run, runs_in
from mend.tools.report.rounds import rounds_of

RUNS_MAX = 8
"""Runs of one page: the newest."""
NAME = "report.html"
EMPTY = "Wait until the job has begun; if it has ended, was its disk full?"


def report(folder: Path, out: Path | None = None) -> Path:
    """Write the page of the runs in `folder`; returns its path.

    Raises ConfigError: no run in there, or a file that cannot be written.
    """
    folders = runs_in(folder)
    found = [(name, path, read_run(path)) for name, path in folders[-RUNS_MAX:]]
    read = [(name, path, facts) for name, path, facts in found if facts.events]
    if not read:
        rule = f"no event can be read in there: {found[-1][2].notes[0]}"
        raise ConfigError("RUN_DIR", str(folder), rule, EMPTY)
    alone = next((facts for *_, facts in reversed(read) if not facts.exchange), None)
    runs = [
        Run(name, facts, rounds_of(path, facts.newest, facts.end_ns), alone)
        for name, path, facts in read
    ]
    left_out = len(folders) - len(found)
    notes = [f"{left_out} older runs of this folder are left out"] if left_out else []
    notes += [
        f"{name} has no event, and is left out" for name, _, facts in found if not facts.events
    ]
    title = runs[0].name if len(runs) == 1 else folder.resolve().name
    target = out or folder / NAME
    _write(target, page(title, runs, notes).encode("utf-8"))
    return target


def _write(path: Path, data: bytes) -> None:
    """Write the whole file at once: a browser that reloads never sees half a page."""
    try:
        if path.exists() and not path.is_file():  # a device or a pipe: a rename would replace it
            path.write_bytes(data)
            return
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".report-") as beside:
            whole = Path(beside) / path.name
            whole.write_bytes(data)
            os.replace(whole, path)
    except OSError as error:
        rule = f"cannot be written ({error})"
        raise ConfigError("--out", str(path), rule, "Give another path.") from error
