"""A round: it opens, waits, closes, gathers, and commits only what survives whatever comes."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from mend.protocol.grace import Mean
from mend.protocol.messages import Commit, Drop, Offer, Policy
from mend.protocol.round import ATTEMPT_STALL_NS, Phase, Round, Scene
from mend.terms import MS, SECOND, WITNESS, Member

NOW = 100 * SECOND
POLICY = Policy(2, 1, 2, 1, 200 * MS, False, 2, 8, 3, SECOND)
POLICY_K2 = replace(POLICY, quorum_min_learners=2)
POLICY_LOCK = replace(POLICY, lockstep=True)
POLICY_ADAPTIVE = replace(POLICY, grace_ns=-1)
BITS, OTHER = ("aa",), ("bb",)


def offer(rack: int, base: int = 5, applied: int | None = None, seq: int = 1) -> Offer:
    member = Member(rack, 100 + rack)
    return Offer(member, 0, seq, base, 16, 100, 8, ("cc",), base if applied is None else applied)


def scene(**changes: object) -> Scene:
    """Two racks and a witness at version 5; nothing offered yet."""
    calm = Scene(
        version=5, voters=frozenset({0, 1, WITNESS}), policy=POLICY, offers=(), arrived=(),
        declined=frozenset(), contributors=frozenset({0, 1}), live=frozenset({0, 1}), held={},
        step_ns=10 * MS,
    )  # fmt: skip
    return dataclasses.replace(calm, **changes)


def both(**changes: object) -> Scene:
    return scene(offers=(offer(0), offer(1)), arrived=(offer(0), offer(1)), **changes)


@pytest.fixture
def fresh() -> Round:
    return Round(0, Mean(), Mean())


def gathering(fresh: Round) -> Round:
    assert fresh.advance(both(), NOW) is None
    assert fresh.phase is Phase.GATHER
    return fresh


def test_without_offers_nothing_opens(fresh: Round) -> None:
    assert fresh.advance(scene(), NOW) is None
    assert fresh.phase is Phase.IDLE


def test_a_late_offer_alone_opens_nothing(fresh: Round) -> None:
    late = offer(1, base=4)
    fresh.advance(scene(offers=(late,), arrived=(late,)), NOW)
    assert fresh.phase is Phase.IDLE


def test_a_late_offer_is_merged_once_its_rack_trains_on_the_newest_version(fresh: Round) -> None:
    caught_up = offer(1, base=4, applied=5)
    known = scene(offers=(caught_up,), arrived=(caught_up,))
    fresh.advance(known, NOW)
    fresh.advance(known, NOW + SECOND)
    assert [o.member.rack for o in fresh.members] == [1]


def test_when_all_are_in_the_window_is_not_waited_for(fresh: Round) -> None:
    gathering(fresh)
    assert fresh.closed_by == "all-in"
    assert [o.member.rack for o in fresh.members] == [0, 1]


def test_the_window_is_waited_for_a_rack_that_is_not_in_and_then_closed(fresh: Round) -> None:
    alone = scene(offers=(offer(0),), arrived=(offer(0),))
    fresh.advance(alone, NOW)
    assert fresh.deadline_ns(alone) == NOW + 200 * MS
    fresh.advance(alone, NOW + 199 * MS)
    assert fresh.phase is Phase.OPEN
    assert fresh.why == "waiting for rack 1"
    fresh.advance(alone, NOW + 200 * MS)
    assert fresh.closed_by == "grace-over, without rack 1"


def test_a_dead_rack_and_one_that_declined_are_not_waited_for(fresh: Round) -> None:
    alone = scene(offers=(offer(0),), arrived=(offer(0),), live=frozenset({0}))
    fresh.advance(alone, NOW)
    assert fresh.closed_by == "all-in"
    other = Round(0, Mean(), Mean())
    other.advance(dataclasses.replace(alone, live=frozenset({0, 1}), declined=frozenset({1})), NOW)
    assert other.closed_by == "all-in"


def test_fewer_than_k_offers_are_never_committed(fresh: Round) -> None:
    alone = scene(offers=(offer(0),), arrived=(offer(0),), policy=POLICY_K2)
    for later in (0, SECOND, 1000 * SECOND):
        assert fresh.advance(alone, NOW + later) is None
    assert fresh.phase is Phase.OPEN
    assert fresh.why == "1 of 2 offers have arrived, waiting for rack 1"


def test_lockstep_knows_no_clock_and_no_old_offer(fresh: Round) -> None:
    old = offer(1, base=4, applied=5)
    alone = scene(offers=(offer(0), old), arrived=(offer(0), old), policy=POLICY_LOCK)
    fresh.advance(alone, NOW)
    fresh.advance(alone, NOW + 1000 * SECOND)
    assert fresh.phase is Phase.OPEN
    fresh.advance(both(policy=POLICY_LOCK), NOW + 1001 * SECOND)
    assert fresh.closed_by == "lockstep"


def test_one_result_is_no_commit_when_a_quorum_could_miss_it(fresh: Round) -> None:
    """Hold before decide: {1, witness} could decide without rack 0, so rack 1 must hold it too."""
    gathering(fresh)
    assert fresh.advance(both(held={0: (1, BITS)}), NOW + MS) is None
    commit = fresh.advance(both(held={0: (1, BITS), 1: (1, BITS)}), NOW + 2 * MS)
    assert isinstance(commit, Commit)
    assert commit.version == 6
    assert commit.digests == BITS
    assert [share.member.rack for share in commit.members] == [0, 1]


def test_results_of_an_earlier_attempt_do_not_count(fresh: Round) -> None:
    gathering(fresh)
    fresh.attempt = 2
    assert fresh.advance(both(held={0: (1, BITS), 1: (1, BITS)}), NOW) is None


def test_unequal_results_are_a_fault_and_a_new_attempt(fresh: Round) -> None:
    gathering(fresh)
    assert fresh.advance(both(held={0: (1, BITS), 1: (1, OTHER)}), NOW + MS) is None
    assert fresh.attempt == 2
    assert "2 different results" in fresh.faults[0]


def test_a_member_whose_bytes_are_gone_is_left_out_of_the_next_attempt(fresh: Round) -> None:
    gathering(fresh)
    without = dataclasses.replace(both(), arrived=(offer(0),))
    fresh.advance(without, NOW + ATTEMPT_STALL_NS)
    assert [o.member.rack for o in fresh.members] == [0]
    assert fresh.attempt == 2


def test_offers_that_are_too_old_are_dropped_with_a_commit_or_alone(fresh: Round) -> None:
    ancient = offer(1, base=2, applied=5)
    mixed = scene(offers=(offer(0), ancient), arrived=(offer(0),), live=frozenset({0}))
    fresh.advance(mixed, NOW)
    commit = fresh.advance(
        dataclasses.replace(mixed, held={0: (1, BITS), 1: (1, BITS)}), NOW + SECOND
    )
    assert isinstance(commit, Commit)
    assert [ended.member.rack for ended in commit.dropped] == [1]
    only = Round(0, Mean(), Mean()).advance(scene(offers=(ancient,)), NOW)
    assert isinstance(only, Drop)
    assert [ended.member.rack for ended in only.dropped] == [1]


def test_bytes_under_way_extend_an_adaptive_window(fresh: Round) -> None:
    flying = scene(offers=(offer(0), offer(1)), arrived=(offer(0),), policy=POLICY_ADAPTIVE)
    fresh.advance(flying, NOW)
    half_a_period = 4 * 10 * MS
    assert fresh.deadline_ns(flying) == NOW + half_a_period
