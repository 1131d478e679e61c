"""A sweep as two rows of plots, one column per distribution. Writes PNG and SVG.

The same figures give the same SVG, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.delay_sweep.plan import BLOCKING, CONCURRENT, NONE, Sweep
from benchmarks.delay_sweep.rows import Estimate, Row
from mend.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("delay_sweep.png", "delay_sweep.svg")
COLOURS = {NONE: "#6b7280", BLOCKING: "#c2410c", CONCURRENT: "#1d4ed8"}
MARKERS = {NONE: "", BLOCKING: "s", CONCURRENT: "o"}
SETTINGS: Any = {"svg.hashsalt": "mend", "svg.fonttype": "none", "font.size": 9.0}
"""Any: how matplotlib types the names of its settings changes with its versions."""
COLUMN_INCHES, HEIGHT_INCHES, DPI = 4.0, 6.2, 150


def write_plots(out: Path, sweep: Sweep, rows: Sequence[Row]) -> list[Path]:
    """Both files; returns their paths. Raises UsageError without matplotlib."""
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_svg import FigureCanvasSVG
    except ImportError as error:
        raise UsageError("plots need matplotlib: pip install matplotlib") from error
    with mpl.rc_context(SETTINGS):
        figure = _figure(sweep, rows)
        paths = [out / name for name in NAMES]
        FigureCanvasAgg(figure).print_figure(paths[0], dpi=DPI, metadata={"Software": None})
        FigureCanvasSVG(figure).print_figure(paths[1], metadata={"Date": None})
    return paths


def _figure(sweep: Sweep, rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    shown = [
        kind for kind in sweep.distributions if any(row.place.distribution == kind for row in rows)
    ]
    kinds = shown or ["constant"]
    figure = Figure(figsize=(COLUMN_INCHES * len(kinds) + 0.4, HEIGHT_INCHES), layout="constrained")
    axes = figure.subplots(2, len(kinds), squeeze=False, sharex=True, sharey="row")
    for column, kind in enumerate(kinds):
        here = [row for row in rows if row.place.distribution == kind or not row.place.delay_ms]
        here.sort(key=lambda row: row.place.delay_ms)
        above, below = axes[0][column], axes[1][column]
        above.set_title(f"{kind} delay", loc="left")
        _throughput(above, here)
        _stall(below, here)
        for axis in (above, below):
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        below.set_xlabel("mean delay of a transfer, ms")
    axes[0][0].set_ylabel("throughput / without exchange")
    axes[1][0].set_ylabel("stall per round, ms")
    named = axes[1][0].get_legend_handles_labels()
    figure.legend(*named, loc="outside lower center", ncols=2, frameon=False)
    job = f"{sweep.racks} racks x {sweep.nproc_per_rack}, H={sweep.period_steps}"
    figure.suptitle(f"{job}, P={sweep.fragments}", fontsize=9)
    return figure


def _throughput(axis: Any, rows: Sequence[Row]) -> None:
    axis.axhline(1.0, color=COLOURS[NONE], linewidth=1)
    for mode in (BLOCKING, CONCURRENT):
        own_rows = [row for row in rows if row.mode == mode]
        _line(axis, own_rows, mode, [row.share_predicted for row in own_rows])
        _points(axis, own_rows, mode, [row.share for row in own_rows])
    axis.set_ylim(bottom=0)


def _stall(axis: Any, rows: Sequence[Row]) -> None:
    for mode in (BLOCKING, CONCURRENT):
        own_rows = [row for row in rows if row.mode == mode]
        _line(axis, own_rows, mode, [row.stall_ms_predicted for row in own_rows])
        _points(axis, own_rows, mode, [row.stall_ms for row in own_rows])
    hidden = {row.place.delay_ms: row.hidden_ms for row in rows if row.mode == CONCURRENT}
    axis.plot(
        list(hidden), list(hidden.values()), color="#111827", linestyle=":", linewidth=1.2,
        label="tau x step, what overlap hides",
    )  # fmt: skip
    axis.set_ylim(bottom=0)


def _line(axis: Any, rows: Sequence[Row], mode: str, values: Sequence[float]) -> None:
    delays = [row.place.delay_ms for row in rows]
    label = f"{mode}: analytic line"
    axis.plot(delays, values, color=COLOURS[mode], linewidth=1, alpha=0.7, label=label)


def _points(axis: Any, rows: Sequence[Row], mode: str, found: Sequence[Estimate]) -> None:
    """Means, with their intervals where there are any."""
    delays = [row.place.delay_ms for row in rows]
    means = [one.mean for one in found]
    low = [one.mean - (one.mean if one.low is None else one.low) for one in found]
    high = [(one.mean if one.high is None else one.high) - one.mean for one in found]
    axis.errorbar(
        delays, means, yerr=[low, high], color=COLOURS[mode], marker=MARKERS[mode],
        markersize=4.5, linestyle="none", capsize=3, clip_on=False, label=f"{mode}: measured",
    )  # fmt: skip
