"""benchmarks.compare: what has become worse between two sets of results? Prints a table.

    python benchmarks/compare.py before.json after.json
    python benchmarks/compare.py benchmarks/results runs/results --any-machine

OLD and NEW are files that `mend bench run --out` wrote, single results, or folders of either.

A row has drifted when it is worse by more than 10 %, or than the share that it names as `worse`,
and the two intervals do not overlap: from quartile to quartile where both have at least 8 samples,
else from the least to the greatest. Exit status 1 when a row has drifted or does not run any more,
2 when the two cannot be compared.

Figures of two machines are refused: --any-machine compares them all the same. A row whose
parameters differ is left out, and said; so is one that only one side has.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORSE = 0.10
SAMPLES_MIN = 8
"""Below, quartiles are hardly more than two of the samples."""

MACHINE = ("cpu", "cores", "system", "gpu")
"""Fields that identify a machine. Versions of torch and Python may be why something has drifted."""

LOAD_MAX = 0.5
"""Load per core above which a note says that the machine was busy."""

Found = dict[str, Any]


class Refused(Exception):
    """The two cannot be compared; the message says why."""


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    name: str
    old: str
    new: str
    ratio: str
    verdict: str
    drifted: bool = False


def main() -> int:
    options = _options()
    try:
        old, old_failed = read(options.old)
        new, new_failed = read(options.new)
        if not options.any_machine:
            refuse_other_machines(old, new)
    except Refused as reason:
        print(f"compare: {reason}", file=sys.stderr)
        return 2
    lines = [line_of(name, old.get(name), new.get(name)) for name in sorted({*old, *new})]
    lines += [
        Line(name, "", f"fails: {reason}", "", "FAILS", drifted=name not in old_failed)
        for name, reason in sorted(new_failed.items())
    ]
    show(lines)
    for side, rows in (("OLD", old), ("NEW", new)):
        for name, found in rows.items():
            if note := busy(found):
                print(f"note: {side} {name}: {note}")
    return 1 if any(line.drifted for line in lines) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/compare.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    parser.add_argument("--any-machine", action="store_true", help="also compare two machines")
    return parser.parse_args()


# ------------------------------------------------------------------ reading


def read(path: Path) -> tuple[dict[str, Found], dict[str, str]]:
    """(rows by name, why others failed). A folder may hold other JSON, too. Raises Refused."""
    rows: dict[str, Found] = {}
    failed: dict[str, str] = {}
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    for file in files:
        try:
            found = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise Refused(f"{file} cannot be read as JSON: {error}") from None
        several = isinstance(found, dict) and "rows" in found
        if several and found.get("quick"):
            raise Refused(f"{file} is of --quick, whose figures mean nothing")
        for row in found["rows"] if several else [found]:
            if not is_row(row):
                continue
            # A folder may hold a row in several variants: the file's name tells them apart.
            rows[row["name"] if several or not path.is_dir() else file.stem] = row
        failed |= found.get("failed", {}) if several else {}
    if not rows and not failed:
        raise Refused(f"{path} holds no result of a benchmark")
    return rows, failed


def is_row(found: object) -> bool:
    keys = {"name", "goal", "measured", "spread", "parameters", "machine"}
    return isinstance(found, dict) and found.keys() >= keys


def refuse_other_machines(old: dict[str, Found], new: dict[str, Found]) -> None:
    for name in sorted(old.keys() & new.keys()):
        for key in MACHINE:
            was, now = old[name]["machine"].get(key), new[name]["machine"].get(key)
            if was != now:
                raise Refused(
                    f"{name}: measured on another machine ({key} was {was}, is {now}). "
                    "--any-machine compares all the same."
                )


# ------------------------------------------------------------------ comparing


def line_of(name: str, old: Found | None, new: Found | None) -> Line:
    if old is None or new is None:
        side = "only in NEW" if old is None else "only in OLD"
        return Line(name, figure(old), figure(new), "", side)
    differing = differences(old["parameters"], new["parameters"])
    if differing:
        return Line(name, figure(old), figure(new), "", f"not compared: {differing}")
    change = worse_by(old, new)
    apart = not overlap(interval(old), interval(new))
    verdict, drifted = "same", False
    most = float(new.get("worse", WORSE))
    if apart and change > most:
        verdict, drifted = "DRIFTED", True
    elif apart and change < -most:
        verdict = "better"
    ratio = f"{new['measured'] / old['measured']:.2f}" if old["measured"] else ""
    return Line(name, figure(old), figure(new), ratio, verdict, drifted)


def differences(old: Found, new: Found) -> str:
    """Parameters that both know and that differ; one that is new has its default."""
    shared = sorted(old.keys() & new.keys())
    return ", ".join(f"{key} {old[key]} -> {new[key]}" for key in shared if old[key] != new[key])


def worse_by(old: Found, new: Found) -> float:
    """Share of the old figure by which the new one is worse; negative: better."""
    change: float = new["measured"] - old["measured"]
    if better_is_higher(new):
        change = -change
    if old["measured"] == 0:
        return float("inf") if change > 0 else float("-inf") if change < 0 else 0.0
    return change / abs(float(old["measured"]))


def better_is_higher(found: Found) -> bool:
    """Results from before `better` was noted have it in their goal."""
    default = "higher" if found["goal"].startswith(">") else "lower"
    return bool(found.get("better", default) == "higher")


def interval(found: Found) -> tuple[float, float]:
    low, high = ("q1", "q3") if found.get("samples", 0) >= SAMPLES_MIN else ("min", "max")
    return found["spread"][low], found["spread"][high]


def overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


# ------------------------------------------------------------------ showing


def figure(found: Found | None) -> str:
    if found is None:
        return "-"
    low, high = interval(found)
    return f"{found['measured']:g} [{low:g}, {high:g}] {found.get('unit', '')}".strip()


def busy(found: Found) -> str:
    load, cores = found["machine"].get("load_1min", 0.0), found["machine"].get("cores", 1)
    return f"load {load:g} on {cores} cores when it ended" if load > LOAD_MAX * cores else ""


def show(lines: list[Line]) -> None:
    """A table in plain text, so that it can be read in a log."""
    cells = [("row", "old", "new", "ratio", "")]
    cells += [(line.name, line.old, line.new, line.ratio, line.verdict) for line in lines]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    for row in cells:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


if __name__ == "__main__":
    sys.exit(main())
