"""The curves of a report as lines, ticks and hover values, in thousandths of a chart. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mend.events import kinds
from mend.tools.report.axes import PLACES, Floats, Scale, Tick, time_unit, unit_of
from mend.tools.report.curve import Curve, Point
from mend.tools.report.facts import RunFacts
from mend.tools.report.summary import duration, short
from mend.types import SECOND

STRETCHES = 60
"""Most parts of an x axis; a line has one point in each, and the mouse finds it there."""
STRETCH_S_MIN = 2
FAINT_POINTS = 1600
"""Most points of all faint lines of a chart together."""
LOG_RANGE = 20
"""Least ratio of most to least at which positive values other than losses get a log axis."""
RECORDED_SHOWN = 5
DASH = 8
"""Half the length of one, in thousandths of a chart."""
VALUE_MAX = 1e150
"""Larger values are drawn there: squares of them are still finite."""
MARKED = (
    kinds.RackSilent,
    kinds.RackBack,
    kinds.CoordinatorChosen,
    kinds.RackJoined,
    kinds.LineageBegun,
    kinds.RackExpelled,
    kinds.OwnSeatLost,
)
MARKS_MAX = 12


@dataclass(frozen=True, slots=True)
class Series:
    """A line before it has a scale: a point per stretch, NaN where there is none."""

    name: str
    colour: int
    x: Floats
    y: Floats
    faint: tuple[tuple[Floats, Floats], ...] = ()
    """Raw values behind the line."""
    dotted: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    colour: int
    path: str
    faint: str
    dotted: bool


@dataclass(frozen=True, slots=True)
class Column:
    """What the mouse shows over a stretch of the x axis."""

    left: float
    width: float
    head: str
    values: tuple[tuple[int, str, str], ...]
    """(colour, name of the line, value)."""


@dataclass(frozen=True, slots=True)
class Chart:
    name: str
    title: str
    caption: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    columns: tuple[Column, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    marks: tuple[float, ...] = ()
    """Places of vertical lines."""

    @property
    def summary(self) -> str:
        """What a reader hears who does not see the lines."""
        texts = [
            f"{name} {value}"
            for column in (self.columns[0], self.columns[-1])
            for _, name, value in column.values
        ]
        half = len(self.columns[0].values)
        first, last = ", ".join(texts[:half]), ", ".join(texts[half:])
        return f"{self.title}. At first: {first or 'no value'}. At last: {last or 'no value'}."


@dataclass(frozen=True, slots=True)
class Look:
    """How the numbers of a chart are written. `x_unit`, `y_unit`: (divisor, label)."""

    x_unit: tuple[float, str]
    y_unit: tuple[float, str]
    heads: Sequence[str]
    """Of the columns."""
    show: Callable[[float], str]
    from_zero: bool = True
    log: bool = False
    marks: Sequence[float] = ()


def _chart(
    names: tuple[str, str, str], edges: Floats, series: Sequence[Series], look: Look
) -> Chart | None:
    """`names`: name, title, caption. None: there is no value."""
    values = np.concatenate([np.empty(0), *(each.y for each in series)])
    if not np.isfinite(values).any():
        return None
    x = Scale(edges[0] / look.x_unit[0], edges[-1] / look.x_unit[0])
    y = _y_scale(series, look)

    def path(at: Floats, value: Floats) -> str:
        with np.errstate(divide="ignore", invalid="ignore"):
            return _path(x.places(at / look.x_unit[0]), y.places(value / look.y_unit[0]))

    stride = max(1, sum(len(at) for each in series for at, _ in each.faint) // FAINT_POINTS)
    lines = tuple(
        Line(
            each.name,
            each.colour,
            path(each.x, each.y),
            "".join(path(at[::stride], value[::stride]) for at, value in each.faint),
            each.dotted,
        )
        for each in series
    )
    places = x.places(edges / look.x_unit[0])
    columns = tuple(
        Column(
            float(left),
            float(right - left),
            head,
            tuple(
                (each.colour, each.name, look.show(float(each.y[k])))
                for each in series
                if np.isfinite(each.y[k])
            ),
        )
        for k, (left, right, head) in enumerate(
            zip(places[:-1], places[1:], look.heads, strict=True)
        )
    )
    marks = tuple(map(float, x.places(np.array(look.marks) / look.x_unit[0])))
    labels = look.x_unit[1], look.y_unit[1]
    ticks = tuple(x.ticks()), tuple(y.ticks())
    return Chart(*names, *labels, lines, columns, *ticks, marks)


def _y_scale(series: Sequence[Series], look: Look) -> Scale:
    """Has room for every line, and for all faint values but the most extreme percent."""
    values = np.concatenate([each.y for each in series])
    faint = np.concatenate([np.empty(0), *(value for each in series for _, value in each.faint)])
    values, faint = (v[np.isfinite(v) & ((v > 0) | (not look.log))] for v in (values, faint))
    if len(faint):
        values = np.concatenate([values, np.percentile(faint, [1, 99])])
    low, high = float(values.min()) / look.y_unit[0], float(values.max()) / look.y_unit[0]
    if look.log:
        return Scale(low / 1.02, high * 1.02, log=True)
    if look.from_zero:
        return Scale(0.0, max(1.12 * high, 1e-9))
    room = 0.04 * (high - low) or abs(high) / 10 or 1.0
    return Scale(low - room, high + room)


def _path(x: Floats, y: Floats) -> str:
    """Of an SVG, y upwards; a gap where a value is not finite. A point alone is a dash."""
    parts = []
    fine = np.isfinite(x) & np.isfinite(y)
    before, after = np.append(False, fine[:-1]), np.append(fine[1:], False)
    for k in np.flatnonzero(fine):
        at, down = x[k], PLACES - min(max(y[k], -PLACES), 2 * PLACES)  # at most outside the picture
        if before[k]:
            parts.append(f"L{at:.0f} {down:.0f}")
        elif after[k]:
            parts.append(f"M{at:.0f} {down:.0f}")
        else:
            parts.append(f"M{at - DASH:.0f} {down:.0f}h{2 * DASH}")
    return "".join(parts)


# ------------------------------------------------------------------ recorded values


def recorded_charts(facts: RunFacts) -> list[Chart]:
    """The loss, and up to four other values that the script recorded, over tokens."""
    names = {name for each in facts.ranks.values() for name in each.curves}
    ordered = sorted(names, key=lambda name: (name != "loss", name))[:RECORDED_SHOWN]
    charts = []
    for number, name in enumerate(ordered):
        racks = {
            f"rack {rack}": (rack, _raw(facts, rack, name))
            for rack in facts.racks
            if any(name in each.curves for each in facts.of_rack(rack))
        }
        about = (f"recorded-{number}", _titled(name), _caption(facts, name))
        if chart := _over_tokens(about, name, racks, faint=True):
            charts.append(chart)
    return charts


def compared_losses(runs: Sequence[tuple[str, RunFacts]]) -> Chart | None:
    """A line per run; None where fewer than two have recorded a loss."""
    found = {
        name: (number, [part for rack in facts.racks for part in _raw(facts, rack, "loss")])
        for number, (name, facts) in enumerate(runs)
    }
    found = {name: each for name, each in found.items() if each[1]}
    caption = "Mean over the racks of each run and over neighbours, over the tokens of one rack."
    about = ("losses", "Loss of the runs", caption)
    return _over_tokens(about, "loss", found, faint=False) if len(found) > 1 else None


Raw = list[tuple[Floats, Floats, Floats]]
"""Per rank: tokens of its rack, seconds since the first step, values."""


def _raw(facts: RunFacts, rack: int, name: str) -> Raw:
    ranks = facts.of_rack(rack)
    return [_columns(each.curves[name], facts, len(ranks)) for each in ranks if name in each.curves]


def _columns(curve: Curve, facts: RunFacts, ranks: int) -> tuple[Floats, Floats, Floats]:
    y = np.array(curve.values, dtype=np.float64)
    y = np.where(np.isfinite(y), np.clip(y, -VALUE_MAX, VALUE_MAX), np.nan)
    at_s = (np.array(curve.at_ns, dtype=np.float64) - facts.begin_ns) / SECOND
    return np.array(curve.tokens, dtype=np.float64) * ranks, at_s, y


def _titled(name: str) -> str:
    return name[:1].upper() + name[1:]


def _caption(facts: RunFacts, name: str) -> str:
    curves = [each.curves[name] for each in facts.ranks.values() if name in each.curves]
    width = max((curve.width for curve in curves), default=1)
    text = "Each rack's own batches. Faint: as recorded"
    text += f", {width} values averaged per point" if width > 1 else ""
    odd = sum(curve.odd for curve in curves)
    more = f" {odd} values are NaN or infinite and are not drawn." if odd else ""
    return text + "; bold: mean over the rack's ranks and over neighbours." + more


def _over_tokens(
    names: tuple[str, str, str], name: str, racks: dict[str, tuple[int, Raw]], *, faint: bool
) -> Chart | None:
    parts = [part for _, raw in racks.values() for part in raw]
    tokens, at_s, values = (np.concatenate([part[i] for part in parts]) for i in range(3))
    fine = values[np.isfinite(values)]
    if not len(fine):
        return None
    edges = _stretches(tokens)
    centres, times = _means(edges, tokens, tokens), _means(edges, tokens, at_s)
    series = []
    for line, (colour, raw) in racks.items():
        x, y = (np.concatenate([part[i] for part in raw]) for i in (0, 2))
        x, y = x[np.isfinite(y)], y[np.isfinite(y)]
        behind = tuple((x, y) for x, _, y in raw) if faint else ()
        series.append(Series(line, colour, _means(edges, x, x), _means(edges, x, y), behind))
    positive = bool(fine.min() > 0)
    divisor, prefix = unit_of(tokens)
    look = Look(
        x_unit=(divisor, f"{prefix} tokens per rack".strip()),
        y_unit=(1.0, name),
        heads=[
            f"{short(x).strip()} tokens, {duration(max(0.0, s))}" if np.isfinite(x) else ""
            for x, s in zip(centres, times, strict=True)
        ],
        show=lambda value: f"{value:#.4g}".rstrip("."),
        from_zero=False,
        log=positive and (name == "loss" or bool(fine.max() > LOG_RANGE * fine.min())),
    )
    return _chart(names, edges, series, look)


def _stretches(x: Floats) -> Floats:
    """Edges of equal stretches; around each value where these are few."""
    own = np.unique(x)
    if len(own) > STRETCHES:
        return np.linspace(own[0], own[-1], STRETCHES + 1)
    room = (own[-1] - own[0]) / max(1, len(own) - 1) / 2 or 1.0
    return np.concatenate([[own[0] - room], (own[:-1] + own[1:]) / 2, [own[-1] + room]])


def _means(edges: Floats, x: Floats, values: Floats) -> Floats:
    """Per stretch; NaN where there is no value, as of a rack that was away."""
    many = len(edges) - 1
    place = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, many - 1)
    count = np.bincount(place, minlength=many)
    sums = np.bincount(place, weights=values, minlength=many)
    return np.where(count > 0, sums / np.maximum(count, 1), np.nan)


# ------------------------------------------------------------------ progress


def progress_charts(facts: RunFacts) -> list[Chart]:
    """Throughput, stall and traffic over time, each where there is some."""
    wall_s = (facts.end_ns - facts.begin_ns) / SECOND
    if wall_s <= 0:
        return []
    many = int(np.clip(wall_s / STRETCH_S_MIN, 2, STRETCHES))
    edges = np.linspace(0.0, wall_s, many + 1)
    marks = _marks(facts)
    text = " Dashed: a rack fell silent, came back or took over." if marks else ""
    about = ("throughput", "Throughput", "Tokens per second of each rack, all its ranks." + text)
    tokens = [_line(facts, rack, lambda p: p.tokens, edges) for rack in facts.racks]
    charts = [_over_time(about, edges, tokens, "tokens/s", marks)]
    if facts.exchange:
        about = (
            "stall",
            "Stall",
            "Share of the time that training waited for rounds, mean over the rack's ranks.",
        )
        stalls = [_stall(facts, rack, edges) for rack in facts.racks]
        charts.append(_over_time(about, edges, stalls, "% of the time"))
        about = (
            "bytes",
            "Traffic",
            "Bytes per second on all connections of mend. Solid: sent; dotted: received.",
        )
        ways: list[Series] = []
        for rack in facts.racks:
            ways += [
                _line(facts, rack, lambda p: p.bytes_sent, edges, " sent"),
                _line(facts, rack, lambda p: p.bytes_received, edges, " received"),
            ]
        charts.append(_over_time(about, edges, ways, "B/s"))
    return [each for each in charts if each is not None]


def _over_time(
    names: tuple[str, str, str],
    edges: Floats,
    series: Sequence[Series],
    unit: str,
    marks: Sequence[float] = (),
) -> Chart | None:
    unit_s, of_time = time_unit(float(edges[-1]))
    percent = unit.startswith("%")
    divisor, prefix = (
        (1.0, "") if percent else unit_of(np.concatenate([[0.0], *(each.y for each in series)]))
    )
    look = Look(
        x_unit=(unit_s, f"time ({of_time})"),
        y_unit=(divisor, _joined(prefix, unit)),
        heads=[f"{duration(a)} to {duration(b)}" for a, b in itertools.pairwise(edges)],
        show=lambda v: f"{v:.2f} %" if percent else _joined(short(v), unit),
        marks=marks,
    )
    return _chart(names, edges, series, look)


def _joined(figure: str, unit: str) -> str:
    return f"{figure}{unit}" if unit == "B/s" else f"{figure.strip()} {unit}".strip()


def _line(
    facts: RunFacts, rack: int, value: Callable[[Point], float], edges: Floats, way: str = ""
) -> Series:
    rate = rate_of(facts, rack, value, edges)
    middles = (edges[:-1] + edges[1:]) / 2
    return Series(f"rack {rack}{way}", rack, middles, rate, dotted=way == " received")


def _stall(facts: RunFacts, rack: int, edges: Floats) -> Series:
    line = _line(facts, rack, lambda p: p.stall_ms / 1000, edges)
    share = np.clip(100 * line.y / max(1, len(facts.of_rack(rack))), 0, 100)
    return Series(line.name, rack, line.x, share)


def rate_of(facts: RunFacts, rack: int, value: Callable[[Point], float], edges: Floats) -> Floats:
    """Growth per second in each stretch, summed over the rack's ranks; NaN where less than half of
    a stretch is known. `edges`: seconds since the first step."""
    tracks = [points for each in facts.of_rack(rack) if len(points := each.track.points()) > 1]
    unknown = np.full(len(edges) - 1, np.nan)
    if not tracks:
        return unknown
    first_s = max((points[0].at_ns - facts.begin_ns) / SECOND for points in tracks)
    last_s = min((points[-1].at_ns - facts.begin_ns) / SECOND for points in tracks)
    if last_s <= first_s:
        return unknown
    grid = np.clip(edges, first_s, last_s)
    total = np.zeros(len(edges))
    for points in tracks:
        at_s = np.array([(p.at_ns - facts.begin_ns) / SECOND for p in points])
        counted = np.array([value(p) - value(points[0]) for p in points], dtype=np.float64)
        total += np.interp(grid, at_s, counted)
    known_s = np.diff(grid)
    enough = known_s >= np.diff(edges) / 2
    return np.where(enough, np.diff(total) / np.where(enough, known_s, 1.0), np.nan)


def _marks(facts: RunFacts) -> list[float]:
    """Seconds since the first step."""
    times = [each.time_ns for each in facts.faults if isinstance(each.event, MARKED)]
    return sorted({round((at_ns - facts.begin_ns) / SECOND, 1) for at_ns in times})[:MARKS_MAX]
