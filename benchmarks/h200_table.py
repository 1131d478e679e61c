"""benchmarks.h200_table: the lines that h200's ranks wrote, as one JSON object and one table.

    python -m benchmarks.h200_table runs/h200 --save h200

Takes what is there: of a run that was cut short, the cells that every rank has finished. Prints the
table; --save NAME writes benchmarks/results/NAME.json and NAME.md.

`measured` is the median over the repeats of (tokens per second of `concurrent`) / (of `none`) at
the longest delay. tokens/s is that of all ranks together; a step takes as long as it took the
slowest rank. Two 95 % intervals follow: `steps` resamples the step times of all repeats
(2000 times, percentiles), `repeats` is Student's t over the repeats. `covered` says whether
tau * t_step is at least the delay and one exchange that was measured alone; where it is not,
`concurrent` has to wait by design. `stall_ms` is what the training thread waited in the measured
steps. Memory is what a cell had at most, less what `none` of the same repeat had (on the host: of
the first repeat, as freed memory may stay with the process). `bits` compares the losses of
`blocking` and `concurrent` of one delay, all steps, all ranks.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, parser_of
from benchmarks.quality_table import t_interval

GOAL = 0.99
RESAMPLES = 2000

Line = dict[str, Any]
Ranks = list[Line]
"""The lines of one cell, one per rank."""


def main() -> None:
    parser = parser_of("h200_table", __doc__ or "")
    parser.add_argument("folder", type=Path, help="what h200 had as --out")
    parser.add_argument("--save", metavar="NAME", default="", help="also write results/NAME.*")
    options = parser.parse_args()
    found = summary(read(options.folder))
    table = markdown(found)
    print(table)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{options.save}.json").write_text(json.dumps(found, indent=1) + "\n")
        (RESULTS / f"{options.save}.md").write_text(table + "\n")


def read(folder: Path) -> list[Line]:
    """Every whole line of every rank. A process that was killed may have left half of one."""
    lines = [
        json.loads(text)
        for path in sorted(folder.glob("rack*-rank*.jsonl"))
        for text in path.read_text(encoding="utf-8").split("\n")[:-1]
    ]
    if not lines:
        raise SystemExit(f"{folder} holds no lines of h200")
    return lines


def summary(lines: Sequence[Line]) -> Line:
    """The JSON object: what every result has, and the rows."""
    start = next(line for line in lines if line["kind"] == "start")
    count = start["racks"] * start["ranks"]
    cells = [ranks for ranks in _by_index(lines) if len(ranks) == count]
    rows = _rows([ranks for ranks in cells if ranks[0]["repeat"] >= 0], _exchange_ms(cells))
    for row in rows:
        row["tflops_per_gpu"] = round(
            row["tokens_per_s"] * start["flops_per_token"] / count / 1e12, 1
        )
    ratios = max((r for r in rows if r["mode"] == "concurrent"), key=_delay, default={})
    ratio = ratios.get("of_none", {}).get("median")
    bits = _bits(cells)
    reasons = sorted({line["reason"] for line in lines if line["kind"] == "end"})
    return {
        "name": "h200",
        "goal": _goal(ratio),
        "measured": ratio,
        "spread": ratios.get("of_none", {}),
        "pass": ratio >= GOAL and all(b["equal"] for b in bits) if ratio is not None else None,
        "exchange_ms": _exchange_ms(cells),
        "ended": reasons or ["cut short"],
        "cells": len(cells),
        "rows": rows,
        "bits": bits,
        "repeatable": _repeatable(cells),
        **{key: start[key] for key in ("device", "racks", "ranks", "weights", "shape")},
        **{key: start[key] for key in ("attention", "deterministic", "threads", "plan")},
        "parameters": start["parameters"],
        "machine": start["machine"],
        "command": start["command"],
    }


def _goal(ratio: float | None) -> str:
    if ratio is None:
        return "not judged: no concurrent cell"
    return f"concurrent >= {GOAL} of none at the longest delay, losses as blocking's"


def _by_index(lines: Sequence[Line]) -> list[Ranks]:
    found: dict[int, Ranks] = {}
    for line in lines:
        if line["kind"] == "cell":
            found.setdefault(line["index"], []).append(line)
    return [found[index] for index in sorted(found)]


def _exchange_ms(cells: Sequence[Ranks]) -> float | None:
    """Return the time of a blocking exchange without delay, from the calibration."""
    waited = [
        max(line["stall_ms_last"] for line in ranks)
        for ranks in cells
        if ranks[0]["repeat"] < 0 and ranks[0]["mode"] == "blocking"
    ]
    return waited[0] if waited else None


# ---------------------------------------------------------------------- rows


def _rows(cells: Sequence[Ranks], exchange_ms: float | None) -> list[Line]:
    """One per mode and delay, `none` first."""
    groups: dict[tuple[int, str], list[Ranks]] = {}
    for ranks in cells:
        first = ranks[0]
        key = (-1 if first["mode"] == "none" else first["delay_ms"], first["mode"])
        groups.setdefault(key, []).append(ranks)
    alone = {ranks[0]["repeat"]: ranks for ranks in groups.get((-1, "none"), [])}
    step_ms = statistics.median(ms for r in alone.values() for ms in _steps(r)) if alone else 0.0
    return [_row(groups[key], alone, step_ms, exchange_ms) for key in sorted(groups)]


def _row(
    repeats: list[Ranks], alone: dict[int, Ranks], step_ms: float, exchange_ms: float | None
) -> Line:
    first = repeats[0][0]
    rates = [_rate(ranks) for ranks in repeats]
    steps = [ms for ranks in repeats for ms in _steps(ranks)]
    tokens = sum(line["tokens_per_step"] for line in repeats[0])
    paired = [(r, alone[r[0]["repeat"]]) for r in repeats if r[0]["repeat"] in alone]
    ratios = [_rate(ranks) / _rate(base) for ranks, base in paired]
    known = exchange_ms is not None and first["tau"] > 0
    covered = first["tau"] * step_ms >= first["delay_ms"] + (exchange_ms or 0.0)
    return {
        "mode": first["mode"],
        "delay_ms": first["delay_ms"],
        "tau": first["tau"],
        "t_step_ms": round(step_ms, 2),
        "tau_t_step_ms": round(first["tau"] * step_ms, 1),
        "covered": covered if known else None,
        "tokens_per_s": round(statistics.mean(rates), 1),
        "tokens_per_s_by_repeat": [round(rate, 1) for rate in rates],
        "interval_steps": _resampled(steps, lambda ms: 1e3 * tokens / statistics.fmean(ms)),
        "interval_repeats": _student(rates),
        "of_none": _ratios(ratios),
        "step_ms": [[round(ms, 2) for ms in _steps(ranks)] for ranks in repeats],
        "stall_ms": [max(line.get("stall_ms", 0.0) for line in ranks) for ranks in repeats],
        "bytes_sent": [sum(line.get("bytes_sent", 0) for line in ranks) for ranks in repeats],
        "missed": [line["missed"] for ranks in repeats for line in ranks if line.get("missed")],
        "joined_s": [max(line["joined_s"] for line in ranks) for ranks in repeats],
        "loss_last": [float.fromhex(ranks[0]["losses"][-1]) for ranks in repeats],
        "more_bytes_than_none": _memory(repeats, alone),
    }


def _rate(ranks: Ranks) -> float:
    """Tokens per second of all ranks, over the time of the slowest."""
    tokens = sum(line["tokens_per_step"] * line["measured"] for line in ranks)
    return float(tokens / max(line["elapsed_s"] for line in ranks))


def _steps(ranks: Ranks) -> list[float]:
    return [max(ms) for ms in zip(*(line["step_ms"] for line in ranks), strict=True)]


def _ratios(ratios: list[float]) -> Line:
    if not ratios:
        return {}
    return {
        "median": round(statistics.median(ratios), 4),
        "by_repeat": [round(ratio, 4) for ratio in ratios],
        "interval_repeats": _student(ratios, 4),
    }


def _memory(repeats: list[Ranks], alone: dict[int, Ranks]) -> Line:
    """Return the most additional memory of a rank, over all ranks and repeats."""
    more = {}
    for key in ("gpu_allocated_bytes", "gpu_reserved_bytes", "pinned_bytes",
                "host_bytes", "host_bytes_peak"):  # fmt: skip
        found = []
        for ranks in repeats:
            base = alone.get(0 if key.startswith("host") else ranks[0]["repeat"])
            if base is not None and key in ranks[0]:
                before = {(line["rack"], line["rank"]): line[key] for line in base}
                found += [line[key] - before[(line["rack"], line["rank"])] for line in ranks]
        if found:
            more[key] = max(found)
    return more


def _resampled(
    values: Sequence[float], statistic: Callable[[Sequence[float]], float]
) -> tuple[float, float]:
    """Percentile bootstrap. Source: Efron 1979. The same draws every time."""
    draw = random.Random(0)
    found = sorted(statistic(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return round(found[RESAMPLES * 25 // 1000], 1), round(found[RESAMPLES * 975 // 1000 - 1], 1)


def _student(values: Sequence[float], digits: int = 1) -> tuple[float, float] | None:
    """None where one value says nothing about its spread."""
    if len(values) < 2:
        return None
    interval = t_interval(values)
    return round(interval.low, digits), round(interval.high, digits)


# ---------------------------------------------------------------------- bits


def _bits(cells: Sequence[Ranks]) -> list[Line]:
    """blocking against concurrent, per repeat and delay that has both."""
    by_key = {(c[0]["repeat"], c[0]["delay_ms"], c[0]["mode"]): c for c in cells}
    found = []
    for repeat, delay, mode in sorted(by_key):
        if mode == "blocking" and (repeat, delay, "concurrent") in by_key:
            first = _difference(by_key[repeat, delay, mode], by_key[repeat, delay, "concurrent"])
            found.append({"repeat": repeat, "delay_ms": delay, "equal": first is None,
                          "first_step_that_differs": first})  # fmt: skip
    return found


def _difference(some: Ranks, others: Ranks) -> int | None:
    """The first step, from 1, whose loss differs on any rank."""
    by_place = {(line["rack"], line["rank"]): line["losses"] for line in others}
    steps = [
        step
        for line in some
        for step, (a, b) in enumerate(
            zip(line["losses"], by_place[line["rack"], line["rank"]], strict=True), start=1
        )
        if a != b
    ]
    return min(steps, default=None)


def _repeatable(cells: Sequence[Ranks]) -> dict[str, bool]:
    """Return by mode whether its losses are the same in every repeat."""
    first: dict[tuple[str, int], Ranks] = {}
    same: dict[str, bool] = {}
    for ranks in cells:
        line = ranks[0]
        if line["repeat"] >= 0:
            before = first.setdefault((line["mode"], line["delay_ms"]), ranks)
            same[line["mode"]] = same.get(line["mode"], True) and not _difference(before, ranks)
    return same


# ---------------------------------------------------------------------- text


def _delay(row: Line) -> int:
    return int(row["delay_ms"])


def markdown(found: Line) -> str:
    """The table as in docs/internals/benchmarks.md."""
    alone = found["exchange_ms"]
    head = (
        f"{found['device']}, {found['racks']} racks x {found['ranks']}, "
        f"{found['weights'] / 1e9:.2f} B weights, torch {found['machine']['torch']}, "
        f"attention {found['attention']}, "
        f"{f'exchange alone {alone} ms, ' if alone is not None else ''}"
        f"{found['cells']} cells ({', '.join(found['ended'])})"
    )
    lines = [
        head,
        "",
        "| mode | delay ms | tau | tau * t_step ms | covered | tokens/s | by steps | by repeats "
        "| of none | stall ms | GB sent | more GPU GB | more host GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_line(row) for row in found["rows"]),
        "",
    ]
    for bits in found["bits"]:
        verdict = (
            "equal" if bits["equal"] else f"differ from step {bits['first_step_that_differs']} on"
        )
        lines.append(
            f"repeat {bits['repeat']}, delay {bits['delay_ms']} ms: losses of blocking and "
            f"concurrent {verdict}"
        )
    lines.append(f"the same losses in every repeat: {found['repeatable']}")
    return "\n".join(lines)


def _line(row: Line) -> str:
    more, ratio = row["more_bytes_than_none"], row["of_none"]
    covered = {True: "yes", False: "**no**", None: ""}[row["covered"]]
    own = row["mode"] != "none"
    cells = [
        row["mode"],
        f"{row['delay_ms']}" if own else "",
        f"{row['tau']}" if own else "",
        f"{row['tau_t_step_ms']:.0f}" if own else f"t_step {row['t_step_ms']:.1f}",
        covered,
        f"{row['tokens_per_s']:.0f}",
        _interval(row["interval_steps"], 0),
        _interval(row["interval_repeats"], 0),
        f"{ratio['median']:.3f} {ratio['by_repeat']}" if ratio and own else "",
        ", ".join(f"{ms:.0f}" for ms in row["stall_ms"]) if own else "",
        f"{statistics.mean(row['bytes_sent']) / 1e9:.2f}" if own else "",
        _gigabytes(more.get("gpu_allocated_bytes")) if own else "",
        _gigabytes(more.get("host_bytes_peak")) if own else "",
    ]
    return f"| {' | '.join(cells)} |"


def _interval(ends: Sequence[float] | None, digits: int) -> str:
    return f"{ends[0]:.{digits}f}..{ends[1]:.{digits}f}" if ends else ""


def _gigabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e9:.2f}"


if __name__ == "__main__":
    main()
