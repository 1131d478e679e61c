"""Axes, lines and bars of the report, without a page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mend.tools.report.axes import PLACES, Scale, time_unit, unit_of
from mend.tools.report.charts import STRETCHES, compared_losses, recorded_charts
from mend.tools.report.curve import Curve, Strip
from mend.tools.report.facts import RankFacts, RunFacts
from mend.tools.report.lanes import Cell, participation, timeline
from mend.tools.report.rounds import Bar, Rounds

S = 1_000_000_000
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def recorded(values: list[float], name: str = "loss") -> RunFacts:
    """One rack that recorded these, 10 tokens and a second apart."""
    curve = Curve()
    for number, value in enumerate(values):
        curve.add(10 * number, number * S, value)
    curve.finish()
    facts = RunFacts(end_ns=len(values) * S)
    facts.ranks[0, 0] = RankFacts(0, 0, curves={name: curve})
    return facts


@pytest.mark.parametrize(
    ("scale", "labels"),
    [
        (Scale(0, 10), ["0", "2", "4", "6", "8", "10"]),
        (Scale(7.2, 9.8), ["7.5", "8", "8.5", "9", "9.5"]),
        (Scale(2.1, 5.6, log=True), ["2.5", "3", "3.5", "4", "4.5", "5", "5.5"]),
        (Scale(0.04, 3, log=True), ["0.05", "0.1", "0.2", "0.5", "1", "2"]),
        (Scale(0.9, 11, log=True), ["1", "2", "5", "10"]),
        (Scale(1e-9, 1e9, log=True), ["1e-09", "1e-05", "0.1", "1000", "1e+07"]),
        (Scale(5, 5), ["5"]),
    ],
)
def test_ticks_are_round_numbers(scale: Scale, labels: list[str]) -> None:
    assert [label for _, label in scale.ticks()] == labels


@given(FLOATS, FLOATS, st.booleans())
def test_ticks_of_any_scale_are_few_and_lie_on_it(one: float, other: float, log: bool) -> None:
    low, high = sorted((abs(one), abs(other)) if log else (one, other))
    if log and low == 0:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        ticks = Scale(low, high, log=log).ticks()
    assert 1 <= len(ticks) <= 12
    if high / 2 - low / 2 < 1e300:
        assert all(-1 <= at <= PLACES + 1 for at, _ in ticks)


@pytest.mark.parametrize(("seconds", "unit"), [(1, "s"), (301, "min"), (17_000, "min"), (1e6, "h")])
def test_time_axis_has_unit_that_fits(seconds: float, unit: str) -> None:
    assert time_unit(seconds)[1] == unit


def test_unit_leaves_few_digits() -> None:
    assert unit_of([2e7, float("nan")]) == (1e6, "M")
    assert unit_of([]) == (1.0, "")


def test_loss_has_log_axis_unless_it_is_negative() -> None:
    (chart,) = recorded_charts(recorded([8.0, 4.0, 2.0, 1.0]))
    heights = [float(each.split()[1]) for each in chart.lines[0].path[1:].split("L")]
    steps = np.diff(heights)
    assert steps == pytest.approx([steps[0]] * 3, abs=1.5), "halves are equally far apart"
    (chart,) = recorded_charts(recorded([1.0, 0.0, -1.0]))
    assert next(label for _, label in chart.y_ticks) == "-1"


def test_every_stretch_has_its_value_under_the_mouse() -> None:
    (chart,) = recorded_charts(recorded([float(n) for n in range(1, 1201)]))
    assert len(chart.columns) == STRETCHES
    first, last = chart.columns[0], chart.columns[-1]
    assert first.values == ((0, "rack 0", "10.50"),), "the mean of 1 to 20"
    assert last.values == ((0, "rack 0", "1190"),)
    assert (first.head, last.head) == ("95 tokens, 9.5 s", "11.9 k tokens, 19 min 49 s")
    assert sum(column.width for column in chart.columns) == pytest.approx(PLACES)
    assert chart.summary == "Loss. At first: rack 0 10.50. At last: rack 0 1190."


def test_gap_in_values_is_gap_in_line() -> None:
    nan = float("nan")
    (chart,) = recorded_charts(recorded([3.0, 2.0, nan, nan, 2.0, 1.0]))
    assert chart.lines[0].path.count("M") == 2
    assert "2 values are NaN or infinite and are not drawn." in chart.caption


def test_value_alone_is_dash_around_its_place() -> None:
    """A dot as thick as the line was invisible: the throughput of a short run looked empty."""
    nan = float("nan")
    (chart,) = recorded_charts(recorded([3.0, nan, 2.0, 1.0, nan, 2.0]))
    first, pair, last = chart.lines[0].path.split("M")[1:]
    assert (first.split("h")[1], pair.count("L"), last.split("h")[1]) == ("16", 1, "16")


def test_values_without_a_finite_one_are_no_panel() -> None:
    assert recorded_charts(recorded([float("nan"), float("inf")])) == []


@given(st.lists(FLOATS, min_size=1, max_size=8))
def test_any_finite_values_can_be_drawn(values: list[float]) -> None:
    (chart,) = recorded_charts(recorded(values))
    assert "nan" not in chart.lines[0].path
    assert "inf" not in chart.lines[0].path


def test_runs_are_compared_where_two_recorded_losses() -> None:
    one, other = recorded([3.0, 2.0]), recorded([3.0, 2.5])
    chart = compared_losses([("a", one), ("b", other), ("c", RunFacts())])
    assert chart is not None
    assert [line.name for line in chart.lines] == ["a", "b"]
    assert compared_losses([("a", one), ("c", RunFacts())]) is None


def test_equal_rounds_after_each_other_are_one_cell() -> None:
    facts = RunFacts(strip=Strip())
    for racks in ({0, 1}, {0, 1}, {0}, {0, 1}):
        facts.strip.add(racks)
    assert participation(facts, 1) == [
        Cell(1.0, 2, "rounds 1 to 2: rack 1 in 100%"),
        Cell(0.0, 1, "round 3: rack 1 in 0%"),
        Cell(1.0, 1, "round 4: rack 1 in 100%"),
    ]
    assert [cell.rounds for cell in participation(facts, 0)] == [4]


def test_timeline_has_a_lane_per_rack_and_fragment_in_thousandths() -> None:
    bars = [
        Bar(1, 0, 7, "merge", 3 * S, 5 * S),
        Bar(0, 0, 7, "capture", S, 2 * S),
        Bar(0, 0, 7, "ready", 4 * S, 99 * S),
    ]
    made = timeline(Rounds(bars=bars, shown=[(0, 7)]), 0)
    assert made is not None
    assert [(lane.rack, lane.fragment, lane.first) for lane in made.lanes] == [
        (0, 0, True), (1, 0, True),
    ]  # fmt: skip
    ready, capture = made.lanes[0].pieces
    assert (capture.left, capture.width) == (0, 250)
    assert capture.tooltip == "rack 0, fragment 0, version 7: capture 1.0 s"
    assert ready.left + ready.width == PLACES, "a long wait at the end is cut where the rest ends"
    assert made.lanes[0].versions == ((0.0, 7),)
    assert made.phases == ("capture", "merge", "ready")
    assert timeline(Rounds(), 0) is None
