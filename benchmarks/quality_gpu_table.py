"""benchmarks.quality_gpu_table: runs of the batched quality bench as tables.

    python -m benchmarks.quality_gpu_table benchmarks/results/quality_gpu/*.json --out PAGE.md

Runs with one plan and one text are one table, also when their arms were run apart. `above lr 1`:
100 (loss / loss - 1) against `merge` with the same H (outer lr 1, no momentum, tau 0), paired by
seed: mean and 95 % t-interval over the seeds; `above dp` the same against data parallel, and `above
no codec` against the same arm with offers in fp32. `bits`: of an offer, per parameter; of powersgd
the mean of both sides. `mean of k`: loss of the mean of the closed model and the last anchors, k in
all, and its distance to the same of data parallel. Negative is better. Two seeds make wide
intervals: the t quantile is 12.7, of three 4.3.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmarks._common import parser_of
from benchmarks.quality_gpu_model import SIZES, Size, leaves_of
from benchmarks.quality_gpu_outer import Arm, parse_arm
from benchmarks.quality_table import Interval, paired_pct, signed, t_interval
from mend.codec import codec_named, fragment_codec
from mend.codec.powersgd import PowerSGD
from mend.config.settings import CODEC
from mend.types import Owned, Span

Report = Mapping[str, Any]
Losses = dict[str, dict[int, float]]
"""Arm -> seed -> loss at the end."""


def main() -> None:
    parser = parser_of("quality_gpu_table", __doc__ or "")
    parser.add_argument("runs", type=Path, nargs="+", help="the JSON of quality_gpu --out")
    parser.add_argument("--out", type=Path, help="write the page there, too")
    options = parser.parse_args()
    text = page([json.loads(path.read_text()) for path in options.runs])
    if options.out:
        options.out.write_text(text)
    print(text)


def group_runs(reports: Sequence[Report]) -> dict[str, list[Report]]:
    """Reports that compare, by what they have in common."""
    found: dict[str, list[Report]] = {}
    for report in reports:
        key = json.dumps([report["plan"], report["text"]["sha256"]], sort_keys=True)
        found.setdefault(key, []).append(report)
    return found


def losses_of(reports: Sequence[Report]) -> Losses:
    """A loss that was no number is infinite: that arm diverged."""
    return {
        name: {seed: math.inf if v is None else v for seed, v in enumerate(looks[-1])}
        for report in reports
        for name, looks in report["losses"].items()
    }


def above(losses: Losses, name: str, base: str | None) -> Interval | None:
    """Percent, paired by seed; None where there is nothing to compare with."""
    if base is None or base == name:
        return None
    pct = paired_pct(losses[name], losses[base])
    return t_interval(pct) if pct and all(map(math.isfinite, pct)) else None


def base_of(losses: Losses, arm: Arm) -> str | None:
    """The base of an arm: every rack in every round, lr 1, no momentum, tau 0, the same H."""
    plain = Arm(kind="merge", period=arm.period)
    return next((name for name in losses if parse_arm(name) == plain), None)


def _without_codec(losses: Losses, name: str) -> str | None:
    plain = replace(parse_arm(name), codec="none", feedback="buffer")
    return next((other for other in losses if parse_arm(other) == plain), None)


def _at_equal_speeds(losses: Losses, name: str, racks: int) -> str | None:
    """Return the arm whose racks make the same share of the steps each, and as many in all. How
    offers are weighed makes no difference there."""
    arm = parse_arm(name)
    mean = sum(map(arm.speed, range(racks)), Fraction(0)) / racks
    if arm.speed(0) == mean:
        return None
    for other in losses:
        there = parse_arm(other)
        in_step = replace(arm, speeds=there.speeds, weight="tokens", divisor="named")
        if len(set(there.speeds)) == 1 and there == in_step and abs(there.speed(0) - mean) < 0.001:
            return other
    return None


def bits_of(codec: str, size: Size) -> float:
    """Bits per parameter of mend's own payloads, for all fragments of a model."""
    leaves, sent = leaves_of(size), 0.0
    for number in range(size.fragments):
        slots = [slot for leaf in leaves if leaf.fragment == number for slot in leaf.slots]
        numel = sum(slot.numel for slot in slots)
        spans = tuple(Span(0, slot.numel) for slot in slots)
        owned = Owned(spans, numel, tuple(slot.shape for slot in slots))
        found = codec_named("float32" if codec == "none" else CODEC.accept(codec))
        if isinstance(found, PowerSGD):
            sent += 8 * statistics.fmean(found.of(owned, 1).size(side) for side in (0, 1))
        else:
            sent += 8 * fragment_codec(found, owned, 1).payload_bytes
    return sent / sum(leaf.numel for leaf in leaves)


def _by_seed(report: Report, count: int) -> Losses:
    """Losses of the mean of that many models at the end."""
    rows = report.get("averaged", {}).get(str(count), {})
    return {
        name: {seed: math.inf if v is None else v for seed, v in enumerate(found)}
        for name, found in rows.items()
    }


def _averaged(losses: Losses, name: str) -> str:
    if name not in losses:
        return "-"
    mean = statistics.fmean(losses[name].values())
    pct = above(losses, name, "dp" if "dp" in losses else None)
    return f"{mean:.4f}" + (f", {show_pct(pct)}" if pct else "")


def show_pct(pct: Interval | None) -> str:
    return signed(None if pct is None else asdict(pct))


def table(reports: Sequence[Report]) -> list[str]:
    """One corner as Markdown lines."""
    plan, losses = reports[0]["plan"], losses_of(reports)
    start = f"warm {plan['warm']} + {plan['steps'] - plan['warm']}" if plan["warm"] else "scratch"
    columns: dict[str, Callable[[str], str]] = {}
    if any(len(parse_arm(name).speeds) > 1 for name in losses):
        columns["above equal speeds, %"] = lambda name: show_pct(
            above(losses, name, _at_equal_speeds(losses, name, plan["racks"]))
        )
    if any(parse_arm(name).codec != "none" for name in losses):
        columns["bits"] = lambda name: f"{bits_of(parse_arm(name).codec, SIZES[plan['size']]):.2f}"
        columns["above no codec, %"] = lambda name: show_pct(
            above(losses, name, _without_codec(losses, name))
        )
    for count in sorted({int(each) for r in reports for each in r.get("averaged", {})}):
        columns[f"mean of {count}, above dp's, %"] = functools.partial(
            _averaged, {k: v for r in reports for k, v in _by_seed(r, count).items()}
        )
    lines = [
        f"## {plan['size']}, {plan['racks']} racks, {start}, {plan['steps']} steps, {_inner(plan)}",
        "",
        "| "
        + " | ".join(["arm", "seeds", "loss", "above lr 1, %", "above dp, %", *columns])
        + " |",
        "|---|---|---|---|---|" + "---|" * len(columns),
    ]
    for name, by_seed in sorted(losses.items(), key=lambda each: _order(each[0])):
        mean = statistics.fmean(by_seed.values())
        plain = show_pct(above(losses, name, base_of(losses, parse_arm(name))))
        parallel = show_pct(above(losses, name, "dp" if "dp" in losses else None))
        exchanges = parse_arm(name).exchanges
        more = [
            cell(name) if exchanges or head.startswith("mean of") else "-"
            for head, cell in columns.items()
        ]
        cells = [f"`{name}`", str(len(by_seed)), f"{mean:.4f}", plain, parallel, *more]
        lines.append("| " + " | ".join(cells) + " |")
    machines = {f"{r['machine']['device']}, torch {r['machine']['torch']}" for r in reports}
    size = [round(part / 1e6, 1) for part in reports[0]["text"]["bytes"]]
    return [
        *lines,
        "",
        f"{', '.join(sorted(machines))}; text "
        f"`{reports[0]['text']['sha256'][:16]}`: MB by rack {size[:-1]}, held out {size[-1]}.",
        "",
        "```",
        *(report["command"] for report in reports),
        "```",
        "",
    ]


def _order(name: str) -> tuple[Any, ...]:
    arm = parse_arm(name)
    return (arm.exchanges, arm.period, arm.kind, arm.overlap, arm.momentum, arm.ramp, name)


def _inner(plan: Mapping[str, Any]) -> str:
    """The inner optimizer and its peak rate."""
    name = {"adamw": "AdamW", "muon": "Muon"}[plan.get("inner", "adamw")]
    return f"{name} {plan['learning_rate']}"


def _place(plan: Mapping[str, Any]) -> tuple[Any, ...]:
    """Small models first; of one size few racks first, from scratch before warm, AdamW first."""
    size = list(SIZES).index(plan["size"])
    return (size, plan["racks"], plan["warm"], plan["steps"], _inner(plan))


def page(reports: Sequence[Report]) -> str:
    head = [
        "# Quality on a GPU",
        "",
        "Written by `python -m benchmarks.quality_gpu_table`; how to read it: "
        "docs/internals/quality.md, arms: `python -m benchmarks.quality_gpu --help`.",
        "",
    ]
    corners = sorted(group_runs(reports).values(), key=lambda group: _place(group[0]["plan"]))
    tables = [line for group in corners for line in table(group)]
    return "\n".join([*head, *tables])


if __name__ == "__main__":
    main()
