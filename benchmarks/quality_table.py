"""benchmarks.quality_table: runs of the quality harness as statistics, one table, two plots."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.quality_arms import ARMS, CORE
from mend.errors import UsageError

LIMIT_PCT = 0.5
"""mend may be this much worse than synchronous DiLoCo."""
BASE = "diloco"
CLAIMED = ("mend-concurrent", "mend-default")

# Two-sided 95 % quantiles of Student's t by degrees of freedom (any statistics table).
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)

COLOURS = {
    "alone": "#9a9a9a",
    "data-parallel": "#222222",
    "diloco": "#1f77b4",
    "diloco-textbook": "#1f77b4",
    "diloco-long": "#1f77b4",
    "mend-blocking": "#2ca02c",
    "mend-concurrent": "#d62728",
    "mend-default": "#9467bd",
}
OTHERS = "#e6852c"

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean of n values and its 95 % t-interval; of one value there is none (low = high = NaN)."""

    mean: float
    low: float
    high: float
    n: int


def t_interval(values: Sequence[float]) -> Interval:
    """Return mean and interval. Raises UsageError beyond the table of quantiles."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return Interval(mean, math.nan, math.nan, n)
    if n - 2 >= len(T_95):
        raise UsageError(f"{n} seeds, but t quantiles are given for at most {len(T_95) + 1}")
    half = T_95[n - 2] * statistics.stdev(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def paired_pct(losses: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    """Per seed that both have, ascending: by how many percent the loss is above the base's."""
    return [100 * (losses[seed] / base[seed] - 1) for seed in sorted(losses.keys() & base.keys())]


def verdict(pct: Interval, limit_pct: float = LIMIT_PCT) -> str:
    """Say whether `worse by at most limit_pct` holds, and how well that is known."""
    if pct.mean > limit_pct:
        return "missed"
    if math.isnan(pct.high):
        return "within (one seed: no interval)"
    return "met" if pct.high <= limit_pct else "mean within, the interval is not"


def newest(rows: Sequence[Row]) -> dict[tuple[int, str], dict[int, Row]]:
    """(racks, arm) -> seed -> its row; of two rows of one cell the later one."""
    found: dict[tuple[int, str], dict[int, Row]] = {}
    for row in rows:
        found.setdefault((row["racks"], row["arm"]), {})[row["seed"]] = row
    return found


def summarize(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry per racks and arm, in the order of ARMS. Raises UsageError without rows."""
    if not rows:
        raise UsageError("there are no runs yet; start without --table to make them")
    cells = newest(rows)
    summary = []
    for racks in sorted({racks for racks, _ in cells}):
        losses = {
            arm: {seed: row["loss"] for seed, row in cells[racks, arm].items()}
            for arm in ARMS
            if (racks, arm) in cells
        }
        for arm, by_seed in losses.items():
            entry: dict[str, Any] = {
                "racks": racks,
                "arm": arm,
                "losses": {str(seed): loss for seed, loss in sorted(by_seed.items())},
                "loss": asdict(t_interval(list(by_seed.values()))),
                "range": [min(by_seed.values()), max(by_seed.values())],
                "tokens": next(iter(cells[racks, arm].values()))["tokens"],
            }
            for base in (BASE, "data-parallel"):
                above = paired_pct(by_seed, losses.get(base, {}))
                if arm != base and above:
                    entry[f"above_{base}_pct"] = asdict(t_interval(above))
            summary.append(entry)
    return summary


def curves(rows: Sequence[Row], racks: int, arm: str) -> list[tuple[int, float, float, float]]:
    """(tokens of a rack, mean, least, greatest over seeds) per look."""
    seeds = newest(rows).get((racks, arm), {}).values()
    looks = zip(*(row["curve"] for row in seeds), strict=True)
    return [
        (look[0][0], statistics.fmean(each[1] for each in look),
         min(each[1] for each in look), max(each[1] for each in look))
        for look in looks
    ]  # fmt: skip


# ------------------------------------------------------------------ table


def signed(pct: Mapping[str, Any] | None) -> str:
    """`+0.31 [-0.10, +0.72]`"""
    if pct is None:
        return "-"
    if math.isnan(pct["low"]):
        return f"{pct['mean']:+.2f}"
    return f"{pct['mean']:+.2f} [{pct['low']:+.2f}, {pct['high']:+.2f}]"


def table(summary: Sequence[Mapping[str, Any]], racks: int) -> list[str]:
    """Markdown lines."""
    lines = [
        f"| {racks} racks | seeds | held-out loss | least, greatest | above diloco, % | "
        "above data-parallel, % | |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in summary:
        if entry["racks"] != racks:
            continue
        least, greatest = entry["range"]
        lines.append(
            f"| `{entry['arm']}` | {entry['loss']['n']} | **{entry['loss']['mean']:.4f}** | "
            f"{least:.4f}, {greatest:.4f} | {signed(entry.get(f'above_{BASE}_pct'))} | "
            f"{signed(entry.get('above_data-parallel_pct'))} | {ARMS[entry['arm']].says} |"
        )
    return lines


def verdicts(summary: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per number of racks: is the claimed arm within the limit of the base?"""
    lines = []
    for entry in summary:
        pct = entry.get(f"above_{BASE}_pct")
        if entry["arm"] in CLAIMED and pct is not None:
            lines.append(
                f"- {entry['racks']} racks: `{entry['arm']}` is {signed(pct)} % above `{BASE}` "
                f"({pct['n']} seeds); at most {LIMIT_PCT} %: **{verdict(Interval(**pct))}**"
            )
    return lines or [f"- no run of both `{CLAIMED[0]}` and `{BASE}` yet"]


def markdown(rows: Sequence[Row], command: str, machine: Mapping[str, object]) -> str:
    """The page of results."""
    summary, plan = summarize(rows), rows[0]["plan"]
    size, count = plan["size"], sorted({row["racks"] for row in rows})
    texts = {row["racks"]: row["text_sha256"][:16] for row in rows}
    held_out = plan["eval_batches"] * size["batch"] * size["context"]
    versions = ", ".join(f"{key} {machine[key]}" for key in ("python", "torch", "system"))
    head = [
        "# Quality",
        "",
        "Written by `python -m benchmarks.quality --table`; how to read it: "
        "docs/internals/quality.md.",
        "",
        "```",
        command,
        "```",
        "",
        f"Byte GPT of {plan_parameters(plan):,} parameters (width {size['width']}, "
        f"{size['layers']} layers, context {size['context']}), {size['batch']} x "
        f"{size['context']} bytes per rack and step, {plan['steps']} steps, H "
        f"{plan['period_steps']}, peak learning rate {plan['learning_rate']}. Held-out loss in "
        f"nats per byte over {held_out:,} bytes that are the same in every run.",
        f"{versions}. Text (sha256, by racks): "
        + ", ".join(f"{racks}: `{texts[racks]}`" for racks in sorted(texts))
        + ".",
        "",
        "`above`: paired by seed, mean and 95 % t-interval over the seeds, in percent of the loss; "
        "negative is better.",
        "",
    ]
    tables = [line for racks in count for line in (*table(summary, racks), "")]
    return "\n".join(
        [*head, *tables, "## Verdict", *verdicts(summary), "", "![losses](quality.svg)", ""]
    )


def plan_parameters(plan: Mapping[str, Any]) -> int:
    """Parameters of the plan's model."""
    from mend.tools.demo_model import ByteGPT, Size

    return sum(parameter.numel() for parameter in ByteGPT(Size(**plan["size"])).parameters())


# ------------------------------------------------------------------ plots


def figure(rows: Sequence[Row]) -> Any:
    """Above: losses by tokens. Below: how far each arm ends from diloco, seed by seed.

    Raises UsageError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("plots need matplotlib: pip install matplotlib") from error
    summary, counts = summarize(rows), sorted({row["racks"] for row in rows})
    whole = Figure(figsize=(5.6 * len(counts), 8.2), layout="constrained")
    axes = whole.subplots(2, len(counts), squeeze=False)
    for column, racks in enumerate(counts):
        draw_curves(axes[0][column], rows, racks)
        draw_distances(axes[1][column], [entry for entry in summary if entry["racks"] == racks])
    return whole


def draw_curves(axis: Any, rows: Sequence[Row], racks: int) -> None:
    """Only the arms of the claim, and without the first look, which would flatten the rest."""
    for arm in CORE:
        if looks := curves(rows, racks, arm)[1:]:
            tokens = [look[0] / 1e3 for look in looks]
            axis.plot(tokens, [look[1] for look in looks], ".-", color=COLOURS[arm], label=arm)
            axis.fill_between(
                tokens, [look[2] for look in looks], [look[3] for look in looks],
                color=COLOURS[arm], alpha=0.12, linewidth=0,
            )  # fmt: skip
    axis.set(
        title=f"{racks} racks", xlabel="tokens of each rack, thousands",
        ylabel="held-out loss of the merged model, nats per byte",
    )  # fmt: skip
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)


def draw_distances(axis: Any, summary: Sequence[Mapping[str, Any]]) -> None:
    """A dot per seed, the 95 % interval of the mean as a line. Data parallel is far off to the
    left and would squeeze the rest."""
    shown = [
        entry
        for entry in summary
        if f"above_{BASE}_pct" in entry and entry["arm"] != "data-parallel"
    ]
    names = [entry["arm"] for entry in shown]
    base = {int(s): v for e in summary if e["arm"] == BASE for s, v in e["losses"].items()}
    for place, entry in enumerate(shown):
        pct, colour = entry[f"above_{BASE}_pct"], COLOURS.get(entry["arm"], OTHERS)
        seeds = paired_pct({int(s): v for s, v in entry["losses"].items()}, base)
        axis.plot(seeds, [place] * len(seeds), "o", color=colour, alpha=0.45, markersize=5)
        if not math.isnan(pct["low"]):
            axis.plot([pct["low"], pct["high"]], [place + 0.22] * 2, color=colour, linewidth=2)
        axis.plot([pct["mean"]], [place + 0.22], "|", color=colour, markersize=12)
    axis.axvline(0, color="#1f77b4", linewidth=1)
    axis.axvline(LIMIT_PCT, color="#d62728", linewidth=1, linestyle="--")
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel(f"above {BASE} at the end, % (dashed: +{LIMIT_PCT} %)")
    axis.grid(alpha=0.3, axis="x")


def write(
    rows: Sequence[Row], into: Path, command: str, machine: Mapping[str, object]
) -> list[Path]:
    """quality.json, .md, .svg and .png in `into`; gives their paths."""
    summary = summarize(rows)
    paths = [into / f"quality.{ending}" for ending in ("json", "md", "svg", "png")]
    report = {
        "name": "quality", "command": command, "machine": machine, "plan": rows[0]["plan"],
        "limit_pct": LIMIT_PCT, "verdict": verdicts(summary), "summary": summary,
    }  # fmt: skip
    # NaN is no JSON: an interval that does not exist is null.
    paths[0].write_text(json.dumps(nulls(report), indent=1, allow_nan=False) + "\n")
    paths[1].write_text(markdown(rows, command, machine))
    drawing = figure(rows)
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "quality"}):
        drawing.savefig(paths[2], metadata={"Date": None})
    drawing.savefig(paths[3], dpi=110)
    return paths


def nulls(value: Any) -> Any:
    """Replace numbers that are not finite by None in nested dicts and lists."""
    if isinstance(value, dict):
        return {key: nulls(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [nulls(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
