"""Runs rows of the benchmarks one after another; one table of all.

Starts a process per row and one for its peers, reads the JSON they print, writes files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import mend
from benchmarks._rows import ROWS, Row
from mend.errors import ConfigError
from mend.types import VERSION

ROOT = Path(__file__).resolve().parents[1]
ROW_S_MAX = 3600.0
"""No row takes longer; one that does is ended and has failed."""

Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to run. `arguments` are options of the one row that is named."""

    names: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    quick: bool = False
    peers: bool = True
    out: Path | None = None
    save: bool = False

    def __post_init__(self) -> None:
        if self.arguments and len(self.names) != 1:
            rule = "are the options of one row"
            raise ConfigError("--", " ".join(self.arguments), rule, "Name exactly one row.")
        if self.save and (self.quick or self.arguments):
            rule = "keeps results, which are of the full size"
            remedy = "Leave --quick and further options out, or use --out FILE."
            raise ConfigError("save", True, rule, remedy)


def run(wanted: Wanted, rows: Sequence[Row] = ROWS, root: Path = ROOT) -> int:
    """0: all rows were measured; 1: one failed to run. Raises ConfigError. `rows` are modules of
    `root`/benchmarks."""
    chosen = choose(rows, wanted.names)
    results: list[Found] = []
    failed: dict[str, str] = {}
    aside = Console(stderr=True)
    for number, row in enumerate(chosen, 1):
        aside.print(f"[dim]{number}/{len(chosen)}[/dim] {row.name}: {escape(row.about)}")
        with aside.status("measuring"):
            found, reason = _measured(root, row, wanted)
        if found is None:
            failed[row.name] = reason
            aside.print(f"  failed: {escape(reason)}")
            continue
        results.append(found)
        if wanted.save:
            folder = root / "benchmarks" / "results"
            folder.mkdir(exist_ok=True)
            (folder / f"{row.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    Console().print(table(results, failed, judged=not wanted.quick))
    if wanted.out is not None:
        wanted.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(summary(results, failed, quick=wanted.quick), indent=1)
        wanted.out.write_text(text + "\n")
    return 1 if failed else 0


def summary(results: Sequence[Found], failed: Mapping[str, str], *, quick: bool) -> Found:
    """What --out holds; benchmarks/compare.py reads it."""
    return {
        "mend": VERSION,
        "quick": quick,
        "command": " ".join(["mend", *sys.argv[1:]]),
        "rows": list(results),
        "failed": dict(failed),
    }


# ------------------------------------------------------------------ which rows


def choose(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows of these names, in their order; `-` is as good as `_`. Raises ConfigError."""
    known = {row.name: row for row in rows} | {row.other: row for row in rows if row.other}
    chosen = []
    for name in names:
        row = known.get(name.replace("-", "_")) or known.get(name)
        if row is None:
            remedy = f"There are: {', '.join(row.name for row in rows)}."
            raise ConfigError("name", name, "no row has this name", remedy)
        chosen.append(row)
    return chosen or list(rows)


# ------------------------------------------------------------------ running


def _measured(root: Path, row: Row, wanted: Wanted) -> tuple[Found | None, str]:
    """(what the row found, with its peers), or (None, why not)."""
    arguments = row.quick.split() if wanted.quick else []
    began = time.monotonic()
    found, reason = _asked(root, f"benchmarks.{row.name}", *arguments, *wanted.arguments)
    if found is None:
        return None, reason
    found["took_s"] = round(time.monotonic() - began, 1)
    if wanted.peers and row.peers:
        parameters = json.dumps(found["parameters"])
        peers, reason = _asked(root, "benchmarks.peers", row.name, "--parameters", parameters)
        found["peers"] = peers or {peer: {"failed": reason} for peer in row.peers}
    return found, ""


def _asked(root: Path, module: str, *arguments: str) -> tuple[Found | None, str]:
    """The JSON object that a module prints, or why there is none."""
    package = Path(mend.__file__).parents[1]  # also where it is not installed
    paths = [str(root), str(package), os.environ.get("PYTHONPATH", "")]
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=root, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True, text=True, timeout=ROW_S_MAX, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"no result within {ROW_S_MAX:g} s"
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return None, lines[-1] if lines else f"exit status {done.returncode} without a word"
    try:
        found: Found = json.loads(done.stdout)
    except ValueError:
        return None, f"printed no JSON: {done.stdout[:80]!r}"
    return found, ""


# ------------------------------------------------------------------ tables


def listing(rows: Sequence[Row]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for title in ("row", "measures", "peers"):
        shown.add_column(title)
    for row in rows:
        name = f"{row.name} ({row.other})" if row.other else row.name
        shown.add_row(name, escape(row.about), ", ".join(row.peers))
    return shown


def table(results: Sequence[Found], failed: Mapping[str, str], *, judged: bool) -> Table:
    """A line per row and one below it for each peer that is installed."""
    shown = Table(box=None, pad_edge=False)
    for title in ("row", "measured", "limit, in the same run", "goal", ""):
        shown.add_column(title, overflow="fold")
    absent = set()
    for found in results:
        met = "[green]met[/green]" if found["pass"] else "[red]missed[/red]"
        verdict = met if judged else "not judged"
        shown.add_row(
            found["name"], figure(found), limit_text(found), escape(found["goal"]), verdict
        )
        for peer, theirs in found.get("peers", {}).items():
            if "absent" in theirs:
                absent.add(peer)
            elif "failed" in theirs:
                reason = escape(theirs["failed"])
                shown.add_row(f"  {peer} {theirs.get('version', '')}", "failed", "", reason)
            else:
                name = f"  {peer} {theirs['version']}"
                shown.add_row(name, figure(theirs), "", escape(theirs["note"]), style="dim")
    for name, reason in failed.items():
        shown.add_row(name, "[red]failed to run[/red]", "", escape(reason))
    if absent:
        names = ", ".join(sorted(absent))
        shown.caption = escape(f"not installed: {names} (pip install -e .[peers])")
    return shown


def figure(found: Found) -> str:
    """Never a point: `0.91 us [0.85, 1.02]`, with `at most` where the greatest counts."""
    around = found["spread"]
    word = "" if found["measured"] == around["median"] else "at most "
    return escape(
        f"{word}{found['measured']:g} {found['unit']} [{around['min']:g}, {around['max']:g}]"
    )


def limit_text(found: Found) -> str:
    beside = found["limit"]
    if beside is None:
        return ""
    return escape(f"{beside['what']}: {beside['median']:g} {beside['unit']}")
