"""Reads a folder of events and tapes, writes a page and a picture."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from mend.errors import ConfigError
from mend.tools.report.draw import check_matplotlib, write_png
from mend.tools.report.page import Run, page
from mend.tools.report.read import read_run, runs_in
from mend.tools.report.rounds import rounds_of

RUNS_MAX = 8
"""Runs of one page: the newest."""
NAME = "report.html"


def report(folder: Path, out: Path | None = None, png: Path | None = None) -> Path:
    """Write the page, and the PNG if it is wanted; returns the page's path.

    Raises ConfigError: no run in there, no matplotlib, or a file that cannot be written.
    """
    check_matplotlib()
    found = runs_in(folder)
    runs = []
    for name, path in found[-RUNS_MAX:]:
        facts = read_run(path)
        runs.append(Run(name, facts, rounds_of(path, facts.newest, facts.end_ns)))
    left_out = len(found) - len(runs)
    notes = [f"{left_out} older runs of this folder are left out"] if left_out else []
    title = runs[0].name if len(runs) == 1 else folder.resolve().name
    target = out if out is not None else folder / NAME
    _write(target, page(title, runs, notes).encode("utf-8"))
    if png is not None:
        try:
            png.parent.mkdir(parents=True, exist_ok=True)
            write_png(png, [(f"{run.name}: {run.headline}", run.panels) for run in runs])
        except OSError as error:
            raise _unwritable("--png", png, error) from error
    return target


def _write(path: Path, data: bytes) -> None:
    """All or nothing: a browser that reloads never sees half a page."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".report-") as beside:
            whole = Path(beside) / path.name
            whole.write_bytes(data)
            os.replace(whole, path)
    except OSError as error:
        raise _unwritable("--out", path, error) from error


def _unwritable(option: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(option, str(path), f"cannot be written ({error})", "Give another path.")
