"""`python -m mend_lab goodput`: a cost model of what failures take from very large jobs. It runs no
code of mend; it is arithmetic over a few assumed times.

A *group* of chips runs in lock step: all of a data-parallel job, or one rack of several. While it
runs, its chips fail at random (Poisson, `mtbf_days` per chip), and a failure stops the whole group
for a *pause*, with or without the slice of the chip afterwards. The share `repair_share` of the
failures takes the slice away until it is repaired. A repaired slice is taken in with a pause of its
own, unless a pause goes on when it returns. What fails in a pause is part of that pause.

With a = failures per second of the running group x pause, q = repair_share, and p = the share of
time in which the group runs,

    p = 1 / (1 + a (1 + q p)),   goodput = p (1 - slices that are out)

as p is also the chance that the group runs when a slice returns. Racks stop each for themselves, so
the goodput of M racks is that of one group of N / M chips. tests/unit/lab/test_goodput.py
compares this with an account of the same failure by failure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mend.errors import ConfigError

DAY_S = 86_400.0
CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
RACKS = (2, 4, 8, 16)
KINDS = (".svg", ".png", ".pdf")
"""Kinds of picture files."""
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": "#1d2733",
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "mend",
}
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
DATA_PARALLEL, ELASTIC = "data parallel", "elastic data parallel"

PUBLISHED = {
    DATA_PARALLEL: (72, 57, 38, 27, 18),
    ELASTIC: (88, 80, 69, 58, 40),
    "2 racks": (94, 88, 80, 70, 54),
    "4 racks": (96, 93, 89, 82, 73),
    "8 racks": (98, 96, 94, 88, 80),
    "16 racks": (99, 98, 96, 93, 86),
}
"""Goodput in percent, for CHIPS (Decoupled DiLoCo, arXiv 2604.21428)."""

MTBF_DAYS_MIN, ASSUMED_MAX = 1e-3, 1e12
"""Beyond these a sum would overflow."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """The parameters. *Inferred*: one value that brings all cells of PUBLISHED about, since their
    own parameters are not known to us."""

    mtbf_days: float = 365.0
    """Days between two failures of one chip. Published: about a year."""
    restart_s: float = 66.0
    """Pause of a group that restarts whole, with the work that it repeats. Inferred."""
    elastic_s: float = 15.9
    """Pause of a group that goes on with the slices it has left. Inferred."""
    repair_share: float = 0.4
    """Share of the failures after which a slice is out; the others end with the pause. Inferred."""
    slice_chips: float = 256.0
    """Chips that are out together. Only slice_chips x repair_s counts. Inferred."""
    repair_s: float = 8_300.0
    """Seconds that a slice is out, the mean. Inferred."""
    takeover_stall_s: float = 1.0
    """Time that training of every other rack waits when the rack that coordinates is gone:
    stall_max_s. Measured: 1.0 s (benchmarks/results/takeover.json)."""
    donor_s: float = 0.33
    """Time that a rack spends when a restarted one copies from it. Measured with 80 MB: 0.32 and
    0.33 s (docs/internals/benchmarks.md, rejoin)."""
    held_up_s: float = 2.2
    """Time after the loss of a rack in which no round closes, 2 s of it until that is noticed.
    Measured: 2.2 s (README, kill and takeover)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = MTBF_DAYS_MIN if field.name == "mtbf_days" else 0.0
            most = 1.0 if field.name == "repair_share" else ASSUMED_MAX
            if not least <= value <= most:
                rule = f"{field.name} is a number, {least:g} to {most:g}"
                raise ConfigError("assume", f"{field.name}={value:g}", rule, "Change it.")


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train. Shares of one, for each number of chips."""

    name: str
    goodput: tuple[float, ...]
    closing: tuple[float, ...] = ()
    """Time in which rounds close; of racks that exchange."""
    published: tuple[int, ...] = ()


def report(
    assume: Iterable[str], quorum: int, picture: Path | None, as_json: bool, console: Console
) -> None:
    """Print the table, and draw it where `picture` names a file. Raises ConfigError."""
    assumed = assumed_by(assume)
    rows = rows_of(assumed, quorum=quorum)
    if picture is not None:
        plot(rows, picture)
    if as_json:
        print(json.dumps(as_data(assumed, rows), indent=2))
    else:
        show(assumed, rows, console)


def assumed_by(pairs: Iterable[str]) -> Assumed:
    """Read the assumptions, each as `name=number`. Raises ConfigError."""
    names = [field.name for field in fields(Assumed)]
    values: dict[str, float] = {}
    for pair in pairs:
        name, _, number = pair.partition("=")
        if name not in names:
            rule = f"nothing that the model assumes is called {name!r}"
            raise ConfigError("assume", pair, rule, f"Use one of {', '.join(names)}.")
        try:
            values[name] = float(number)
        except ValueError:
            rule = "is not NAME=NUMBER"
            raise ConfigError("assume", pair, rule, f"Write it as {name}=3.5.") from None
    return Assumed(**values)


def running(chips: float, pause_s: float, assumed: Assumed) -> float:
    """The share of time in which a group runs: p above, the root of a q p^2 + (1 + a) p = 1."""
    a = chips / (assumed.mtbf_days * DAY_S) * pause_s
    # In this form nothing cancels, and a or q may be zero.
    return 2 / (1 + a + math.sqrt((1 + a) ** 2 + 4 * a * assumed.repair_share))


def goodput(chips: float, pause_s: float, assumed: Assumed) -> float:
    """Return the share of time in which a group runs, less the slices that are out."""
    p = running(chips, pause_s, assumed)
    failures = p / (assumed.mtbf_days * DAY_S)  # of a chip, in a second
    out = failures * assumed.repair_share * assumed.repair_s * assumed.slice_chips
    return p * max(0.0, 1 - out)


def rows_of(assumed: Assumed, racks: Iterable[int] = RACKS, quorum: int = 1) -> list[Row]:
    """The table: both kinds of data parallel, racks that are elastic inside, as published, and
    racks that restart whole, as `mend launch` runs them. `quorum`: racks that a round needs."""

    def alone(pause_s: float, racks: int = 1) -> tuple[float, ...]:
        return tuple(goodput(chips / racks, pause_s, assumed) for chips in CHIPS)

    rows = [
        Row(DATA_PARALLEL, alone(assumed.restart_s), (), PUBLISHED[DATA_PARALLEL]),
        Row(ELASTIC, alone(assumed.elastic_s), (), PUBLISHED[ELASTIC]),
    ]
    for count in racks:
        name = f"{count} racks"
        shares = [running(chips / count, assumed.elastic_s, assumed) for chips in CHIPS]
        closing = tuple(_at_least(quorum, count, p) for p in shares)
        of_racks = alone(assumed.elastic_s, count)
        rows.append(Row(name, of_racks, closing, PUBLISHED.get(name, ())))
    rows += [_restarting(count, quorum, assumed) for count in racks]
    return rows


def _restarting(racks: int, quorum: int, assumed: Assumed) -> Row:
    """Racks that restart whole and copy from another, which the others notice a little."""
    goodputs, closing = [], []
    for chips in CHIPS:
        p = running(chips / racks, assumed.restart_s, assumed)
        failures = p * chips / (assumed.mtbf_days * DAY_S)
        stops = failures * (1 + assumed.repair_share * p)  # of all racks, in a second
        # What a stop costs the other racks, while they train: all of them wait if it was the
        # coordinator, once in `racks`, and one of them is copied from. For one rack of them:
        cost = assumed.takeover_stall_s * (racks - 1) / racks**2 + assumed.donor_s / racks
        goodputs.append(goodput(chips / racks, assumed.restart_s, assumed) / (1 + stops * cost))
        # Stops that come together hold rounds up together.
        closing.append(_at_least(quorum, racks, p) * math.exp(-stops * assumed.held_up_s))
    return Row(f"{racks} racks, restarted whole", tuple(goodputs), tuple(closing))


def _at_least(least: int, racks: int, p: float) -> float:
    """The chance that so many racks run, each with chance p for itself."""
    return sum(
        math.comb(racks, up) * p**up * (1 - p) ** (racks - up) for up in range(least, racks + 1)
    )


def as_data(assumed: Assumed, rows: list[Row]) -> dict[str, Any]:
    """Return the table as data for --json, in percent."""

    def percent(shares: tuple[float, ...]) -> list[float]:
        return [round(100 * share, 2) for share in shares]

    return {
        "model": "cost model, no run of mend",
        "assumed": asdict(assumed),
        "chips": list(CHIPS),
        "rows": [
            {
                "name": row.name,
                "goodput_pct": percent(row.goodput),
                "rounds_close_pct": percent(row.closing),
                "published_pct": list(row.published),
            }
            for row in rows
        ],
    }


def show(assumed: Assumed, rows: list[Row], console: Console) -> None:
    """Print the table."""
    table = Table(title="Goodput in percent: a cost model (published figures in brackets)")
    table.add_column("chips")
    for chips in CHIPS:
        table.add_column(_short(chips), justify="right")
    table.add_column("rounds close", justify="right")
    for row in rows:
        cells = [f"{100 * share:.0f}" for share in row.goodput]
        for i, figure in enumerate(row.published):
            cells[i] += f" ({figure})"
        if row.name.startswith("2 racks"):
            table.add_section()
        ends = [f"{100 * share:.0f}" for share in row.closing]
        table.add_row(row.name, *cells, f"{ends[0]} .. {ends[-1]}" if ends else "")
    console.print(table)
    values = ", ".join(f"{name}={value:g}" for name, value in asdict(assumed).items())
    console.print(
        f"assumed: {values}. Change one with --assume NAME=VALUE; where each comes from: "
        "docs/internals/simulator.md. Rounds close: the share of time, from the least to the most "
        "chips.",
        soft_wrap=True,
        highlight=False,
    )


def plot(rows: list[Row], path: Path) -> None:
    """Lines: the model; dots: published. SVG, PNG or PDF by the name of the file; equal calls
    write equal bytes. Raises ConfigError without matplotlib, for another kind of file, and where
    it cannot be written."""
    if path.suffix not in KINDS:
        rule = "is not the name of a picture that can be drawn"
        raise ConfigError("plot", str(path), rule, f"End it in {', '.join(KINDS)}.")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        remedy = "pip install matplotlib"
        raise ConfigError("matplotlib", "not installed", "a plot needs it", remedy) from error

    with rc_context(STYLE):
        figure = Figure(figsize=(8.6, 4.4), layout="constrained")
        axes = figure.subplots()
        colours: dict[str, str] = {}
        for row in rows:
            kind = row.name.split(",")[0]
            colour = colours.setdefault(kind, f"C{len(colours)}")
            dashes = "-" if kind == row.name else "--"
            percent = [100 * share for share in row.goodput]
            axes.plot(CHIPS, percent, dashes, lw=1.2, color=colour, label=row.name)
            if row.published:
                axes.plot(CHIPS, row.published, "o", ms=4, color=colour)
        axes.set_xscale("log")
        axes.set_xticks(CHIPS, [_short(chips) for chips in CHIPS])
        axes.minorticks_off()
        axes.set_ylim(0, 102)
        axes.set_xlabel("chips")
        axes.set_ylabel("goodput, %")
        axes.set_title("Goodput: cost model (lines) and published figures (dots)")
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper", frameon=False)
        try:
            figure.savefig(path, metadata=NO_METADATA if path.suffix == ".svg" else None)
        except OSError as error:
            rule = f"cannot be written ({error.strerror})"
            raise ConfigError("plot", str(path), rule, "Name a file in another folder.") from error


def _short(chips: int) -> str:
    return f"{chips / 1e6:g}M" if chips >= 1_000_000 else f"{chips / 1e3:g}k"
