"""What ranks add up to is made anew as seldom as possible, and never too seldom."""

from __future__ import annotations

import random

from msgspec.structs import replace

from mend.consensus.records import checksums_of, merge_member_of
from mend.coordination.messages import (
    Bad,
    BarrierState,
    CapturePart,
    Held,
    OfferId,
    RankReport,
    Sliced,
)
from mend.coordination.rank_reports import RankReports, aggregate
from tests.unit.coordination.nouns import digest, member, rank_report

RANKS, FRAGMENTS = 3, 2


def drawn(chance: random.Random, known: RankReport, rank: int) -> RankReport:
    """The next word of a rank. Values are few, so that ranks often say the same."""
    few = chance.randrange
    offers = [OfferId(member(few(2)), few(FRAGMENTS), few(2)) for _ in range(few(3))]
    parts = {}
    for _ in range(few(3)):
        fragment, applied = few(FRAGMENTS), few(2)
        checksum = chance.choice(["", digest(rank)[-32:]])
        declined = chance.choice(["", "", "nan"]) if not checksum else ""
        # As by protocol: of one capture only `applied` changes behind the checksum.
        parts[fragment] = CapturePart(
            fragment, few(2), 0, 4, 10 * few(2), 2, checksum, applied, declined,
        )  # fmt: skip
    changes = {
        "got": tuple(dict.fromkeys(offers)),
        "parts": tuple(parts[p] for p in sorted(parts)),
        "held": tuple(
            Held(p, 1, 1 + few(2), (digest(10 * rank + few(2)),)) for p in range(few(FRAGMENTS))
        ),
        "versions": tuple(few(3) - 1 for _ in range(FRAGMENTS)),
        "leaving": few(2) == 1,
        "hurry": few(2) == 1,
        "idle": few(2) == 1,
        "bad": tuple(Bad(each, chance.choice("ab")) for each in offers[:1]),
        "barrier": chance.choice(
            [
                None,
                BarrierState(1, "a", False),
                BarrierState(1, "a", True),
                BarrierState(1, "b", False),
            ]
        ),
        "step_ns": few(5),
        "slices": tuple(
            Sliced(p, 1, 1 + few(2), few(3), few(3) == 0) for p in range(few(FRAGMENTS + 1))
        ),
    }
    chosen = chance.sample(sorted(changes), few(4))
    said = {name: changes[name] for name in chosen}
    return replace(known, serial=known.serial + 1, step=known.step + few(2), **said)


def test_an_aggregate_is_that_of_the_newest_reports_whatever_came_before() -> None:
    """Against the plain function, which looks at all of them."""
    for seed in range(40):
        chance = random.Random(seed)
        reports = RankReports(member(1), RANKS, FRAGMENTS)
        newest = {rank: rank_report(0, FRAGMENTS) for rank in range(RANKS)}
        for now_ns in range(60):
            rank = chance.randrange(RANKS)
            newest[rank] = drawn(chance, newest[rank], rank)
            reports.take(rank, newest[rank], now_ns)
            whole = aggregate(member(1), reports.ordered(), RANKS, FRAGMENTS)
            assert reports.aggregate == whole, (seed, now_ns)
            assert reports.step_ns == max(each.step_ns for each in reports.newest.values())


def test_capture_parts_of_many_ranks_are_news_at_the_first_and_the_last_only() -> None:
    ranks = 64
    reports = RankReports(member(1), ranks, 1)
    known = [replace(rank_report(0, 1), serial=1) for _ in range(ranks)]
    for rank, report in enumerate(known):
        reports.take(rank, report, 0)
    before = reports.news
    for rank, report in enumerate(known):
        part = CapturePart(0, 1, 0, 4, 10, 2, digest(rank)[-32:], 0, "")
        reports.take(rank, replace(report, serial=2, parts=(part,), step=9), 1)
    assert reports.news - before == 2, "when the first has a part, and when all have it"
    assert len(reports.aggregate.offers) == 1
    assert reports.aggregate.offers[0].checksums == checksums_of(
        digest(rank)[-32:] for rank in range(ranks)
    )


def test_a_report_that_says_nothing_new_is_no_news() -> None:
    reports = RankReports(member(1), 1, 1)
    first = replace(rank_report(0, 1), serial=1)
    reports.take(0, first, 5)
    before = reports.news
    reports.take(0, replace(first, serial=2, step=7, step_ns=8, heard=3), 6)
    assert (reports.news, reports.step, reports.step_ns) == (before, 7, 8)
    reports.take(0, replace(first, serial=1, leaving=True), 7)
    assert not reports.aggregate.leaving, "an old report, that came late"
    assert reports.all_heard_since(6), "but the rank was heard"
    assert not reports.all_heard_since(7)


def test_slices_are_merged_on_all_ranks_and_fail_on_one() -> None:
    merged, failed = Sliced(0, 1, 1, 1), Sliced(1, 1, 1, failed=True)
    said = [(merged,), (merged, failed), ()]
    ranks = [rank_report(1, FRAGMENTS, slices=each) for each in said]
    assert aggregate(member(1), ranks, RANKS, FRAGMENTS).slices == (failed,)
    ranks[2] = rank_report(2, FRAGMENTS, slices=(Sliced(0, 1, 1, 2),))
    assert aggregate(member(1), ranks, RANKS, FRAGMENTS).slices == (merged, failed)


def test_signs_of_an_offer_are_those_of_all_ranks() -> None:
    parts = [
        CapturePart(0, 1, 0, 4, 10, 2, digest(rank)[-32:], 0, "", along=10 * rank, against=5 - rank)
        for rank in range(RANKS)
    ]
    ranks = [rank_report(rank, FRAGMENTS, parts=(each,)) for rank, each in enumerate(parts)]
    (made,) = aggregate(member(1), ranks, RANKS, FRAGMENTS).offers
    assert (made.along, made.against) == (
        sum(each.along for each in parts),
        sum(each.against for each in parts),
    )
    named = merge_member_of(made)
    assert (named.along, named.against) == (made.along, made.against)


def test_ranks_that_took_unequal_units_make_no_offer() -> None:
    """They have counted other rows; the leader ends the rack."""
    parts = [
        CapturePart(0, 1, 0, 4, 10, 2, digest(rank)[-32:], 0, "", units=8 + (rank == 1))
        for rank in range(RANKS)
    ]
    ranks = [rank_report(rank, FRAGMENTS, parts=(each,)) for rank, each in enumerate(parts)]
    whole = aggregate(member(1), ranks, RANKS, FRAGMENTS)
    assert whole.offers == ()
    assert "8 and 9" in whole.unequal
    assert "up to step 4" in whole.unequal
    alike = [rank_report(rank, FRAGMENTS, parts=(parts[0],)) for rank in range(RANKS)]
    assert aggregate(member(1), alike, RANKS, FRAGMENTS).unequal == ""
