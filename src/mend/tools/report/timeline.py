"""The last rounds as bars, a lane per rack and fragment. Looks only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mend.tools.report.panels import DARK, LIGHT, MIDDLE, Panel, colour, plain_axes
from mend.tools.report.rounds import PHASES, Bar, Rounds
from mend.types import SECOND

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "capture": "#56B4E9",
    "encode": "#0072B2",
    "exchange": "#E69F00",
    "grace": "#9aa5b1",
    "merge": "#CC79A7",
    "ready": "#b7ddcc",
    "apply": "#009E73",
}
HEIGHTS = {"grace": (0.30, 0.14), "ready": (-0.07, 0.14)}
"""Phase -> (where its bar begins below the middle of the lane, its height); others: FULL."""
FULL = (-0.27, 0.54)
LANES_MAX = 48
WIDTH_LEAST = 0.0016
"""Of the whole width: shorter phases are drawn so wide, or nobody would see them."""
IN_FRONT = ("grace", "ready", "exchange", "encode", "capture", "merge", "apply")
"""In the order of drawing."""


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
        "end, behind the last step, are left out.",
        lambda axes: _draw(axes, rounds, lanes, begin_ns),
        wide=True,
        height_in=1.2 + 0.27 * max(4, len(lanes)),
        empty=empty,
    )


def _lanes(rounds: Rounds) -> list[tuple[int, int]]:
    """(rack, fragment), top to bottom."""
    return sorted({(bar.rack, bar.fragment) for bar in rounds.bars})[:LANES_MAX]


def _draw(axes: Axes, rounds: Rounds, lanes: list[tuple[int, int]], begin_ns: int) -> None:
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
    for bar in sorted(bars, key=lambda bar: IN_FRONT.index(bar.phase)):
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
    handles = [Patch(facecolor=COLOURS[phase], label=phase) for phase in PHASES if phase in used]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(handles),
        frameon=False, handlelength=1.2, columnspacing=1.3, borderaxespad=0.1,
    )  # fmt: skip


def _bar(axes: Axes, bar: Bar, y: float, begin_ns: int, width_s: float) -> None:
    below, height = HEIGHTS.get(bar.phase, FULL)
    begin_s = (bar.begin_ns - begin_ns) / SECOND
    long_s = max((bar.end_ns - bar.begin_ns) / SECOND, WIDTH_LEAST * width_s)
    axes.broken_barh([(begin_s, long_s)], (y + below, height), facecolor=COLOURS[bar.phase])


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
