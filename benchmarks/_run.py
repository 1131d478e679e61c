"""Runs rows of the benchmarks one after another, and prints one table of all.

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
from mend.errors import ConfigError
from mend.types import VERSION

ROOT = Path(__file__).resolve().parents[1]
ROW_S_MAX = 3600.0
"""No row takes longer; one that does is ended and has failed."""

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A benchmark: a module beside this one that prints one JSON object."""

    name: str
    about: str
    quick: str
    """Arguments that make it run in seconds, and its figures worthless."""
    peers: tuple[str, ...] = ()
    """Distributions that can do the same work."""
    other: str = ""
    """Another name that people look for."""
    gpu: bool = False
    """Whether its full size needs a GPU: all rows without a name leave it out where there is none.
    """


ROWS = (
    Row(
        "merge",
        "mean + outer step + digest of 2, 4, 8 racks, against memcpy",
        quick="--numel 50000 --racks 2 --threads 2 --repeats 2",
        peers=("tsugi-mend",),
    ),
    Row(
        "encode",
        "delta, check, codec, checksum of an offer, against memcpy",
        quick="--numel 50000 --repeats 2",
        peers=("tsugi-mend",),
    ),
    Row(
        "lane",
        "pull of 512 MB over loopback, with and without keys, against one raw socket",
        quick="--megabytes 2 --repeats 2",
    ),
    Row(
        "relay",
        "pull through the port of a rack's leader, against a direct one",
        quick="--megabytes 2 --repeats 2",
    ),
    Row(
        "floods",
        "commits of a job under floods, beside the same floods at a bystander",
        quick="--repeats 1 --seconds 0.3 --floods garbage",
    ),
    Row(
        "sideband",
        "CPU of 100 ms heartbeats with 8 peers",
        quick="--seconds 1 --runs 1 --peers 1",
        peers=("tsugi-mend",),
    ),
    Row(
        "control",
        "the coordinator of 8 racks of 72 ranks, of a core",
        quick="--racks 2 --ranks 2 --fragments 2 --seconds 1",
    ),
    Row(
        "lock",
        "work of each of mend's threads, idle and per round",
        quick="--racks 2 --seconds 1 --repeats 1 --numel 65536 --cpu-only",
    ),
    Row(
        "hooks",
        "what mend adds to a step in which nothing is due",
        quick="--steps 10 --blocks 3",
        peers=("tsugi-mend",),
    ),
    Row(
        "gpu",
        "training on one GPU beside an exchange, of its speed without one",
        quick="--shape tiny --pairs 1 --gaps 1 --gap 3 --overlap 2 --overlap-late 2 --delay-ms 5",
        gpu=True,
    ),
    Row(
        "tape",
        "what a tape adds to an event on the loop thread",
        quick="--events 500 --repeats 2",
    ),
    Row(
        "heartbeat",
        "largest gap between heartbeats during merges of 4 x 100M",
        quick="--numel 50000 --members 2 --merges 1",
        peers=("tsugi-mend",),
    ),
    Row(
        "stall",
        "capture + apply of an overlapped round on the training thread",
        quick="--numel 20000 --fragments 2 --gap 3 --overlap 2 --rounds 2 --step-ms 10",
    ),
    Row(
        "outer_sync",
        "one blocking outer step of 201 MB, against gloo's all_reduce",
        quick="--numel 300000 --repeats 2 --fragments 2 --momentum 0.5",
        peers=("torchft", "hivemind"),
    ),
    Row(
        "straggler",
        "a rack 15 times slower: what the fast ones lose per round",
        quick="--repeats 1 --seconds 2 --step-ms 10 --factor 4",
        peers=("torchft",),
    ),
    Row(
        "unequal",
        "tokens per second of racks of the speeds 1 : .5 : .25, against each alone",
        quick="--repeats 1 --seconds 1 --step-ms 5 --period 16 --overlap 4 --numel 20000",
    ),
    Row(
        "kill",
        "kill -9 of one rack of two: the survivor's next merge",
        quick="--repeats 1 --cases three --step-ms 10 --wait-s 3",
        peers=("torchft",),
    ),
    Row(
        "checkpoint",
        "a checkpoint in the background: what training waits",
        quick="--numel 100000 --repeats 2",
    ),
    Row(
        "rejoin",
        "a killed rack is started again: the survivor's stall",
        quick="--repeats 1 --numel 20000 --step-ms 10 --fragments 2",
    ),
    Row(
        "takeover",
        "kill -9 of the rack that coordinates: merging again, nothing lost",
        quick="--repeats 1 --steps 150 --kill-at 20 --step-ms 20 --stall-max-s 0",
        other="coordinator-kill",
    ),
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The arguments of a run. `arguments` are options of the one row that is named."""

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
    if not (wanted.names or wanted.quick or _has_gpu()):
        chosen = [row for row in chosen if not row.gpu]
    results: list[Result] = []
    failed: dict[str, str] = {}
    aside = Console(stderr=True)
    for number, row in enumerate(chosen, 1):
        aside.print(f"[dim]{number}/{len(chosen)}[/dim] {row.name}: {escape(row.about)}")
        with aside.status("measuring"):
            found, reason = _measure_row(root, row, wanted)
        if found is None:
            failed[row.name] = reason
            aside.print(f"  failed: {escape(reason)}")
            continue
        results.append(found)
        if wanted.save:
            folder = root / "benchmarks" / "results"
            folder.mkdir(exist_ok=True)
            (folder / f"{file_stem(found)}.json").write_text(json.dumps(found, indent=1) + "\n")
    Console().print(table(results, failed, judged=not wanted.quick))
    if wanted.out is not None:
        wanted.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(summary(results, failed, quick=wanted.quick), indent=1)
        wanted.out.write_text(text + "\n")
    return 1 if failed else 0


def summary(results: Sequence[Result], failed: Mapping[str, str], *, quick: bool) -> Result:
    """The content of --out; benchmarks/compare.py reads it."""
    return {
        "mend": VERSION,
        "quick": quick,
        "command": " ".join(["mend", *sys.argv[1:]]),
        "rows": list(results),
        "failed": dict(failed),
    }


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def file_stem(found: Result) -> str:
    """Name of a kept result: of each GPU the last one is kept."""
    gpu = found.get("machine", {}).get("gpu", "")
    words = "".join(letter if letter.isalnum() else " " for letter in gpu.lower()).split()
    return "_".join([found["name"], *words])


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


def _measure_row(root: Path, row: Row, wanted: Wanted) -> tuple[Result | None, str]:
    """(what the row found, with its peers), or (None, why not)."""
    arguments = row.quick.split() if wanted.quick else []
    began = time.monotonic()
    found, reason = _run_module(root, f"benchmarks.{row.name}", *arguments, *wanted.arguments)
    if found is None:
        return None, reason
    found["took_s"] = round(time.monotonic() - began, 1)
    if wanted.peers and row.peers:
        parameters = json.dumps(found["parameters"])
        peers, reason = _run_module(root, "benchmarks.peers", row.name, "--parameters", parameters)
        found["peers"] = peers or {peer: {"failed": reason} for peer in row.peers}
    return found, ""


def _run_module(root: Path, module: str, *arguments: str) -> tuple[Result | None, str]:
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
        return None, complaint_of(done.stderr, done.returncode)
    try:
        found: Result = json.loads(done.stdout)
    except ValueError:
        return None, f"printed no JSON: {done.stdout[:80]!r}"
    return found, ""


def complaint_of(stderr: str, code: int) -> str:
    """The last line of a process that failed, or its exit status."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {code} without a word"


# ------------------------------------------------------------------ tables


def listing(rows: Sequence[Row]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for title in ("row", "measures", "peers"):
        shown.add_column(title)
    for row in rows:
        name = f"{row.name} ({row.other})" if row.other else row.name
        shown.add_row(name, escape(row.about), ", ".join(row.peers))
    return shown


def table(results: Sequence[Result], failed: Mapping[str, str], *, judged: bool) -> Table:
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


def figure(found: Result) -> str:
    """Return the median and its range: `0.91 us [0.85, 1.02]`; `at most` where the maximum
    counts."""
    around = found["spread"]
    word = "" if found["measured"] == around["median"] else "at most "
    return escape(
        f"{word}{found['measured']:g} {found['unit']} [{around['min']:g}, {around['max']:g}]"
    )


def limit_text(found: Result) -> str:
    beside = found["limit"]
    if beside is None:
        return ""
    return escape(f"{beside['what']}: {beside['median']:g} {beside['unit']}")
