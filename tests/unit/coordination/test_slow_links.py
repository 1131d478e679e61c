"""Pulls that a rank makes anyway tell which link has become slow, by how much, and until when."""

from __future__ import annotations

import random

import pytest

from mend.coordination.events import Note
from mend.coordination.messages import Pace, SlowLink
from mend.coordination.slow import pace_of_rack, verdict_of
from mend.coordination.slow_links import SAMPLE_NS, SAMPLE_NS_MAX, LinkPaces, worst_links
from mend.detector import DetectorOptions
from mend.events.kinds import LinkSlow, LinkSlowOver
from mend.types import MS, SECOND, Member
from tests.noted import pair

ONE, TWO = Member(1, 11), Member(2, 12)
SIZE = 1_000_000
ROUND_NS = SECOND


class Rank:
    """Rank 3 of rack 0, which pulls in rounds of a second."""

    def __init__(self) -> None:
        self.links = LinkPaces(0, 3, DetectorOptions())
        self.step, self.now_ns = 0, 0
        self.notes: list[Note] = []

    def pulls(self, took_ns: dict[Member, int], size: int = SIZE, error: str = "") -> None:
        """One round, from several racks at once; the pulls end in the order of `took_ns`."""
        self.step, self.now_ns = self.step + 8, self.now_ns + ROUND_NS
        for member in took_ns:
            self.links.begin(member, self.now_ns)
        for member, ns in sorted(took_ns.items(), key=lambda each: each[1]):
            found = self.links.end(member, size, error, self.step, self.now_ns + ns)
            self.notes += [effect for effect in found if isinstance(effect, Note)]
        self.now_ns += max(took_ns.values())

    def rounds(self, count: int, ns: int, member: Member = ONE, noise: float = 0.2) -> None:
        chance = random.Random(count)
        for _ in range(count):
            self.pulls({member: round(ns * chance.lognormvariate(0, noise))})


def test_a_link_that_takes_four_times_as_long_is_named_until_it_recovers() -> None:
    rank = Rank()
    rank.rounds(30, 100 * MS)
    onset_step = rank.step
    rank.rounds(12, 400 * MS)
    (onset,) = rank.notes
    assert isinstance(onset.event, LinkSlow)
    about = onset.event.fields()
    assert (about["from_rack"], about["to_rack"], about["rank"]) == (1, 0, 3)
    assert onset_step < int(str(about["since_step"])) <= onset_step + 16
    assert int(str(about["step"])) <= onset_step + 10 * 8
    assert float(str(about["ratio"])) == pytest.approx(4, rel=0.3)
    assert float(str(about["mb_s"])) == pytest.approx(2.5, rel=0.5)
    (link,) = rank.links.slow
    assert (link.rack, link.rank, link.since_step) == (1, 3, about["since_step"])
    rank.rounds(12, 100 * MS)
    assert [type(note.event) for note in rank.notes] == [LinkSlow, LinkSlowOver]
    assert rank.notes[1].event.fields()["since_step"] == about["since_step"]
    assert rank.links.slow == ()


def test_pulls_that_vary_by_less_than_a_factor_of_two_give_no_verdict() -> None:
    for after_ns, noise in ((160 * MS, 0.1), (100 * MS, 0.6)):
        rank = Rank()
        rank.rounds(60, 100 * MS, noise=0.1)
        rank.rounds(200, after_ns, noise=noise)
        assert rank.notes == []


def test_few_slow_pulls_are_not_reported_as_a_slow_link() -> None:
    rank = Rank()
    rank.rounds(40, 100 * MS)
    rank.rounds(3, 900 * MS)
    rank.rounds(40, 100 * MS)
    assert rank.notes == []


def test_time_is_divided_by_bytes() -> None:
    rank = Rank()
    for turn in range(60):
        times = 1 if turn < 30 else 5  # five times as much from here on
        rank.pulls({ONE: 100 * MS * times}, SIZE * times)
    assert rank.notes == []


def test_rack_pulled_beside_another_rack_is_not_reported_as_a_slow_link() -> None:
    """Rack 1 was always pulled from alone, and is beside rack 2 from then on: both take twice as
    long as each would alone, and a bit more."""
    rank = Rank()
    for turn in range(60):
        if turn < 30:
            rank.pulls({ONE: 100 * MS})
            rank.pulls({TWO: 100 * MS})
        else:
            rank.pulls({ONE: 230 * MS, TWO: 231 * MS})
    assert rank.notes == []


def test_a_slow_link_is_told_from_the_one_beside_it() -> None:
    rank = Rank()
    for turn in range(60):
        rank.pulls({ONE: 200 * MS if turn < 30 else 900 * MS, TWO: 201 * MS})
    assert [pair(note.event)[1]["from_rack"] for note in rank.notes] == [1]
    assert isinstance(rank.notes[0].event, LinkSlow)


def test_short_pulls_add_up_to_a_sample() -> None:
    rank = Rank()
    inflow_ns = SAMPLE_NS // 10
    rank.rounds(9, inflow_ns, noise=0)
    (inflow,) = rank.links._inflows.values()
    assert inflow.past.count == 0
    rank.rounds(1, inflow_ns, noise=0)
    assert inflow.past.count == 1


def test_a_link_that_never_rests_is_judged_all_the_same() -> None:
    rank = Rank()
    for turn in range(60):
        rank.links.begin(ONE, turn * SAMPLE_NS_MAX)
        if turn:
            rank.links.end(ONE, SIZE, "", turn, turn * SAMPLE_NS_MAX)
    (inflow,) = rank.links._inflows.values()
    assert inflow.past.count == 59


def test_a_pull_that_failed_is_no_sample_nor_is_one_of_a_rack_that_has_gone() -> None:
    rank = Rank()
    rank.rounds(30, 100 * MS)
    for _ in range(20):
        rank.pulls({ONE: 900 * MS}, size=0, error="no way there")
    assert rank.notes == []
    rank.links.begin(ONE, rank.now_ns)
    rank.links.keep([TWO])
    assert rank.links.end(ONE, SIZE, "", 9, rank.now_ns + SECOND) == []
    rank.rounds(30, 900 * MS)
    assert rank.notes == [], "its next life has a past of its own"


def test_a_rack_names_each_link_once_with_its_worst_rank() -> None:
    low, high = SlowLink(1, 0, 8, 2500, 999), SlowLink(1, 1, 16, 4000, 998)
    other = SlowLink(0, 0, 24, 2100, 998)
    assert worst_links([low, other, high]) == (other, high)
    rack = pace_of_rack([Pace(rank=0, links=(low, other)), Pace(rank=1, links=(high,))])
    assert rack.links == (other, high)
    assert verdict_of(rack).links == (SlowLink(0, 0, 24), SlowLink(1, 1, 16)), "a ratio is no news"
