"""The curves and bars of a report, drawn on matplotlib's axes. The numbers are those of `facts` and
`rounds`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mend.events import kinds
from mend.tools.report.curve import Curve, Point
from mend.tools.report.facts import RankFacts, RunFacts
from mend.tools.report.rounds import PHASES, Bar, Rounds
from mend.types import SECOND

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RACKS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B4C00", "#000000")
"""One colour per rack, then again with dashes. Okabe and Ito's, which colour-blind people tell
apart."""
DARK, MIDDLE, LIGHT = "#1d2733", "#6b7785", "#e3e8ee"
GRID_POINTS_MAX = 150
POINTS_DRAWN = 1600
"""Most points of all faint curves of one panel together."""
SMOOTH_BINS = 40
LOG_RANGE = 20
"""Least ratio of most to least at which positive values get a logarithmic axis."""
REASONS_SHOWN = 7
MARKED = (
    kinds.RackSilent,
    kinds.RackBack,
    kinds.CoordinatorChosen,
    kinds.RackJoined,
    kinds.LineageBegun,
    kinds.RackExpelled,
    kinds.SeatLost,
)
MARKS_MAX = 12

PHASE_COLOURS = {
    "capture": "#56B4E9",
    "encode": "#0072B2",
    "exchange": "#E69F00",
    "grace": "#9aa5b1",
    "merge": "#CC79A7",
    "ready": "#b7ddcc",
    "apply": "#009E73",
}
BAR_HEIGHTS = {"grace": (0.30, 0.14), "ready": (-0.07, 0.14)}
"""Phase -> (where its bar begins below the middle of the lane, its height); others: BAR_FULL."""
BAR_FULL = (-0.27, 0.54)
LANES_MAX = 48
BAR_WIDTH_LEAST = 0.0016
"""Least share of the whole width; shorter phases are drawn so wide, or nobody would see them."""
DRAWN_IN_ORDER = ("grace", "ready", "exchange", "encode", "capture", "merge", "apply")
"""Phases in the order of drawing."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Panel:
    """One picture. `empty`: why there is nothing to draw."""

    name: str
    title: str
    caption: str
    draw: Callable[[Axes], None]
    wide: bool = False
    height_in: float = 2.75
    empty: str = ""


def colour(rack: int) -> str:
    return RACKS[rack % len(RACKS)]


def line_of(rack: int) -> str:
    return ("-", "--", ":", "-.")[rack // len(RACKS) % 4]


def plain_axes(axes: Axes, x: str, y: str) -> None:
    """Draw what all panels share."""
    axes.set_xlabel(x, color=MIDDLE)
    axes.set_ylabel(y, color=MIDDLE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8c2cc")
    axes.tick_params(colors=MIDDLE, length=3)
    axes.grid(visible=True, color=LIGHT, linewidth=0.7)
    axes.set_axisbelow(True)


def scaled(values: Floats | Sequence[float]) -> tuple[float, str]:
    """(divisor, prefix) so that the largest has few digits."""
    most = max((abs(float(v)) for v in values if np.isfinite(v)), default=0.0)
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if most >= size:
            return size, prefix
    return 1.0, ""


def time_scale(seconds: float) -> tuple[float, str]:
    """(seconds of a unit, its name) for an axis of that length."""
    for unit_s, name in ((3600.0, "h"), (60.0, "min")):
        if seconds > 5 * unit_s:
            return unit_s, name
    return 1.0, "s"


def time_of(facts: RunFacts) -> tuple[float, str]:
    return time_scale((facts.end_ns - facts.begin_ns) / SECOND)


# ------------------------------------------------------------------ recorded values


def recorded_panels(facts: RunFacts) -> list[Panel]:
    """Loss against tokens and time, and what else was recorded, against tokens."""
    names = sorted({name for each in facts.ranks.values() for name in each.curves})
    loss = "loss" if "loss" in names else None
    hint = (
        "No loss was recorded. Call runtime.record(loss=loss.item()) after optimizer.step(), "
        "as often as you like."
    )
    empty = "" if loss else hint
    panels = [
        Panel(
            "loss-tokens",
            "Loss against tokens",
            _recorded_caption(facts, "loss", "tokens that the rack trained on"),
            lambda axes: _recorded(axes, facts, "loss", by_time=False),
            empty=empty,
        ),
        Panel(
            "loss-time",
            "Loss against time",
            _recorded_caption(facts, "loss", "time since the first step"),
            lambda axes: _recorded(axes, facts, "loss", by_time=True),
            empty=empty,
        ),
    ]
    for number, name in enumerate([each for each in names if each != "loss"][:4]):

        def draw(axes: Axes, name: str = name) -> None:
            _recorded(axes, facts, name, by_time=False)

        caption = _recorded_caption(facts, name, "tokens that the rack trained on")
        panels.append(Panel(f"recorded-{number}", f"{name} against tokens", caption, draw))
    return panels


def _recorded_caption(facts: RunFacts, name: str, x: str) -> str:
    curves = [each.curves[name] for each in facts.ranks.values() if name in each.curves]
    width = max((curve.width for curve in curves), default=1)
    said = f"Each rack's own batches, over {x}. Faint: as recorded"
    said += f", {width} values averaged per point" if width > 1 else ""
    odd = sum(curve.odd for curve in curves)
    more = f" {odd} values are NaN or infinite and are not drawn." if odd else ""
    return said + "; bold: mean over the rack's ranks and over neighbours." + more


def _recorded(axes: Axes, facts: RunFacts, name: str, *, by_time: bool) -> None:
    drawn = [rack for rack in facts.racks if any(name in r.curves for r in facts.of_rack(rack))]
    many = sum(name in each.curves for each in facts.ranks.values())
    scale, unit = time_of(facts) if by_time else _token_scale(facts)
    smooth = np.empty(0)
    for rack in drawn:
        ranks = facts.of_rack(rack)
        curves = [each.curves[name] for each in ranks if name in each.curves]
        columns = [_column(curve, facts, len(ranks), by_time=by_time) for curve in curves]
        for x, y in columns:
            stride = max(1, len(x) * many // POINTS_DRAWN)
            axes.plot(x[::stride] / scale, y[::stride], color=colour(rack), alpha=0.22, lw=0.7)
        x, y = _smooth(
            np.concatenate([x for x, _ in columns]), np.concatenate([y for _, y in columns])
        )
        smooth = np.concatenate([smooth, y])
        marker = "o" if len(x) < 12 else None
        axes.plot(
            x / scale, y, line_of(rack), color=colour(rack), lw=1.8, marker=marker, ms=3.5,
            label=f"rack {rack}",
        )  # fmt: skip
    plain_axes(
        axes, f"{'time' if by_time else 'tokens per rack'} ({unit})".replace(" ()", ""), name
    )
    smooth = smooth[np.isfinite(smooth)]
    if len(smooth) and smooth.min() > 0 and smooth.max() > LOG_RANGE * smooth.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    if drawn:
        axes.legend(frameon=False, ncols=min(4, len(drawn)), loc="best")


def _token_scale(facts: RunFacts) -> tuple[float, str]:
    tokens = [sum(_newest(r).tokens for r in facts.of_rack(rack)) for rack in facts.racks]
    return scaled(tokens)


def _column(curve: Curve, facts: RunFacts, ranks: int, *, by_time: bool) -> tuple[Floats, Floats]:
    y = np.array(curve.values, dtype=np.float64)
    if by_time:
        return (np.array(curve.at_ns) - facts.begin_ns) / SECOND, y
    return np.array(curve.tokens, dtype=np.float64) * ranks, y


def _smooth(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Means over equal stretches of x, NaN where there is nothing; per x where they are few."""
    fine = np.isfinite(x) & np.isfinite(y)
    order = np.argsort(x[fine], kind="stable")
    x, y = x[fine][order], y[fine][order]
    bins = min(SMOOTH_BINS, len(np.unique(x)) // 4)
    if bins < 8:
        own, place = np.unique(x, return_inverse=True)
        return own, np.bincount(place, weights=y) / np.bincount(place) if len(own) else y
    edges = np.linspace(x[0], x[-1], bins + 1)
    place = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    count = np.where(count > 0, count, np.nan)  # a rack that was away leaves a gap
    sum_x = np.bincount(place, weights=x, minlength=bins)
    return sum_x / count, np.bincount(place, weights=y, minlength=bins) / count


# ------------------------------------------------------------------ progress


def _newest(rank: RankFacts) -> Point:
    return rank.track.newest or Point(0, 0, 0, 0.0, 0, 0)


def rate_of(facts: RunFacts, rack: int, value: Callable[[Point], float]) -> tuple[Floats, Floats]:
    """(seconds, growth per second), summed over the rack's ranks, on a grid of equal stretches."""
    tracks = [points for each in facts.of_rack(rack) if len(points := each.track.points()) > 1]
    if not tracks:
        return np.empty(0), np.empty(0)
    first_ns = max(points[0].at_ns for points in tracks)
    last_ns = min(points[-1].at_ns for points in tracks)
    seconds = (last_ns - first_ns) / SECOND
    if seconds <= 0:
        return np.empty(0), np.empty(0)
    many = int(np.clip(seconds / 2, 2, GRID_POINTS_MAX))
    grid = np.linspace(0.0, seconds, many + 1)
    total = np.zeros(many + 1)
    for points in tracks:
        at_s = np.array([(p.at_ns - first_ns) / SECOND for p in points])
        counted = np.array([value(p) - value(points[0]) for p in points], dtype=np.float64)
        total += np.interp(grid, at_s, counted)
    offset_s = (first_ns - facts.begin_ns) / SECOND
    return offset_s + (grid[:-1] + grid[1:]) / 2, np.diff(total) / np.diff(grid)


def progress_panels(facts: RunFacts) -> list[Panel]:
    points = sum(len(each.track.points()) > 1 for each in facts.ranks.values())
    empty = (
        "" if points else "There are no two progress events: the run ended within its first second."
    )
    marks = " Grey lines: racks that fell silent, came back or took over." if _marks(facts) else ""
    return [
        Panel(
            "throughput",
            "Throughput",
            "Tokens per second of each rack, all its ranks." + marks,
            lambda axes: _throughput(axes, facts),
            empty=empty,
        ),
        Panel(
            "stall",
            "Stall",
            "Part of the time that training waited for rounds, mean over the rack's ranks.",
            lambda axes: _stall(axes, facts),
            empty=empty,
        ),
        Panel(
            "bytes",
            "Traffic",
            "Bytes per second on all connections of mend. Solid: sent; dotted: received.",
            lambda axes: _traffic(axes, facts),
            empty=empty,
        ),
    ]


def _marks(facts: RunFacts) -> list[float]:
    times = [each.time_ns for each in facts.faults if isinstance(each.event, MARKED)]
    return sorted({round((at_ns - facts.begin_ns) / SECOND, 1) for at_ns in times})[:MARKS_MAX]


def _throughput(axes: Axes, facts: RunFacts) -> None:
    rates = {rack: rate_of(facts, rack, lambda p: p.tokens) for rack in facts.racks}
    size, prefix = scaled([v for _, rate in rates.values() for v in rate])
    unit_s, unit = time_of(facts)
    for rack, (at_s, rate) in rates.items():
        x, y = at_s / unit_s, rate / size
        axes.plot(x, y, line_of(rack), color=colour(rack), lw=1.6, label=f"rack {rack}")
    for at in _marks(facts):
        axes.axvline(at / unit_s, color="#9aa5b1", lw=0.8, ls=(0, (4, 3)))
    plain_axes(axes, f"time ({unit})", f"{prefix} tokens/s".strip())
    axes.set_ylim(0, 1.12 * max(axes.dataLim.y1, 1e-9))
    axes.legend(frameon=False, ncols=min(4, len(rates)), loc="lower right")


def _stall(axes: Axes, facts: RunFacts) -> None:
    most, (unit_s, unit) = 1.0, time_of(facts)
    for rack in facts.racks:
        at_s, rate = rate_of(facts, rack, lambda p: p.stall_ms / 1000)
        share = 100 * np.clip(rate, 0, None) / max(1, len(facts.of_rack(rack)))
        x = at_s / unit_s
        axes.plot(x, share, line_of(rack), color=colour(rack), lw=1.6, label=f"rack {rack}")
        most = max(most, float(share.max(initial=0.0)))
    plain_axes(axes, f"time ({unit})", "% of the time")
    axes.set_ylim(0, min(105.0, 1.15 * most))
    axes.legend(frameon=False, ncols=min(4, max(1, len(facts.racks))), loc="best")


def _traffic(axes: Axes, facts: RunFacts) -> None:
    ways: tuple[tuple[str, Callable[[Point], float]], ...] = (
        ("-", lambda p: p.bytes_sent),
        (":", lambda p: p.bytes_received),
    )
    found = [(rack, ls, *rate_of(facts, rack, way)) for rack in facts.racks for ls, way in ways]
    size, prefix = scaled([v for *_, rate in found for v in rate])
    unit_s, unit = time_of(facts)
    for rack, style, at_s, rate in found:
        label = f"rack {rack}" if style == "-" else None
        axes.plot(at_s / unit_s, rate / size, style, color=colour(rack), lw=1.6, label=label)
    plain_axes(axes, f"time ({unit})", f"{prefix}B/s")
    axes.set_ylim(0, 1.12 * max(axes.dataLim.y1, 1e-9))
    axes.legend(frameon=False, ncols=min(4, max(1, len(facts.racks))), loc="best")


# ------------------------------------------------------------------ rounds


def reasons_panel(facts: RunFacts) -> Panel:
    return Panel(
        "reasons",
        "Why rounds closed",
        "all-in: every live rack was in, so many of the roster's. rest-in: the live racks that "
        "are not in had nothing to offer. grace-over: enough offers were in, and the grace window "
        "ended. expected-in: those of expected_racks were in. slow-left: all but slow racks "
        "that are not waited for. lockstep: all racks, always.",
        lambda axes: _reasons(axes, facts),
        empty="" if facts.rounds else "No round was decided.",
    )


def _reasons(axes: Axes, facts: RunFacts) -> None:
    common = facts.reasons.most_common(REASONS_SHOWN)
    rest = facts.rounds - sum(count for _, count in common)
    rows: list[tuple[str, int]] = [*common, *([("others", rest)] if rest else [])]
    names = [name if len(name) <= 36 else name[:35] + "…" for name, _ in rows]
    places = range(len(rows))
    counts = [count for _, count in rows]
    axes.barh(places, counts, color="#7b8da0", height=0.62)
    for place, count in zip(places, counts, strict=True):
        said = f"{count} ({count / facts.rounds:.0%})"
        axes.text(count + 0.015 * max(counts), place, said, va="center", color=DARK)
    plain_axes(axes, "rounds", "")
    axes.set_yticks(list(places), names, color=DARK)
    axes.set_ylim(max(len(rows), 4) - 0.4, -0.6)
    axes.set_xlim(0, 1.25 * max(counts))
    axes.grid(visible=False, axis="y")


def participation_panel(facts: RunFacts) -> Panel:
    width = facts.strip.width
    each = "Each cell is a round" if width == 1 else f"Each cell is {width} rounds after each other"
    return Panel(
        "participation",
        "Participation",
        f"{each}; the darker, the more of them had the rack's work in. What is not in a round "
        "stays in the rack's weights and goes into a later one.",
        lambda axes: _participation(axes, facts),
        wide=True,
        height_in=0.9 + 0.34 * len(facts.racks),
        empty="" if facts.rounds else "No round was decided.",
    )


def _participation(axes: Axes, facts: RunFacts) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    strip, racks = facts.strip, facts.racks
    for place, rack in enumerate(racks):
        shares = strip.shares(rack)
        edges = np.minimum(np.arange(len(shares) + 1) * strip.width, strip.rounds)
        shade = LinearSegmentedColormap.from_list("shade", ["#ffffff", colour(rack)])
        axes.pcolormesh(
            edges, [place - 0.36, place + 0.36], [shares], cmap=shade, vmin=0, vmax=1,
            edgecolors="#ffffff" if len(shares) <= 110 else "none", linewidth=0.4,
        )  # fmt: skip
        axes.plot(
            [0, strip.rounds, strip.rounds, 0, 0],
            [place + 0.36 * up for up in (-1, -1, 1, 1, -1)],
            color="#b8c2cc", lw=0.7,
        )  # fmt: skip
        merged = facts.merged[rack]
        axes.text(
            strip.rounds * 1.01, place,
            f"{merged} of {strip.rounds} ({merged / strip.rounds:.0%})", va="center", color=DARK,
        )  # fmt: skip
    plain_axes(axes, "rounds, in the order in which they were decided", "")
    axes.set_yticks(range(len(racks)), [f"rack {rack}" for rack in racks], color=DARK)
    axes.set_ylim(len(racks) - 0.5, -0.5)
    axes.set_xlim(0, strip.rounds * 1.11)
    axes.spines[["left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)


# ------------------------------------------------------------------ the last rounds


def timeline_panel(rounds: Rounds, begin_ns: int) -> Panel:
    """`begin_ns`: what the time axis counts from."""
    lanes = _lanes(rounds)
    many = len(rounds.shown)
    empty = "" if rounds.bars else " ".join(rounds.notes) or "No round was decided."
    return Panel(
        "timeline",
        f"The last {many} rounds" if many > 1 else "The last rounds",
        "A lane per rack and fragment (f); the number is the version that the round makes. Very "
        "short phases are drawn wider than they are; the table below has the times. Rounds of the "
        "end, after the last step, are left out.",
        lambda axes: _timeline(axes, rounds, lanes, begin_ns),
        wide=True,
        height_in=1.2 + 0.27 * max(4, len(lanes)),
        empty=empty,
    )


def _lanes(rounds: Rounds) -> list[tuple[int, int]]:
    """(rack, fragment), top to bottom."""
    return sorted({(bar.rack, bar.fragment) for bar in rounds.bars})[:LANES_MAX]


def _timeline(axes: Axes, rounds: Rounds, lanes: list[tuple[int, int]], begin_ns: int) -> None:
    from matplotlib.patches import Patch

    gap = 0.5  # between racks
    place = {
        lane: number + gap * sorted({rack for rack, _ in lanes}).index(lane[0])
        for number, lane in enumerate(lanes)
    }
    bars = [bar for bar in rounds.bars if (bar.rack, bar.fragment) in place]
    first_s = min((bar.begin_ns - begin_ns) / SECOND for bar in bars)
    # How long a decided round waits at the very end of a run would leave the rest no room.
    ends_ns = [bar.end_ns for bar in bars if bar.phase != "ready"] or [bar.end_ns for bar in bars]
    last_s = (max(ends_ns) - begin_ns) / SECOND
    width_s = max(last_s - first_s, 1e-3)
    plain_axes(axes, "time since the first step (s)", "")
    for lane, y in place.items():
        axes.axhline(y, color=LIGHT, lw=0.8, zorder=0)
        axes.text(
            -0.008, y, f"f{lane[1]}", transform=axes.get_yaxis_transform(), ha="right",
            va="center", color=MIDDLE,
        )  # fmt: skip
    for bar in sorted(bars, key=lambda bar: DRAWN_IN_ORDER.index(bar.phase)):
        _bar(axes, bar, place[bar.rack, bar.fragment], begin_ns, width_s)
    _versions(axes, bars, place, begin_ns)
    for rack in sorted({rack for rack, _ in lanes}):
        mine = [y for (of, _), y in place.items() if of == rack]
        axes.text(
            -0.035, sum(mine) / len(mine), f"rack {rack}", transform=axes.get_yaxis_transform(),
            ha="right", va="center", color=colour(rack), weight="bold", rotation=90,
        )  # fmt: skip
    axes.set_yticks([])
    axes.set_ylim(max(place.values()) + 0.8, -0.8)
    axes.set_xlim(first_s - 0.01 * width_s, last_s + 0.02 * width_s)
    axes.spines[["left"]].set_visible(False)
    axes.grid(visible=False, axis="y")
    used = {bar.phase for bar in bars}
    handles = [
        Patch(facecolor=PHASE_COLOURS[phase], label=phase) for phase in PHASES if phase in used
    ]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(handles),
        frameon=False, handlelength=1.2, columnspacing=1.3, borderaxespad=0.1,
    )  # fmt: skip


def _bar(axes: Axes, bar: Bar, y: float, begin_ns: int, width_s: float) -> None:
    below, height = BAR_HEIGHTS.get(bar.phase, BAR_FULL)
    begin_s = (bar.begin_ns - begin_ns) / SECOND
    long_s = max((bar.end_ns - bar.begin_ns) / SECOND, BAR_WIDTH_LEAST * width_s)
    axes.broken_barh([(begin_s, long_s)], (y + below, height), facecolor=PHASE_COLOURS[bar.phase])


def _versions(
    axes: Axes, bars: list[Bar], place: dict[tuple[int, int], float], begin_ns: int
) -> None:
    """The number of each round, over where its work begins in the lane."""
    first: dict[tuple[int, int, int], int] = {}
    for bar in bars:
        if bar.phase != "grace":
            key = (bar.rack, bar.fragment, bar.version)
            first[key] = min(first.get(key, bar.begin_ns), bar.begin_ns)
    for (rack, fragment, version), at_ns in first.items():
        axes.text(
            (at_ns - begin_ns) / SECOND, place[rack, fragment] - 0.30, f"{version}",
            fontsize=6.5, color=DARK, ha="left", va="bottom", clip_on=True,
        )  # fmt: skip
