"""The finished cells of a sweep, on disk: one line each, written at once.

`cells.jsonl`: the first line holds the settings and their hash, each further one a cell. A sweep
that is stopped (Ctrl-C, kill -9, a power cut) loses only the cell that ran.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.delay_sweep.plan import Cell, Sweep
from benchmarks.delay_sweep.read import Measured
from mend.errors import ConfigError

NAME, RUNS = "cells.jsonl", "runs"


@dataclass(frozen=True, slots=True)
class Done:
    """A cell that was run. `wall_s`: of the whole job, with start and end."""

    cell: Cell
    measured: Measured
    wall_s: float


class State:
    """The folder of a sweep. `done` holds its cells in the order in which they ran."""

    def __init__(self, out: Path, sweep: Sweep) -> None:
        self.out, self.sweep = out, sweep
        self.done: list[Done] = []
        self._path = out / NAME

    @classmethod
    def begin(cls, out: Path, sweep: Sweep, *, fresh: bool) -> State:
        """Resume the sweep in `out`, or begin one. Raises ConfigError if `out` has a sweep with
        other settings, or files that no sweep wrote."""
        if fresh or not (out / NAME).exists():
            if out.is_dir() and any(out.iterdir()) and not fresh:
                rule = "the folder is not empty, and no sweep is in it"
                raise ConfigError("out", str(out), rule, "Choose another --out, or use --fresh.")
            return cls._anew(out, sweep)
        found = cls.load(out)
        if found.sweep.hash() != sweep.hash():
            if not found.done:  # the first try, with a script that did not run: nothing to lose
                return cls._anew(out, sweep)
            rule = f"it has a sweep with other settings: {_first_difference(found.sweep, sweep)}"
            remedy = "Choose another --out, give the same settings, or use --fresh to begin anew."
            raise ConfigError("out", str(out), rule, remedy)
        return found

    @classmethod
    def _anew(cls, out: Path, sweep: Sweep) -> State:
        """Delete the files of an earlier sweep, and nothing else."""
        if (out / NAME).exists():
            (out / NAME).unlink()
            shutil.rmtree(out / RUNS, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        state = cls(out, sweep)
        state._append({"hash": sweep.hash(), "settings": sweep.fields()})
        return state

    @classmethod
    def load(cls, out: Path) -> State:
        """Read the folder. A torn last line is removed. Raises ConfigError without any line."""
        path = out / NAME
        whole = _whole_lines(path)
        if not whole:
            rule = f"there is no {NAME} of a sweep in it"
            raise ConfigError("out", str(out), rule, "Run the sweep first, or name its folder.")
        try:
            state = cls(out, msgspec.convert(json.loads(whole[0])["settings"], Sweep))
            state.done = [msgspec.convert(json.loads(line), Done) for line in whole[1:]]
        except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
            rule = f"its {NAME} is not what this version writes ({error})"
            remedy = "Choose another --out, or use --fresh to begin anew."
            raise ConfigError("out", str(out), rule, remedy) from error
        return state

    def find(self, cell: Cell) -> Done | None:
        """The run of this cell, if there was one."""
        return next((one for one in self.done if one.cell == cell), None)

    def add(self, done: Done) -> None:
        """Write a finished cell; it is on disk when this returns."""
        self._append(asdict(done))
        self.done.append(done)

    def folder(self, cell: Cell) -> Path:
        """Return the folder of the cell's events, tapes and logs."""
        return self.out / RUNS / cell.key

    def _append(self, record: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _whole_lines(path: Path) -> list[str]:
    """The whole lines of the file. A torn last line is cut off, so that the next one is whole."""
    if not path.exists():
        return []
    data = path.read_bytes()
    stop = data.rfind(b"\n") + 1
    if stop < len(data):
        with path.open("r+b") as file:
            file.truncate(stop)
    return data[:stop].decode().splitlines()


def _first_difference(old: Sweep, new: Sweep) -> str:
    before, now = old.fields(), new.fields()
    name = next(name for name in now if before.get(name) != now[name])
    return f"{name} was {before.get(name)!r} and is {now[name]!r}"
