"""Series of a long run stay small, and what is left of them is right."""

from __future__ import annotations

import pytest

from mend.tools.report.curve import BINS_MAX, CURVE_POINTS_MAX, Curve, Point, Strip, Track


def point(number: int) -> Point:
    return Point(number, number, 10 * number, 0.5 * number, 3 * number, 2 * number)


def test_a_track_keeps_its_ends_and_exact_points_between() -> None:
    track = Track()
    for number in range(7777):
        track.add(point(number))
    points = track.points()
    assert len(points) <= CURVE_POINTS_MAX + 1
    assert (points[0], points[-1]) == (point(0), point(7776))
    assert all(each == point(each.step) for each in points)
    assert [each.step for each in points] == sorted({each.step for each in points})


def test_a_short_track_is_whole() -> None:
    track = Track()
    assert track.points() == []
    for number in range(3):
        track.add(point(number))
    assert track.points() == [point(0), point(1), point(2)]


def test_a_curve_averages_neighbours_only_when_it_must() -> None:
    curve = Curve()
    for number in range(CURVE_POINTS_MAX):
        curve.add(number, number, float(number % 2))
    curve.finish()
    assert curve.width == 1
    assert curve.values[:4] == [0, 1, 0, 1]
    for number in range(CURVE_POINTS_MAX, 10 * CURVE_POINTS_MAX + 3):
        curve.add(number, number, float(number % 2))
    curve.finish()
    assert len(curve.values) <= CURVE_POINTS_MAX + 1
    assert curve.width == 16
    assert curve.values[1] == pytest.approx(0.5)
    assert curve.tokens[1] - curve.tokens[0] == 16
    assert curve.tokens == sorted(curve.tokens)
    curve.add(0, 0, float("inf"))
    assert curve.odd == 1


def test_times_of_today_keep_their_nanoseconds_apart() -> None:
    curve, today = Curve(width=2), 1_800_000_000_000_000_000
    for number in range(4):
        curve.add(number, today + 1000 * number, 1.0)
    assert curve.at_ns[1] - curve.at_ns[0] == 2048  # floats near 2^60 are 256 apart


def test_a_strip_counts_every_round_once() -> None:
    strip = Strip()
    for number in range(5 * BINS_MAX + 3):
        strip.add({0, 1} if number % 4 == 0 else {0})
    shares, some = strip.shares(0), strip.shares(1)
    assert len(shares) == len(some) <= BINS_MAX
    assert shares == [1.0] * len(shares)
    assert sum(strip.bins[1]) == len(range(0, 5 * BINS_MAX + 3, 4))
    assert some[0] == 0.25
    assert strip.shares(7) == [0.0] * len(shares)
