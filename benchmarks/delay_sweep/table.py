"""A sweep as a table for the terminal, as Markdown and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.delay_sweep.plan import CALIBRATION, NONE, Sweep
from benchmarks.delay_sweep.rows import Bits, Estimate, Row, exchange_ms
from benchmarks.delay_sweep.state import Done

HEADS = (
    "delay",
    "distribution",
    "tau",
    "tau x step",
    "mode",
    "tokens/s",
    "of none",
    "line",
    "stall/round",
    "line",
)

LEGEND = (
    "Delay: mean, of every transfer. Of none: throughput against the same racks without exchange, "
    "in the same repeat. Stall: what training waits per round. Line: what the analytic line says. "
    "In brackets: 95 % bootstrap interval over repeats."
)
WIDE = "tau x step: what an exchange may take without being waited for."


def _number(estimate: Estimate, form: str, ends: str = "") -> str:
    """The mean and its interval, whose ends may be rounded more."""
    if estimate.low is None or estimate.high is None:
        return format(estimate.mean, form)
    low, high = (format(end, ends or form) for end in (estimate.low, estimate.high))
    return f"{estimate.mean:{form}} [{low}, {high}]"


def _delay(ms: float) -> str:
    return f"{ms:g} ms"


def cells_of(row: Row) -> tuple[str, ...]:
    """One line of the table, a text per head."""
    alone = row.mode == NONE
    return (
        _delay(row.place.delay_ms),
        row.place.distribution if row.place.delay_ms else "",
        "" if alone else str(row.overlap_steps),
        "" if alone else f"{row.hidden_ms:.0f} ms",
        row.mode,
        _number(row.tokens_per_s, ",.0f"),
        "1" if alone else _number(row.share, ".3f"),
        "" if alone else f"{row.share_predicted:.3f}",
        "" if alone else _number(row.stall_ms, ".1f") + " ms",
        "" if alone else f"{row.stall_ms_predicted:.1f} ms",
    )


def title(sweep: Sweep, rows: Sequence[Row]) -> str:
    """The job in a line."""
    repeats = {row.tokens_per_s.repeats for row in rows}
    count = f"{min(repeats)}..{max(repeats)}" if len(repeats) > 1 else str(max(repeats, default=0))
    link = f", link {sweep.link}" if sweep.link is not None else ""
    return (
        f"{sweep.racks} racks x {sweep.nproc_per_rack}, H={sweep.period_steps}, "
        f"P={sweep.fragments}, {count} repeats{link}"
    )


def verdict(bits: Bits) -> list[str]:
    """The result of the comparison of bits, in sentences."""
    what = "losses and digests" if bits.losses else "digests"
    lines = []
    if not bits.compared:
        lines.append("no two cells were there to be compared bit for bit")
    elif bits.equal:
        lines.append(
            f"{what} of blocking and concurrent: equal to the last bit, {bits.pairs} of "
            f"{bits.pairs} repeats; {bits.compared} cells compared, {bits.losses} losses each"
        )
    else:
        lines += [f"NOT EQUAL: {text}" for text in bits.differences]
    if bits.script_differs:
        lines.append(
            "the script itself does not repeat its bits, without any exchange: "
            f"{bits.script_differs}"
        )
    if bits.compared and not bits.losses:
        lines.append(
            "no losses were compared: the script does not call runtime.record(loss=loss.item())"
        )
    return lines


NARROW = ("place", "mode", "tokens/s", "of none", "line", "stall ms", "line")


def _narrow(row: Row, label: str) -> tuple[str, ...]:
    """One line for a terminal of 80 columns."""
    alone = row.mode == NONE
    return (
        label,
        row.mode,
        f"{row.tokens_per_s.mean:,.0f}",
        "1" if alone else _number(row.share, ".3f", ".2f"),
        "" if alone else f"{row.share_predicted:.3f}",
        "" if alone else _number(row.stall_ms, ".0f"),
        "" if alone else f"{row.stall_ms_predicted:.0f}",
    )


def show(console: Console, sweep: Sweep, rows: Sequence[Row], bits: Bits) -> None:
    """The table on a terminal. What is said of a place stands in the lines of its modes."""
    table = Table(
        title=title(sweep, rows), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
        padding=0,
    )  # fmt: skip
    for head in NARROW:
        table.add_column(head, justify="left" if head in ("place", "mode") else "right")
    for place, group in groupby(rows, key=lambda row: row.place):
        here = list(group)
        kind = place.distribution if place.delay_ms else ""
        labels = (_delay(place.delay_ms), kind, f"tau {here[0].overlap_steps}")
        for number, row in enumerate(here):
            label = labels[number] if len(here) == len(labels) else " ".join(labels[:2])
            table.add_row(*_narrow(row, label), end_section=number + 1 == len(here))
    console.print(table)
    console.print(f"[dim]{LEGEND}[/dim]\n", highlight=False)
    for text in verdict(bits):
        bad = "NOT EQUAL" in text or "does not repeat" in text
        console.print(text, style="red" if bad else "", highlight=False, markup=False)


def markdown(sweep: Sweep, rows: Sequence[Row], bits: Bits, missing: int) -> str:
    """table.md, whole."""
    machine = ", ".join(f"{name} {value}" for name, value in sweep.machine.items())
    lines = [
        "# Delay sweep",
        "",
        f"{title(sweep, rows)}. {machine}.",
        "",
        f"Script: `{shlex.join(sweep.command)}`",
        "",
        "| " + " | ".join(HEADS) + " |",
        "|" + "---|" * len(HEADS),
        *("| " + " | ".join(cells_of(row)) + " |" for row in rows),
        "",
        f"{LEGEND} {WIDE}",
        "",
        *(f"- {text}" for text in verdict(bits)),
    ]
    if missing:
        lines.append(f"- {missing} cells are missing: the sweep was stopped before its end")
    return "\n".join(lines) + "\n"


def as_json(
    sweep: Sweep, done: Sequence[Done], rows: Sequence[Row], bits: Bits, missing: int
) -> dict[str, Any]:
    """sweep.json, whole. Long lists (losses, digests) are there as hashes; cells.jsonl has them."""
    return {
        "settings": sweep.fields(),
        "hash": sweep.hash(),
        "complete": not missing,
        "cells_missing": missing,
        "exchange_ms": exchange_ms(sweep, [one for one in done if one.cell.seed != CALIBRATION]),
        "rows": [asdict(row) | {"hidden_ms": row.hidden_ms} for row in rows],
        "bits": asdict(bits) | {"equal": bits.equal},
        "cells": [
            asdict(one.cell) | {"wall_s": one.wall_s} | one.measured.figures() for one in done
        ],
    }


def line_of(done: Done) -> str:
    """A finished cell, while the sweep runs."""
    cell, found = done.cell, done.measured
    seed = "calibration" if cell.seed == CALIBRATION else f"seed {cell.seed}"
    waits = "" if cell.mode == NONE else f", stall {found.stall_ms_per_round:.1f} ms/round"
    return f"{seed} {cell.place.name} {cell.mode}: {found.tokens_per_s:,.0f} tokens/s{waits}"
