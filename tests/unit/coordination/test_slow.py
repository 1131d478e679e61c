"""Paces in reports and orders: what is slow is told, by whom, since when; and it costs little."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from mend.coordination.events import Effect, Note, Timed
from mend.coordination.messages import SLOW_MAX, FailSlow, Pace, SlowLink
from mend.coordination.slow import OWN_PAST, PEERS, RackPaces, RankPace, pace_of_rack, sentence_of
from mend.detector import Cause, DetectorOptions
from mend.events.base import kind_of
from mend.events.kinds import RackSlow, RackSlowOver
from mend.types import MS
from tests.unit.coordination.nouns import report

REPORT_BYTES = 36
"""Most that a pace may add to a report, whatever it says."""


def driven(factors: list[float], tokens: int = 512) -> tuple[RankPace, list[Note]]:
    """A rank that makes steps of 100 ms times the factor, a little uneven."""
    rank, found = RankPace(1, 2, DetectorOptions()), list[Effect]()
    for step, factor in enumerate(factors, start=1):
        wobble = 1 + (step * 7 % 5 - 2) / 100
        found += rank.observe(Timed(step, round(100 * MS * factor * wobble), tokens))
    return rank, [effect for effect in found if isinstance(effect, Note)]


def test_onset_and_relief_are_noted_with_who_when_how_much_and_how_sure() -> None:
    rank, notes = driven([1.0] * 50 + [2.0] * 50 + [1.0] * 50)
    assert [kind_of(note.event) for note in notes] == ["fail-slow", "fail-slow-over"]
    onset, relief = (note.event.fields() for note in notes)
    assert (onset["slow_rack"], onset["slow_rank"], onset["against"]) == (1, 2, OWN_PAST)
    assert onset["since_step"] == 51
    assert onset["step"] in range(51, 61)
    assert onset["ratio"] == pytest.approx(2.0, abs=0.1) or onset["ratio"] > 1.5
    assert onset["probability"] > 0.99
    assert relief["since_step"] == 51
    assert relief["step"] in range(101, 111)
    assert rank.verdict == Pace(rank=2)


def test_time_is_divided_by_tokens() -> None:
    rank = RankPace(0, 0, DetectorOptions())
    for step in range(1, 101):
        tokens = 256 if step < 50 else 1024  # four times the work from here on
        assert rank.observe(Timed(step, tokens * MS, tokens)) == []
    assert rank.pace.time_ps == MS * 1000


def test_a_rack_takes_fewer_micro_batches_only_where_all_its_ranks_ask() -> None:
    rank = RankPace(0, 1, DetectorOptions())
    rank.observe(Timed(1, MS, 1, 8))
    assert (rank.pace.batch, rank.verdict.batch) == (8, 0), "it is no news that is sent at once"
    assert pace_of_rack([rank.pace, Pace(batch=6)]).batch == 6
    assert pace_of_rack([rank.pace, Pace()]).batch == 0
    rank.observe(Timed(2, MS, 1))
    assert rank.pace.batch == 0


def test_without_tokens_there_is_nothing_to_divide() -> None:
    rank, notes = driven([1.0] * 60, tokens=0)
    assert (rank.pace, notes) == (Pace(rank=2), [])


def test_only_the_verdict_is_news() -> None:
    fast, _ = driven([1.0] * 50)
    slow, _ = driven([1.0] * 50 + [2.0] * 10)
    slower, _ = driven([1.0] * 50 + [2.0] * 9 + [2.5])
    assert fast.verdict == Pace(rank=2)
    assert slow.verdict == slower.verdict == Pace(rank=2, slow_since=51)


def test_a_pace_adds_few_bytes_to_a_report() -> None:
    slow, _ = driven([1.0] * 50 + [2.0] * 10)
    slow.search.cause, slow.search.gemm_ns = Cause("compute", 63), 99 * MS
    assert slow.pace.cause
    assert 0 < len(msgspec.msgpack.encode(slow.pace)) <= REPORT_BYTES


def test_a_rack_is_as_fast_as_its_slowest_rank_and_names_the_worst() -> None:
    ranks = [
        Pace(rank=0, time_ps=10, margin_ppm=1),
        Pace(rank=1, time_ps=12, margin_ppm=2, slow_since=7, ratio_milli=1200, sure_milli=999),
        Pace(rank=2, time_ps=11, margin_ppm=3, slow_since=5, ratio_milli=2000, sure_milli=998),
    ]
    assert pace_of_rack(ranks) == Pace(2, 12, 2, 5, 2000, 998)
    assert pace_of_rack([]) == Pace()


def test_the_coordinator_tells_both_verdicts_and_notes_its_own() -> None:
    racks = RackPaces()
    paces = {rack: Pace(0, 1000, 10_000) for rack in range(3)}
    paces[3] = Pace(1, 2000, 10_000, slow_since=5, ratio_milli=2000, sure_milli=999)
    (note,) = racks.compare(paces, dict.fromkeys(paces, 40))
    assert note.event == RackSlow(slow_rack=3, against=PEERS, step=40, ratio=2.0)
    own, peers = FailSlow(3, 1, True, 5, 20, 999), FailSlow(3, 1, False, 40, 20)
    assert racks.judged == (own, peers)
    assert sentence_of(own) == (
        "rack 3 is slow: 2.0x the time per token of its own past, since its step 5 (99.9 % sure)"
    )
    assert "the median of the others, seen at its step 40" in sentence_of(peers)
    (note,) = racks.compare({rack: Pace(0, 1000, 10_000) for rack in range(4)}, {3: 60})
    assert note.event == RackSlowOver(slow_rack=3, against=PEERS, step=60, since_step=40)
    assert racks.judged == ()


def test_a_rack_that_leaves_is_not_judged() -> None:
    racks, slow = RackPaces(), Pace(0, 1000, 10_000, slow_since=5, ratio_milli=2000)
    said = {rack: report(1, pace=slow, leaving=rack == 1) for rack in (0, 1)}
    racks.look(said)
    assert [each.rack for each in racks.judged] == [0]


def test_the_coordinator_tells_slow_links_by_direction_behind_slow_racks() -> None:
    racks = RackPaces()
    links = SlowLink(2, 1, 30, 4040, 999), SlowLink(7, 0, 30, 9000, 999)
    paces = {0: Pace(links=links), 1: Pace(links=links[:1]), 2: Pace(slow_since=5, links=links[:1])}
    assert racks.compare(paces, dict.fromkeys(paces, 40)) == []
    rack, *told = racks.judged
    assert (rack.rack, rack.of_link) == (2, False)
    link = FailSlow(2, 1, True, 30, 40, 999, "link", 0, of_link=True)
    assert told == [link, replace(link, link_to=1)], "no link to itself, nor from who is not there"
    many = {
        rack: Pace(links=tuple(SlowLink(other, 0, 9, 3000, 999) for other in range(64)))
        for rack in range(64)
    }
    racks.compare(many, dict.fromkeys(many, 40))
    assert len(racks.judged) == SLOW_MAX


def test_a_cause_is_told_in_words_and_one_that_no_detector_says_is_unknown() -> None:
    verdict = FailSlow(3, 1, True, 5, 20, 999, "compute")
    assert sentence_of(verdict).startswith(
        "rack 3 is slow by the compute of rank 1 (its device, its clock or a neighbour): 2.0x "
    )
    link = replace(verdict, cause="link", link_to=0)
    assert sentence_of(link).startswith("rack 3 is slow by its link to rack 0: ")
    for odd in ("unknown", "\x1b[2J"):
        said = sentence_of(replace(verdict, cause=odd))
        assert said.startswith("rack 3 is slow for an unknown reason: ")
    assert sentence_of(replace(verdict, cause="")).startswith("rack 3 is slow: ")


def test_slow_rank_with_a_known_cause_is_named_when_all_are_slow() -> None:
    """The others wait for it, and may seem slower still."""
    ranks = [Pace(0, 12, 2, 5, 2100, 998, "unknown"), Pace(1, 11, 2, 5, 2000, 998, "input")]
    assert (pace_of_rack(ranks).rank, pace_of_rack(ranks).cause) == (1, "input")


def test_a_rack_that_was_slow_from_the_start_computes_more_slowly_than_its_peers() -> None:
    racks = RackPaces()
    paces = {r: Pace(0, 3_000 if r == 1 else 1_000, 10_000, gemm_ns=3_000 if r == 1 else 1_000)
             for r in range(3)}  # fmt: skip
    racks.compare(paces, dict.fromkeys(range(3), 40))
    assert [(v.rack, v.own_past, v.cause) for v in racks.judged] == [(1, False, "compute")]
    racks.compare({r: replace(pace, gemm_ns=0) for r, pace in paces.items()}, {})
    assert [v.cause for v in racks.judged] == [""], "nothing was measured"
