"""Runs a delay sweep: launches the cells, keeps their figures, prints them."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import time
from collections import deque
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks._common import cpu_name
from benchmarks.delay_sweep import read, table
from benchmarks.delay_sweep.plan import (
    BLOCKING,
    NONE,
    Cell,
    Place,
    Sweep,
    calibration,
    cells,
    command_of,
    counted_from,
    environment,
    overlaps,
)
from benchmarks.delay_sweep.plots import write_plots
from benchmarks.delay_sweep.rows import compare_bits, rows
from benchmarks.delay_sweep.state import Done, State
from mend.errors import MendError, UsageError
from mend.tools.launch import Job, launch
from mend.types import VERSION

LAST_LINES = 25
"""Lines of a failed cell that are shown again."""

EXIT_DIFFERENT = 1


class Stopped(Exception):
    """A signal ended the cell that ran; `status` is the exit status that says so."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"stopped with status {status}")


def machine(on_cpu: bool) -> dict[str, str]:
    """The machine and versions, so that the figures of two machines are not mixed."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {
        "cpu": cpu_name(),
        "cores": str(cores),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "mend": VERSION,
    }
    if not on_cpu and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found


def sweep(settings: Sweep, out: Path, *, fresh: bool, console: Console) -> int:
    """Run what is missing, then show all; returns the exit status. Raises MendError when a cell
    fails; what was finished before is kept."""
    state = State.begin(out, settings, fresh=fresh)
    status = 0
    if state.done:
        console.print(f"continuing in {out}: {len(state.done)} cells are finished", highlight=False)
    try:
        _run_missing(state, console)
    except Stopped as stopped:
        status = stopped.status
    except KeyboardInterrupt:  # between two cells, or while a line was written
        status, state = 128 + signal.SIGINT, State.load(out)
    different = conclude(state, console)
    if not status:
        return different
    message = f"stopped; the same command continues after the {len(state.done)} finished cells"
    console.print(message, highlight=False)
    return status


def _run_missing(state: State, console: Console) -> None:
    taus = _taus(state, console)
    planned = list(cells(state.sweep, taus))
    left = [cell for cell in planned if state.find(cell) is None]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TextColumn("cells"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(planned), completed=len(planned) - len(left))
        for cell in left:
            progress.update(bar, description=cell.key)
            done = run_cell(state, cell)
            console.print(table.line_of(done), highlight=False)
            progress.advance(bar)


def _taus(state: State, console: Console) -> dict[Place, int]:
    """Given, or from two cells that are run first (or were, by a sweep that was stopped)."""
    sweep = state.sweep
    if sweep.overlap_steps is not None:
        return overlaps(sweep, 1.0, 0.0)
    measured: dict[str, read.Measured] = {}
    for cell in calibration(sweep):
        done = state.find(cell) or run_cell(state, cell)
        console.print(table.line_of(done), highlight=False)
        measured[cell.mode] = done.measured
    step_ms = measured[NONE].step_ms
    taus = overlaps(sweep, step_ms, measured[BLOCKING].stall_ms_per_round)
    shown = ", ".join(f"{place.name} {tau}" for place, tau in taus.items())
    console.print(f"a step takes {step_ms:.1f} ms; tau: {shown}", highlight=False)
    return taus


# ------------------------------------------------------------------ one cell


def job_of(sweep: Sweep, cell: Cell, folder: Path) -> Job:
    """The job of a cell, which writes its events and logs to that folder."""
    told = {"MEND_DIAGNOSTICS_DIR": str((folder / "events").resolve())}
    env = {**sweep.env, **environment(sweep, cell), **told}
    return Job(
        command=command_of(sweep, cell),
        racks=sweep.racks,
        nproc_per_rack=sweep.nproc_per_rack,
        witness=False,  # the same processes in every mode
        torchrun=sweep.nproc_per_rack > 1,
        log_dir=folder / "logs",
        env=env | ({"CUDA_VISIBLE_DEVICES": ""} if sweep.on_cpu else {}),
        link=sweep.link,
    )


def run_cell(state: State, cell: Cell) -> Done:
    """One job, from start to its figures on disk. Raises MendError with its last lines, or
    Stopped."""
    sweep, folder = state.sweep, state.folder(cell)
    shutil.rmtree(folder, ignore_errors=True)  # of a cell that was stopped half-way
    events = folder / "events"
    last: deque[str] = deque(maxlen=LAST_LINES)
    started = time.monotonic()
    outcome = launch(job_of(sweep, cell, folder), lambda who, line: last.append(f"[{who}] {line}"))
    if outcome.interrupted:
        raise Stopped(outcome.status)
    if outcome.status:
        lines = "\n".join(last)
        raise MendError(
            f"the cell {cell.key!r} ended with status {outcome.status}; its logs are in "
            f"{folder / 'logs'}, its last lines:\n{lines}"
        )
    files = read.event_files(events, sweep.racks * sweep.nproc_per_rack)
    read.check_settings(events, files, _settings_of(sweep, cell))
    measured = read.measure(
        files,
        counted_from=counted_from(sweep, cell),
        gap=sweep.gap_steps,
        blocking=cell.mode == BLOCKING,
    )
    done = Done(cell, measured, round(time.monotonic() - started, 3))
    state.add(done)
    return done


def _settings_of(sweep: Sweep, cell: Cell) -> dict[str, Any]:
    """Settings on the tape of a script that leaves them to the sweep."""
    return {
        "exchange": cell.mode != NONE,
        "concurrent_outer_step": cell.mode != BLOCKING,
        "lockstep": True,
        "sync_period_steps": sweep.period_steps,
        "fragments": sweep.fragments,
        "overlap_steps": cell.overlap_steps,
        "simulated_merge_delay_ms": cell.place.delay_ms,
        "simulated_merge_delay_distribution": cell.place.distribution,
    }


# ------------------------------------------------------------------ results


def conclude(state: State, console: Console) -> int:
    """Table, JSON and plots of what is there; returns 1 when bits differ that must not."""
    sweep, done, out = state.sweep, state.done, state.out
    found, bits = rows(sweep, done), compare_bits(done)
    expected = len(sweep.places) * sweep.seeds * 3
    missing = expected - sum(one.cell.seed >= 0 for one in done)
    if not found:
        console.print("no cell without exchange is finished yet, so there is no baseline")
        return 0
    table.show(console, sweep, found, bits)
    (out / "table.md").write_text(table.markdown(sweep, found, bits, missing), encoding="utf-8")
    whole = table.as_json(sweep, done, found, bits, missing)
    (out / "sweep.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    names = ["table.md", "sweep.json"]
    try:
        names += [path.name for path in write_plots(out, sweep, found)]
    except UsageError as error:
        console.print(str(error), style="yellow", markup=False, highlight=False)
    console.print(f"[dim]{out}: {', '.join(names)}[/dim]", highlight=False)
    if missing:
        console.print(f"{missing} of {expected} cells are missing", style="yellow")
    return 0 if bits.equal else EXIT_DIFFERENT
