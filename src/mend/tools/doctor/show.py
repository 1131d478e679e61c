"""Prints the report of `mend doctor` as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mend.tools.doctor.terms import Finding

COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}
WIDTH = max(map(len, COLOURS))


def show(report: dict[str, Any], findings: Sequence[Finding], console: Console) -> None:
    """`findings`: everything that is to be said at the end, in this order within a severity."""
    _pairs(console, "versions", report["versions"])
    _pairs(console, "machine", report["machine"])
    if report["devices"]:
        _rows(console, "GPUs", report["devices"])
    else:
        console.print("[bold]GPUs[/bold]\n  no GPU: torch sees none here")
    if report["nccl_dump"]:
        _rows(console, "GPUs of the NCCL topology dump", report["nccl_dump"])
    elif report["nccl_dump"] is not None:
        console.print("[bold]GPUs of the NCCL topology dump[/bold]\n  no GPU in it")
    _pairs(console, "topology", report["topology"])
    if report["settings"]:
        _rows(console, "settings in force", report["settings"])
    else:
        console.print("[bold]settings in force[/bold]\n  the defaults")
    shown = [{**each, "free": "free" if each["free"] else "TAKEN"} for each in report["ports"]]
    data = [each["free"] == "free" for each in shown if each["what"] == "data"]
    _rows(console, "ports", [p for p in shown if p["what"] != "data" or p["free"] == "TAKEN"])
    if data:
        console.print(f"  {sum(data)} of {len(data)} data ports are free")
    _pairs(console, "addresses", report["addresses"])
    if report["network"] is not None:
        _rows(console, "network cards", report["network"]["cards"])
    if "meeting" in report:
        _meeting(console, report["meeting"])
    if report.get("plan"):
        console.print("[bold]recommended[/bold]")
        console.print(report["plan"]["text"], markup=False, highlight=False, soft_wrap=True)
    _findings(console, findings)
    if not report["problems"]:
        met = "meeting" in report
        tail = "the racks meet" if met else "whether other machines can be reached is not tried"
        console.print(f"no problem found; {tail}")


def _meeting(console: Console, meeting: dict[str, Any]) -> None:
    """Narrow enough for a terminal of 80 columns; the findings have the words."""
    rows = [
        {
            "rack": seen["rack"],
            "port": seen["answer"],
            "trip ms": _rounded(seen["p50_ms"]),
            "p99 ms": _rounded(seen["p99_ms"]),
            "in Mbit/s": _rounded(seen["mbit"]),
        }
        for seen in meeting["peers"]
    ]
    if rows:
        title = f"meeting of job {meeting['job']}, seen from rack {meeting['rack']}"
        _rows(console, title, rows)


def _rounded(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _findings(console: Console, findings: Sequence[Finding]) -> None:
    """The worst at the end, where people look."""
    for severity in ("ok", "note", "problem"):
        for each in findings:
            if each.severity != severity:
                continue
            colour = COLOURS[severity]
            mark = f"[{colour}]{severity:<{WIDTH}}[/{colour}]"
            console.print(f"{mark} {escape(f'{each.topic}: {each.found}')}", soft_wrap=True)
            if each.change:
                console.print(f"{'':<{WIDTH}} -> {escape(each.change)}", soft_wrap=True)


def _pairs(console: Console, title: str, pairs: dict[str, Any]) -> None:
    if pairs:
        console.print(f"[bold]{title}[/bold]")
    for name, value in pairs.items():
        console.print(f"  {name}: {escape(_said(value))}", soft_wrap=True)


def _rows(console: Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
    console.print(f"[bold]{title}[/bold]")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(escape(_said(value)) for value in row.values()))
    console.print(table)


def _said(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_said(inner)}" for name, inner in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
