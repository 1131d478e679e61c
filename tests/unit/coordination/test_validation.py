"""A well-formed message of another plan is answered with a sentence, before a machine indexes by
it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from mend.consensus.ballots import attempt_of
from mend.consensus.records import (
    RECORDS_FORMAT,
    Drop,
    Last,
    MomentFragments,
    Offer,
    Record,
    Snapshot,
)
from mend.coordination.messages import (
    CapturePart,
    Declined,
    Held,
    Hello,
    MergeProposal,
    Orders,
    Resume,
)
from mend.coordination.validation import (
    NAMED_MAX,
    describe,
    differences,
    hello_misfit,
    orders_misfit,
    plan_hash,
    rank_orders_misfit,
    rank_report_misfit,
    report_misfit,
    resume_misfit,
)
from mend.engine.checkpoint.checkpoint import differing_fact
from tests.unit.coordination.nouns import (
    FIRST,
    commit,
    digest,
    genesis,
    hello,
    lineage,
    log_of,
    member,
    offer,
    orders,
    rank_orders,
    rank_report,
    report,
    roster,
)

RANKS, FRAGMENTS = 2, 3
MINE = hello(1, ranks=RANKS, fragments=FRAGMENTS)


def test_a_hello_of_the_right_size_fits() -> None:
    assert hello_misfit(MINE, racks=2) == ""


def test_a_hello_that_cannot_be_seated() -> None:
    assert "racks=2, this job for racks=3: give every rack" in hello_misfit(MINE, racks=3)
    assert "1 lanes for 2 ranks" in hello_misfit(replace(MINE, seat=hello(1).seat), 2)
    few = replace(MINE, digests=MINE.digests[:2])
    assert hello_misfit(few, 2) == "it has not one digest per fragment and rank"
    short = (*MINE.digests[:2], MINE.digests[2][:1])
    assert "one digest per fragment and rank" in hello_misfit(replace(MINE, digests=short), 2)


def test_not_all_fragments_can_be_of_moments() -> None:
    for count, said in ((2, ""), (3, "no fragment of weights")):
        policy = replace(MINE.policy, moments=(MomentFragments(count, 24),))
        assert policy.of_weights == FRAGMENTS - count
        assert said in hello_misfit(replace(MINE, policy=policy), 2)


def whole_report(**changes: Any) -> str:
    return report_misfit(report(1, FRAGMENTS, **changes), member(1), MINE.policy)


def test_reports_of_another_plan() -> None:
    good = offer(1, fragment=2, ranks=RANKS)
    assert whole_report(offers=(good,), held=(Held(2, 1, 1, (digest(1), digest(2))),)) == ""
    assert "1 versions for 3 fragments" in whole_report(versions=(0,))
    assert "name of another rack" in whole_report(offers=(offer(0, ranks=RANKS),))
    assert "name of another rack" in whole_report(offers=(offer(1, ranks=RANKS, life=1),))
    assert "offer of fragment 3" in whole_report(offers=(replace(good, fragment=3),))
    assert "with checksums of 16 bytes" in whole_report(offers=(offer(1),))
    assert "one digest per rank" in whole_report(held=(Held(0, 1, 1, (digest(1),)),))
    assert "fragment 3 of 3" in whole_report(held=(Held(3, 1, 1, (digest(1), digest(2))),))
    assert "fragment 7 of 3" in whole_report(declined=(Declined(7, 0, "why"),))


def test_reports_of_a_rank_of_another_plan() -> None:
    part = CapturePart(0, 1, 0, 4, 10, 2, digest(1)[-32:], 0, "")
    for changes, said in (
        ({"parts": (part,), "held": (Held(2, 1, 1, (digest(1),)),)}, ""),
        ({"versions": (0, 0)}, "2 versions for 3 fragments"),
        ({"held": (Held(0, 1, 1, (digest(1), digest(2))),)}, "without its digest"),
        ({"parts": (replace(part, fragment=3),)}, "fragment 3 of 3"),
    ):
        assert said in rank_report_misfit(rank_report(1, **{"fragments": 3, **changes}), FRAGMENTS)


def unrooted(*records: Record) -> Orders:
    """From the start of the log, which need not begin as a log does."""
    return orders(1, records=records, last=len(records), decided=len(records))


def test_a_log_begins_with_genesis_also_one_that_this_rack_joins_later() -> None:
    begin = genesis(ranks=RANKS, fragments=FRAGMENTS)
    assert orders_misfit(unrooted(begin), MINE, begun=False) == ""
    headless = unrooted(roster(1, [0], RANKS))
    assert "begin with Genesis" in orders_misfit(headless, MINE, begun=False)
    assert orders_misfit(headless, MINE, begun=True) == "", "the chain hash says no to it"
    assert orders_misfit(replace(headless, prev=4), MINE, begun=False) == "", "a later piece"
    reborn = hello(1, ranks=RANKS, fragments=FRAGMENTS, life=1)
    assert orders_misfit(unrooted(begin), reborn, begun=False) == "", "a newcomer reads it all"


def proposal(*members: Offer, fragment: int = 0, attempt: int = 1) -> MergeProposal:
    return MergeProposal(fragment, 1, attempt, members)


ANEW = replace(
    lineage(FIRST, [], versions=[0] * FRAGMENTS), digests=((digest(1), digest(2)),) * FRAGMENTS
)
MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"records": (commit(1, [], fragment=3, ranks=RANKS),)}, "a Commit of fragment 3"),
    ({"records": (commit(1, [], ranks=3),)}, "with 3 digests"),
    ({"records": (Drop(3, (), "why"),)}, "a Drop of fragment 3"),
    ({"records": (genesis(ranks=RANKS, fragments=2),)}, "a Genesis of another plan"),
    ({"records": (genesis(ranks=1, fragments=FRAGMENTS),)}, "a Genesis of another plan"),
    (
        {"records": (replace(genesis(ranks=RANKS, fragments=FRAGMENTS), roster=genesis().roster),)},
        "a Genesis with other numbers of ranks",
    ),
    ({"records": (lineage(FIRST, [0]),)}, "a Lineage of another plan"),
    ({"records": (lineage(FIRST, [0], versions=[0] * FRAGMENTS),)}, "a Lineage of another plan"),
    (
        {"records": (replace(ANEW, members=genesis().roster),)},
        "a Lineage with other numbers of ranks",
    ),
    ({"records": (roster(1, [0], 1),)}, "a Roster with other numbers of ranks"),
    ({"offers": (offer(0, fragment=3, ranks=RANKS),)}, "an offer of fragment 3"),
    ({"offers": (offer(0),)}, "with checksums of 16 bytes"),
    (
        {"proposals": (proposal(offer(0, ranks=RANKS), attempt=0),)},
        "a MergeProposal of fragment 0, attempt 0",
    ),
    (
        {"proposals": (proposal(offer(0, ranks=RANKS), attempt=attempt_of(FIRST, 0)),)},
        f"a MergeProposal of fragment 0, attempt {FIRST << 8}",
    ),
    ({"proposals": (proposal(),)}, "a MergeProposal of fragment 0"),
    (
        {"proposals": (proposal(offer(0, ranks=RANKS), fragment=3),)},
        "a MergeProposal of fragment 3",
    ),
    ({"proposals": (proposal(offer(0)),)}, "with checksums of 16 bytes"),
    ({"proposals": (proposal(offer(0, fragment=1, ranks=RANKS)),)}, "of several fragments"),
]


@pytest.mark.parametrize(("changes", "said"), MISFITS, ids=[said for _, said in MISFITS])
def test_orders_of_another_plan(changes: dict[str, Any], said: str) -> None:
    assert said in orders_misfit(orders(1, **{"prev": 1, **changes}), MINE, begun=True)
    assert said in rank_orders_misfit(rank_orders(1, **changes), FRAGMENTS, RANKS)


def test_a_rank_is_not_told_of_fragments_that_it_has_not() -> None:
    assert rank_orders_misfit(rank_orders(1, discarded=((2, 5),)), FRAGMENTS, RANKS) == ""
    said = rank_orders_misfit(rank_orders(1, discarded=((3, 5),)), FRAGMENTS, RANKS)
    assert said == "fragment 3 of 3"


GOOD: list[Record] = [
    genesis(ranks=RANKS, fragments=FRAGMENTS),
    commit(1, [offer(0), offer(1)], fragment=2, ranks=RANKS),
    Drop(2, (), "why"),
    roster(1, [0], RANKS),
    ANEW,
]


def test_everything_that_fits_passes() -> None:
    member = offer(0, fragment=2, ranks=RANKS)
    fields: dict[str, Any] = {"offers": (member,), "proposals": (proposal(member, fragment=2),)}
    assert orders_misfit(orders(1, GOOD, **fields), MINE, begun=False) == ""
    assert rank_orders_misfit(rank_orders(1, GOOD, **fields), FRAGMENTS, RANKS) == ""


def test_all_differences_are_named_and_to_the_sender_without_the_right_value() -> None:
    lowest = hello(0, facts=(("model", "tiny"), ("lr", "0.1"), ("overlap_steps", "8")))
    for facts, said, noted in (
        (
            (("model", "big"), ("lr", "9"), ("overlap_steps", "8")),
            "model is big there and not here; lr is 9 there and not here",
            "model is big there and tiny here; lr is 9 there and 0.1 here",
        ),
        (
            (("model", "tiny"), ("overlap_steps", "2")),
            "lr is absent there and not here; overlap_steps is 2 there and not here",
            "lr is absent there and 0.1 here; overlap_steps is 2 there and 8 here",
        ),
        ((*lowest.facts, ("x", "1")), "x is 1 there and not here", "x is 1 there and absent here"),
    ):
        assert describe(differences(lowest, hello(1, facts=facts))) == (said, noted)
    assert differences(lowest, hello(1, facts=lowest.facts)) == []
    older = differences(lowest, hello(1, facts=lowest.facts, staleness_max_rounds=7))
    assert describe(older)[0] == "staleness_max_rounds is 7 there and not here"


def test_a_setting_that_is_a_fact_and_in_the_policy_is_named_once() -> None:
    there = hello(1, facts=(("staleness_max_rounds", "7"),), staleness_max_rounds=7)
    found = differences(hello(0, facts=(("staleness_max_rounds", "2"),)), there)
    assert [difference.name for difference in found] == ["staleness_max_rounds"]


def test_a_refusal_names_so_many_differences_and_counts_the_rest() -> None:
    facts = [tuple((f"f{n}", value) for n in range(NAMED_MAX + 3)) for value in "ab"]
    said, noted = describe(differences(hello(0, facts=facts[0]), hello(1, facts=facts[1])))
    for text in (said, noted):
        assert text.count(" there ") == NAMED_MAX
        assert text.endswith("; and 3 more")


def test_a_parameter_that_one_rack_lacks_is_named_before_those_that_it_moves() -> None:
    """It said `param a.weight is 4x4 float32 0 there and not here`, which both racks have."""
    small = (("fragments", "2"), ("param a.weight", "4x4 float32 1"))
    large = (("fragments", "2"), ("param a.weight", "4x4 float32 0"), ("param b", "4 float32 1"))
    for mine, theirs in ((small, large), (large, small)):
        assert differences(hello(0, facts=mine), hello(1, facts=theirs))[0].name == "param b"
        assert differing_fact(mine, theirs).startswith("param b ")


def test_a_digest_of_the_shards_is_named_behind_the_parameters() -> None:
    """A rack without a bias was told a digest, and nothing of the bias."""
    mine = (("shards of rank 0", "1b"), ("param w", "4 float32 0"), ("param b", "2 float32 0"))
    without = (("shards of rank 0", "2c"), ("param w", "4 float32 0"))
    found = differences(hello(0, facts=mine), hello(1, facts=without))
    assert [difference.name for difference in found] == ["param b"]
    other = (("shards of rank 0", "3d"), ("param w", "4 bfloat16 0"), mine[2])
    found = differences(hello(0, facts=mine), hello(1, facts=other))
    assert [difference.name for difference in found] == ["param w", "shards of rank 0"]


def test_parameters_that_a_setting_moves_are_not_named() -> None:
    mine, theirs = ((("fragments", n), ("param a", f"4 float32 {n}")) for n in "24")
    found = differences(hello(0, facts=mine), hello(1, facts=theirs))
    assert [difference.name for difference in found] == ["fragments"]


def test_equal_facts_equal_plan() -> None:
    assert plan_hash(hello(0)) == plan_hash(hello(1))
    assert plan_hash(hello(0)) != plan_hash(hello(0, facts=(("model", "big"),)))


# -------------------------------------------------------------- snapshots


def shown(**changes: object) -> Snapshot:
    log = log_of(genesis(fragments=2), commit(1, [offer(0, fragment=1)], fragment=1))
    log.decide(2)
    return replace(log.snapshot(), **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"format": RECORDS_FORMAT + 1}, f"a snapshot of format {RECORDS_FORMAT + 1}"),
        ({"index": 7}, "a snapshot of record 7 in place of 2"),
        ({"lineages": ()}, "a snapshot of record 2 in place of 2"),
        ({"versions": (1,)}, "a snapshot of another plan"),
        ({"versions": (1, -1)}, "a snapshot of another plan"),
        ({"norms": ()}, "a snapshot of another plan"),
        ({"digests": ((), ())}, "a snapshot with other numbers of ranks"),
        ({"last": (Last(member(0), 2, 1, 1, 1),)}, "fragment 2 of 2"),
    ],
)
def test_a_snapshot_of_another_job_is_not_read(changes: dict[str, object], said: str) -> None:
    there = shown(**changes)
    body = replace(orders(1), prev=2, last=2, decided=2, snapshot=there)
    assert orders_misfit(body, hello(1, fragments=2), begun=False).startswith(said)
    assert bool(orders_misfit(body, hello(1, fragments=2), begun=False)) == bool(said)
    to_rank = replace(rank_orders(1), prev=2, snapshot=there)
    assert bool(rank_orders_misfit(to_rank, 2, 1)) == bool(said)


# ------------------------------------------------------------------ checkpoints


def resumed(
    rack: int, *, step: int = 9, of: int = 0, lockstep: bool = False, **changes: Any
) -> Hello:
    """A rack that has read a checkpoint; `of`: the rack whose digests it has."""
    fields: dict[str, Any] = {
        "lineage": "ab" * 32, "number": 2, "racks": (0, 1), "versions": (5,), "rounds": (7,),
    }  # fmt: skip
    resume = Resume(**{**fields, **changes})
    made = hello(rack, lockstep=lockstep)
    return replace(made, digests=hello(of).digests, resume=resume, resume_step=step)


def test_racks_with_one_checkpoint_begin_together() -> None:
    both = [resumed(0), resumed(1, step=8)]
    assert [resume_misfit(each, both) for each in both] == [None, None]
    lost = replace(hello(1), part_lost=True)
    assert resume_misfit(lost, [resumed(0), lost]) is None, "its part is lost: it copies"
    assert resume_misfit(hello(2), [resumed(0), hello(2)]) is None, "it is new"
    assert resume_misfit(hello(0), [hello(0), hello(1)]) is None


@pytest.mark.parametrize(
    ("other", "there", "here"),
    [
        (resumed(1, number=1), "it resumes checkpoint 1 of lineage abab", "checkpoint 2"),
        (resumed(1, lineage="cd" * 32), "it resumes checkpoint 2 of lineage cdcd", "ababab"),
        (resumed(1, versions=(6,)), "is of versions (6,), or damaged", "at versions (5,)"),
        (resumed(1, rounds=(8,)), "or damaged", "ababab"),
        (resumed(1, of=1), "or damaged", "ababab"),
        (resumed(1, lockstep=True, step=8), "at step 8", "at step 9"),
        (hello(1), "pass resume= on every rack", "checkpoint 2"),
        (hello(1, lockstep=True), "it resumes no checkpoint; in lockstep", "checkpoint 2"),
    ],
)
def test_a_rack_with_another_checkpoint_is_told_its_own_and_not_which_is_right(
    other: Hello, there: str, here: str
) -> None:
    """Nobody knows who says hello: the right one is for the log of this side."""
    first = resumed(0, lockstep=other.policy.lockstep)
    said, noted = resume_misfit(other, [first, other])
    assert there in said
    assert there in noted
    assert here in noted
    assert here not in said


def test_a_genesis_has_a_version_and_rounds_for_every_fragment_or_none() -> None:
    fits = replace(genesis(fragments=1), versions=(4,), rounds=(9,))
    good = orders(1, (fits,))
    assert orders_misfit(good, hello(0), begun=False) == ""
    for wrong in ({"versions": (4, 4)}, {"rounds": ()}, {"versions": (-1,)}):
        bad = orders(1, (fits,))
        bad = replace(bad, records=(replace(fits, **wrong),))
        assert orders_misfit(bad, hello(0), begun=False) == "a Genesis of another plan"
