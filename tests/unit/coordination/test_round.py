"""One fragment from version to version + 1: when a round opens, closes, tries again and commits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from mend.consensus.ballots import ATTEMPT_LAST
from mend.consensus.records import Absent, Commit, Drop, Ended, Offer
from mend.coordination.grace import Mean
from mend.coordination.messages import SLICES_EACH, Sliced
from mend.coordination.round import (
    ATTEMPT_STALL_NS,
    ATTEMPT_STALL_NS_MAX,
    ATTEMPTS_MAX,
    Phase,
    Round,
    RoundInputs,
)
from mend.types import MS, SECOND, WITNESS
from tests.unit.coordination.nouns import digest, member, offer, policy, share

GRACE_NS = 400 * MS
GOOD, BAD = (digest(1),), (digest(2),)


def new_round() -> Round:
    return Round(0, Mean(), Mean())


def inputs(*offers: Offer, racks: int = 3, arrived: tuple[Offer, ...] | None = None,
          version: int = 0, k: int = 1, grace_ns: int = GRACE_NS, staleness_max_rounds: int = 2,
          lockstep: bool = False, expected: tuple[int, ...] = ()) -> RoundInputs:  # fmt: skip
    """All racks live and contributing, no witness; every offer has arrived unless it is said."""
    everybody = frozenset(range(racks))
    fresh = tuple(each for each in offers if version - each.base <= staleness_max_rounds)
    return RoundInputs(
        version=version, voters=everybody,
        policy=policy(racks, merge_min_racks=k, grace_ns=grace_ns,
                      staleness_max_rounds=staleness_max_rounds,
                      lockstep=lockstep, expected=expected),
        offers=offers, arrived=fresh if arrived is None else arrived, declined=frozenset(),
        contributors=everybody, live=everybody, held={}, step_ns=50 * MS,
        seats=racks,
    )  # fmt: skip


def held(
    *racks: int, attempt: int = 1, digests: tuple[str, ...] = GOOD
) -> dict[int, tuple[int, tuple[str, ...]]]:
    return dict.fromkeys(racks, (attempt, digests))


def gathering(*offers: Offer, **changes: int) -> tuple[Round, RoundInputs]:
    """A round whose members are fixed at 0 ns."""
    round_, all_in = new_round(), inputs(*offers, **changes)
    assert round_.advance(replace(all_in, live=frozenset(o.member.rack for o in offers)), 0) is None
    assert round_.phase is Phase.PROPOSED
    return round_, all_in


# -------------------------------------------------------------- opening


def test_a_late_offer_alone_opens_nothing() -> None:
    """It was made on an older version, and its rack has not trained on this one yet."""
    round_ = new_round()
    round_.advance(inputs(offer(0, base=1, applied=1), version=2), 0)
    assert round_.phase is Phase.IDLE
    round_.advance(inputs(offer(0, base=1, applied=2), version=2), 0)
    assert round_.phase is Phase.OPEN


def test_an_offer_that_somebody_made_on_this_version_opens_for_late_ones_too() -> None:
    round_, both = new_round(), inputs(offer(0, base=1), offer(1, base=2), racks=2, version=2)
    round_.advance(both, 0)
    assert round_.phase is Phase.PROPOSED
    assert round_.members == both.offers


def test_a_refused_capture_opens_a_round_but_brings_nothing_into_it() -> None:
    round_ = new_round()
    round_.advance(replace(inputs(), declined=frozenset({1})), 0)
    assert round_.phase is Phase.OPEN
    assert round_.why == "0 of 1 offers have arrived, waiting for racks 0,2"


def test_an_offer_that_nobody_else_holds_yet_is_told_apart_from_one_that_was_not_made() -> None:
    round_ = new_round()
    round_.advance(inputs(offer(0), arrived=()), 0)
    assert round_.why == (
        "0 of 1 offers have arrived, too few racks hold the payload of rack 0, "
        "waiting for racks 1,2"
    )


# -------------------------------------------------------------- closing


def test_a_slow_rack_that_is_mitigated_is_not_waited_for_unless_all_are() -> None:
    round_, two = new_round(), replace(inputs(offer(0), offer(2)), mitigated=frozenset({1}))
    round_.advance(two, 0)
    assert round_.phase is Phase.PROPOSED
    assert (round_.closed_by, round_.detail) == ("slow-left", ["without rack 1"])
    round_, all_slow = new_round(), replace(two, mitigated=frozenset(range(3)))
    round_.advance(all_slow, 0)
    assert (round_.phase, round_.waiting) == (Phase.OPEN, {1})
    assert round_.hidden_ns == 2 * 50 * MS, "the overlap of two steps"
    round_.advance(replace(all_slow, declined=frozenset({1})), 0)
    assert (round_.phase, round_.waiting) == (Phase.PROPOSED, frozenset())


@pytest.mark.parametrize("left_out", ["declined", "not a contributor"])
def test_a_round_that_a_live_rack_is_not_in_is_not_all_in(left_out: str) -> None:
    """It waits for nobody, and said all-in: whoever counted those believed all work was merged."""
    round_, seen = new_round(), inputs(offer(0), offer(2))
    if left_out == "declined":
        seen = replace(seen, declined=frozenset({1}))
    else:  # it is leaving, or it came and copies what is decided
        seen = replace(seen, contributors=frozenset({0, 2}))
    round_.advance(seen, 0)
    assert round_.phase is Phase.PROPOSED
    assert (round_.closed_by, round_.detail) == ("rest-in", ["nothing from rack 1"])


def test_a_round_closes_as_soon_as_the_expected_racks_are_in() -> None:
    round_ = new_round()
    round_.advance(inputs(offer(0), expected=(0, 2)), 0)
    assert round_.why == "waiting for rack 2"
    round_.advance(inputs(offer(0), offer(2), expected=(0, 2)), 1)
    assert round_.phase is Phase.PROPOSED
    assert (round_.closed_by, round_.detail) == ("expected-in", ["without rack 1"])
    everybody = new_round()
    everybody.advance(inputs(offer(0), offer(1), offer(2), expected=(0, 2)), 0)
    assert (everybody.closed_by, everybody.detail) == ("all-in", ["3 of 3 racks"])


def test_grace_is_counted_from_when_k_are_in() -> None:
    round_, one, two = new_round(), inputs(offer(0), k=2), inputs(offer(0), offer(2), k=2)
    round_.advance(one, 0)
    assert round_.why == "1 of 2 offers have arrived, waiting for racks 1,2"
    assert round_.open_for == ""
    assert round_.deadline_ns(one) is None, "nothing happens by itself before K are in"
    round_.advance(one, 100 * SECOND)
    round_.advance(two, 200 * SECOND)
    assert (round_.why, round_.open_for) == ("waiting for rack 1", "grace")
    assert round_.deadline_ns(two) == 200 * SECOND + GRACE_NS
    round_.advance(two, 200 * SECOND + GRACE_NS - 1)
    assert round_.phase is Phase.OPEN
    round_.advance(two, 200 * SECOND + GRACE_NS)
    assert round_.phase is Phase.PROPOSED
    assert (round_.closed_by, round_.detail) == ("grace-over", ["without rack 1"])
    assert (round_.why, round_.open_for) == (
        "no rack has the result yet: waiting for racks 0,1,2",
        "",
    )
    assert round_.members == two.offers


def test_below_k_again_starts_grace_again() -> None:
    """An offer that stops counting as arrived (its holder died) takes its grace with it."""
    round_, one, two = new_round(), inputs(offer(0), k=2), inputs(offer(0), offer(1), k=2)
    round_.advance(two, 0)
    round_.advance(one, GRACE_NS)
    assert round_.phase is Phase.OPEN
    round_.advance(two, 2 * GRACE_NS)
    assert round_.deadline_ns(two) == 3 * GRACE_NS


def test_round_does_not_close_with_fewer_than_k_offers() -> None:
    round_ = new_round()
    for now_ns in (0, SECOND, 1000 * SECOND):
        assert round_.advance(inputs(offer(0), offer(1), k=3), now_ns) is None
        assert round_.phase is Phase.OPEN


def test_k_is_not_more_than_there_are_contributors() -> None:
    """Of three racks with K = 3 one has left: two are all there can be."""
    round_, two = new_round(), inputs(offer(0), offer(1), k=3)
    round_.advance(replace(two, contributors=frozenset({0, 1})), 0)
    assert round_.phase is Phase.PROPOSED


def test_an_offer_under_way_does_not_count_but_is_waited_for_longer() -> None:
    first, second = offer(0), offer(1)
    round_, both = new_round(), inputs(first, second, racks=2, arrived=(first,), grace_ns=-1)
    for mean in (round_.quorum_time, round_.sync_time):
        mean.observe(200 * MS)
    round_.advance(both, 0)
    # half of the 8 steps of 50 ms until the next capture; with nothing under way a quarter of a gap
    assert round_.deadline_ns(both) == 200 * MS
    assert round_.deadline_ns(replace(both, offers=(first,))) == 100 * MS
    round_.advance(both, 200 * MS)
    assert round_.members == (first,)


def moving(rack: int, norm: float, seq: int = 1) -> Offer:
    return msgspec.structs.replace(offer(rack, seq), norm=norm)


def test_rack_without_rows_counts_neither_for_k_nor_for_the_window() -> None:
    alone = inputs(offer(0), racks=2, k=2)
    assert new_round().advance(alone, 0) is None
    round_ = new_round()
    round_.advance(alone, 0)
    assert (round_.phase, round_.why) == (
        Phase.OPEN, "1 of 2 offers have arrived, waiting for rack 1"
    )  # fmt: skip
    round_.advance(replace(alone, without_rows=frozenset({1})), 1)
    assert (round_.phase, round_.members, round_.closed_by) == (
        Phase.PROPOSED, (offer(0),), "rest-in"
    )  # fmt: skip


def test_when_nobody_else_is_left_the_round_begins_anew() -> None:
    round_, all_in = gathering(offer(1))
    assert round_.advance(replace(all_in, bad={(member(1), 1): "NaN"}), 1) is not None
    assert round_.advance(inputs(), 2) is None
    assert round_.phase is Phase.IDLE


def test_rack_that_moves_absurdly_far_ends_when_the_round_closes() -> None:
    """Per step: an offer of two steps may move twice as far."""
    round_ = new_round()
    all_in = replace(inputs(moving(0, 20.0), moving(1, 20.1), moving(2, 1e-9)), norm_max=10.0)
    drop = round_.advance(all_in, 0)
    assert isinstance(drop, Drop)
    assert drop.diverged
    assert [ended.member.rack for ended in drop.dropped] == [1]
    assert drop.reason == (
        "rack 1 has diverged: its weights moved by 10.05 per step, the limit is 10"
    )
    rest = replace(all_in, offers=all_in.offers[::2], arrived=all_in.arrived[::2])
    round_.advance(replace(rest, live=frozenset({0, 2})), 1)
    assert [each.member.rack for each in round_.members] == [0, 2]


def test_where_all_move_far_that_is_how_training_goes() -> None:
    """A learning rate that came back from almost nothing must not end every rack."""
    round_ = new_round()
    assert (
        round_.advance(replace(inputs(moving(0, 50.0), moving(1, 60.0), racks=2), norm_max=1.0), 0)
        is None
    )
    assert round_.phase is Phase.PROPOSED


def test_result_that_comes_alone_has_nobody_to_agree_with_unless_its_rack_is_alone() -> None:
    one = replace(inputs(moving(0, 50.0), racks=2, grace_ns=0), norm_max=1.0)
    assert isinstance(new_round().advance(one, 0), Drop)
    last, round_ = replace(one, contributors=frozenset({0})), new_round()
    assert round_.advance(last, 0) is None
    assert round_.phase is Phase.PROPOSED


# -------------------------------------------------------------- lockstep


def test_lockstep_waits_for_all_racks_dead_or_alive() -> None:
    round_, two = new_round(), inputs(offer(0), offer(1), lockstep=True)
    dead = replace(two, live=frozenset({0, 1}))
    for now_ns in (0, 1000 * SECOND):
        round_.advance(dead, now_ns)
        assert round_.phase is Phase.OPEN
        assert (round_.why, round_.open_for) == ("waiting for rack 2", "lockstep")
        assert round_.deadline_ns(dead) is None, "lockstep knows no clock"
    round_.advance(inputs(offer(0), offer(1), offer(2), lockstep=True), 2000 * SECOND)
    assert (round_.closed_by, round_.detail) == ("lockstep", [])


def test_lockstep_merges_only_what_was_captured_on_this_version() -> None:
    round_ = new_round()
    round_.advance(inputs(offer(0, base=1), offer(1, base=0), racks=2, version=1, lockstep=True), 0)
    assert round_.phase is Phase.OPEN
    assert round_.why == "waiting for rack 1"


# -------------------------------------------------------------- too old


def test_staler_than_the_limit_is_dropped_by_the_commit() -> None:
    old, fresh = offer(1, 4, base=0), offer(0, 2, base=3)
    round_ = new_round()
    commit = round_.advance(
        replace(inputs(fresh, old, racks=2, version=3, grace_ns=0), held=held(0, 1)), 0
    )
    assert isinstance(commit, Commit)
    assert commit.members == (share(fresh),)
    assert commit.dropped == (Ended(member(1), 4),)


def test_too_old_offers_count_towards_k() -> None:
    """Their racks have done their part; waiting for K without them could be for ever."""
    round_ = new_round()
    round_.advance(
        inputs(offer(0, base=5), offer(1, base=0), racks=2, version=5, k=2, grace_ns=0), 0
    )
    assert round_.phase is Phase.PROPOSED
    assert round_.members == (offer(0, base=5),)


def test_nothing_but_too_old_offers_is_dropped_at_once() -> None:
    """Found by seeds of the simulator: with nothing to commit they stayed open for ever."""
    round_ = new_round()
    record = round_.advance(inputs(offer(0, 3), offer(2, 5), version=4), 0)
    assert record == Drop(
        0, (Ended(member(0), 3), Ended(member(2), 5)), "older than staleness_max_rounds"
    )
    assert round_.phase is Phase.IDLE


# -------------------------------------------------------------- gathering


def test_a_commit_needs_bytes_that_meet_every_quorum() -> None:
    """Racks 0 and 1 with a witness: what only one of them holds may be lost with it."""
    round_, all_in = gathering(offer(0), offer(1), racks=2)
    all_in = replace(all_in, voters=frozenset({0, 1, WITNESS}))
    assert round_.advance(replace(all_in, held=held(0)), 0) is None
    assert round_.why == "rack 0 has the result, too few to decide it: waiting for rack 1"
    commit = round_.advance(replace(all_in, held=held(0, 1)), 0)
    assert commit == Commit(
        0, 1, (share(offer(0)), share(offer(1))), (), GOOD, "all-in", "2 of 2 racks"
    )


def test_round_says_whose_result_it_waits_for_and_what_to_do_about_who_is_silent() -> None:
    round_, all_in = gathering(offer(0), offer(1))
    round_.advance(all_in, 0)
    assert round_.why == "no rack has the result yet: waiting for racks 0,1,2"
    alone = replace(all_in, live=frozenset({0}), contributors=frozenset({0}), held=held(0))
    round_.advance(alone, 0)
    assert round_.why == (
        "rack 0 has the result, too few to decide it: waiting for racks 1,2, silent: racks 1,2 "
        "(start again, or `mend retire 1` or `mend retire 2`)"
    )
    both = replace(alone, voters=frozenset(range(5)), held=held(0, 1))
    round_.advance(both, 0)
    assert round_.why.startswith("racks 0,1 have the result, too few to decide it: waiting for")


def test_members_are_fixed_once_it_gathers() -> None:
    round_, _ = gathering(offer(0), offer(1))
    late = inputs(offer(0, applied=1), offer(1), offer(2))
    assert round_.advance(late, SECOND) is None
    proposal = round_.proposal(0)
    assert proposal.members == (offer(0), offer(1))


def test_a_result_of_another_attempt_does_not_count() -> None:
    round_, all_in = gathering(offer(0), offer(1), racks=2)
    assert round_.advance(replace(all_in, held=held(0, 1, attempt=2)), 0) is None
    assert round_.advance(replace(all_in, held=held(0, 1, attempt=0)), 0) is None
    assert round_.advance(replace(all_in, held=held(0, 1)), 0) is not None


def test_differing_results_are_a_fault_and_asked_for_again() -> None:
    round_, all_in = gathering(offer(0), offer(1), racks=2)
    voters = frozenset({0, 1, WITNESS})
    differ = replace(all_in, voters=voters, held=held(0) | held(1, digests=BAD))
    assert round_.advance(differ, 0) is None
    assert round_.attempt == 2
    assert round_.faults == [
        "fragment 0 version 1 attempt 1: racks [0, 1] merged equal members into 2 different results"
    ]
    again = replace(differ, held=held(0, 1, attempt=2))
    commit = round_.advance(again, 0)
    assert isinstance(commit, Commit)
    assert commit.digests == GOOD


def test_differing_results_wait_until_every_live_rack_has_spoken() -> None:
    round_, all_in = gathering(offer(0), offer(1), offer(2))
    two = replace(all_in, held=held(1) | held(2, digests=BAD))
    round_.advance(two, 0)
    assert round_.attempt == 1, "rack 0 may still be the second of a quorum"
    commit = round_.advance(replace(all_in, held=held(0, 1) | held(2, digests=BAD)), 0)
    assert isinstance(commit, Commit)
    assert commit.digests == GOOD


def test_racks_that_go_on_differing_are_asked_at_a_slow_pace() -> None:
    round_, all_in = gathering(offer(0), offer(1), racks=2)
    all_in = replace(all_in, voters=frozenset({0, 1, WITNESS}))

    def differ(now_ns: int) -> int:
        said = held(0, attempt=round_.attempt) | held(1, attempt=round_.attempt, digests=BAD)
        round_.advance(replace(all_in, held=said), now_ns)
        return round_.attempt

    assert [differ(0) for _ in range(ATTEMPTS_MAX + 3)][-1] == ATTEMPTS_MAX
    assert differ(ATTEMPT_STALL_NS - 1) == ATTEMPTS_MAX
    assert differ(ATTEMPT_STALL_NS) == ATTEMPTS_MAX + 1
    assert differ(ATTEMPT_STALL_NS) == ATTEMPTS_MAX + 1


def test_attempts_end_before_their_numbers_would_be_those_of_another_ballot() -> None:
    round_, all_in = gathering(offer(0), offer(1), racks=2)
    all_in = replace(all_in, voters=frozenset({0, 1, WITNESS}))
    seen = set()
    for turn in range(1, ATTEMPT_LAST + 20):
        seen.add(round_.attempt)
        said = held(0, attempt=round_.attempt) | held(1, attempt=round_.attempt, digests=BAD)
        round_.advance(replace(all_in, held=said), turn * ATTEMPT_STALL_NS)
    assert sorted(seen) == list(range(1, ATTEMPT_LAST + 1))


def slow(took_ns: int) -> tuple[Round, RoundInputs]:
    """A round whose fragment took so long to be merged before, gathering again at once."""
    round_, all_in = gathering(offer(0), offer(1), racks=2)
    for look_ns in range(0, took_ns, ATTEMPT_STALL_NS):
        round_.advance(all_in, look_ns)  # it has stalled, as far as one knows; nothing is lost
    round_.advance(replace(all_in, held=held(0, 1)), took_ns)
    round_.on_decided(took_ns)
    assert round_.advance(all_in, took_ns) is None
    assert (round_.phase, round_.attempt) == (Phase.PROPOSED, 1)
    return round_, all_in


def test_transfer_that_took_longer_than_a_stall_before_may_take_as_long_again() -> None:
    """At 10 s, whatever the link, a member that was not heard for a moment was left out, and all
    that the others had merged in 10 s was merged again without it."""
    took_ns = 14 * SECOND
    round_, all_in = slow(took_ns)
    assert round_.sync_time.value_ns == took_ns, "of the whole attempt, stalled or not"
    unheard = replace(all_in, arrived=(offer(0),), voters=frozenset({0, 1, WITNESS}))
    assert round_.deadline_ns(unheard) == 3 * took_ns
    round_.advance(unheard, took_ns + ATTEMPT_STALL_NS)
    round_.advance(unheard, 3 * took_ns - 1)
    assert round_.attempt == 1
    round_.advance(unheard, 3 * took_ns)
    assert (round_.attempt, round_.members) == (2, (offer(0),))


def test_the_time_until_an_attempt_has_stalled_has_a_limit() -> None:
    round_, all_in = slow(ATTEMPT_STALL_NS_MAX)
    assert round_.deadline_ns(all_in) == 2 * ATTEMPT_STALL_NS_MAX


def test_one_outage_is_no_measure_of_the_link() -> None:
    round_, all_in = slow(100 * SECOND)
    round_.advance(replace(all_in, held=held(0, 1)), 101 * SECOND)
    round_.on_decided(101 * SECOND)
    round_.advance(all_in, 101 * SECOND)
    assert round_.deadline_ns(all_in) == 101 * SECOND + ATTEMPT_STALL_NS


@pytest.mark.parametrize("arrived", [(), (offer(0), offer(1))], ids=["all gone", "none gone"])
def test_a_stall_alone_is_no_reason_for_another_attempt(arrived: tuple[Offer, ...]) -> None:
    round_, all_in = gathering(offer(0), offer(1), racks=2)
    round_.advance(replace(all_in, arrived=arrived), ATTEMPT_STALL_NS)
    assert (round_.attempt, round_.members) == (1, (offer(0), offer(1)))


def test_after_the_decision_the_next_round_may_open() -> None:
    round_, all_in = gathering(offer(0), offer(1), racks=2)
    round_.advance(replace(all_in, held=held(0, 1)), 70 * MS)
    round_.on_decided(80 * MS)
    assert (round_.phase, round_.members, round_.attempt) == (Phase.IDLE, (), 0)
    assert round_.sync_time.value_ns == 80 * MS
    assert round_.quorum_time.value_ns == 0
    assert round_.advance(inputs(offer(0, 2, base=1), version=1, k=2), SECOND) is None
    assert round_.phase is Phase.OPEN


def test_a_member_that_is_removed_takes_its_offer_out_of_a_round_that_gathers() -> None:
    """Found by the simulator: a rack was started again while a round gathered; the commit named an
    offer of its former life, which the Roster record had ended."""
    mine, gone = offer(0), offer(1)
    round_, both = gathering(mine, gone)
    without = replace(both, offers=(mine,), arrived=(mine,))
    said = held(0, 1, 2, attempt=round_.attempt)
    assert round_.advance(replace(without, held=said), MS) is None
    again = round_.proposal(0)
    assert again.members == (mine,)
    commit = round_.advance(replace(without, held=held(0, 1, 2, attempt=again.attempt)), 2 * MS)
    assert isinstance(commit, Commit)
    assert [each.member for each in commit.members] == [mine.member]


# -------------------------------------------------------------- who is absent

TRAINS = {rack: Absent(rack, 10 + rack, 2) for rack in range(3)}


def test_racks_that_train_and_are_not_in_are_absent_and_stay_so_for_the_attempt() -> None:
    """With another list racks would merge other bits under one name."""
    round_, seen = new_round(), replace(inputs(offer(1)), works=TRAINS, coming=frozenset(TRAINS))
    round_.advance(seen, 0)
    round_.advance(seen, GRACE_NS)
    proposal = round_.proposal(0)
    assert proposal.absent == (TRAINS[0], TRAINS[2])
    later = replace(seen, works={}, live=frozenset({1}))
    round_.advance(later, GRACE_NS + SECOND)
    assert round_.proposal(0) == proposal
    made = round_.advance(replace(later, held=held(0, 1, 2)), GRACE_NS + 2 * SECOND)
    assert isinstance(made, Commit)
    assert made.absent == proposal.absent
    round_.on_decided(GRACE_NS + 3 * SECOND)
    assert round_.absent == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"live": frozenset({1, 2})},
        {"declined": frozenset({0})},
        {"contributors": frozenset({1, 2})},
        {"coming": frozenset({1, 2})},
    ],
    ids=["dead", "declined", "leaves or joins", "was not named lately"],
)
def test_a_rack_whose_work_will_not_come_is_not_absent(changes: dict[str, Any]) -> None:
    round_, seen = new_round(), replace(inputs(offer(1)), works=TRAINS, coming=frozenset(TRAINS))
    round_.advance(seen, 0)
    round_.advance(replace(seen, **changes), GRACE_NS)
    assert round_.absent == (TRAINS[2],)


def test_work_that_was_merged_before_a_member_could_apply_it_is_of_the_same_time() -> None:
    """Two racks that end in turn: without this their last movements are added up, not averaged."""
    closing = Absent(0, 10, 2, closing=True)
    round_, seen = new_round(), replace(inputs(offer(1, base=5), version=5), works={0: closing})
    seen = replace(seen, contributors=frozenset({1}))  # rack 0 leaves, and has nothing more
    for version, absent in ((5, (closing,)), (4, ())):  # 4: rack 1 began its work on it
        round_ = new_round()
        for now_ns in (0, GRACE_NS):
            round_.advance(replace(seen, named={0: (3, version), 1: (4, 5)}), now_ns)
        assert round_.absent == absent


def test_a_rack_of_which_nothing_is_known_weighs_as_the_mean_member() -> None:
    round_, seen = new_round(), replace(inputs(offer(1), offer(2)), coming=frozenset({0}))
    seen = replace(seen, arrived=(offer(1, tokens=9, steps=3), offer(2, tokens=20, steps=6)))
    round_.advance(seen, 0)
    round_.advance(seen, GRACE_NS)
    assert round_.absent == (Absent(0, 14, 4),)


def test_racks_whose_results_alone_are_awaited_are_slow_when_others_take_less() -> None:
    round_, now = gathering(offer(0), offer(1))
    late = round_.started_ns + ATTEMPT_STALL_NS
    round_.advance(now, late - 1)
    assert round_.slow(late) == frozenset(), "nobody has a result: that is no rack's fault"
    round_, now = gathering(offer(0), offer(1))
    some = replace(now, held=held(0, attempt=round_.attempt))
    round_.advance(some, round_.started_ns + 1)
    late = round_.started_ns + ATTEMPT_STALL_NS
    assert round_.slow(late - 1) == frozenset()
    assert round_.slow(late) == {1, 2}


# -------------------------------------------------------------- slices


def slicing(racks: int = 4, **changes: Any) -> tuple[Round, RoundInputs]:
    """A round of all racks that shard."""
    scene = inputs(*map(offer, range(racks)), racks=racks, **changes)
    scene = replace(scene, policy=msgspec.structs.replace(scene.policy, sharded=True))
    round_ = new_round()
    assert round_.advance(scene, 0) is None
    return round_, scene


def sliced(
    *racks: int, attempt: int = 1, merged: int = SLICES_EACH, failed: bool = False
) -> dict[int, Sliced]:
    return dict.fromkeys(racks, Sliced(0, 1, attempt, merged, failed))


def told(round_: Round) -> tuple[int, bool, tuple[int, ...], list[int]]:
    proposal = round_.proposal(0)
    racks = [each.member.rack for each in proposal.members]
    return proposal.attempt, proposal.sharded, proposal.merged, racks


def test_a_sharded_round_says_who_has_merged_how_many_of_its_slices() -> None:
    round_, scene = slicing()
    assert (round_.closed_by, round_.detail) == ("all-in", ["4 of 4 racks", "sharded"])
    assert told(round_) == (1, True, (), [0, 1, 2, 3])
    some = sliced(3) | sliced(1, merged=1) | sliced(2, attempt=9)
    round_.advance(replace(scene, slices=some), MS)
    assert told(round_) == (1, True, (0, 1, 0, 2), [0, 1, 2, 3])
    commit = round_.advance(replace(scene, held=held(0, 1, 2)), 2 * MS)
    assert isinstance(commit, Commit)
    round_.on_decided(3 * MS)


def test_a_member_that_falls_silent_loses_its_slice_to_the_others() -> None:
    round_, scene = slicing()
    merged = sliced(0, 1, 2)
    round_.advance(replace(scene, slices=merged, live=frozenset({0, 1, 2})), MS)
    assert told(round_) == (2, True, (), [0, 1, 2]), "what was merged of four is of no use"
    round_.advance(replace(scene, slices=merged, live=frozenset({0, 1})), 2 * MS)
    assert told(round_) == (3, False, (), [0, 1])
    assert round_.detail[1:] == ["sharded", "then without rack 3", "then without rack 2"]


def test_a_failure_or_a_stall_is_followed_by_a_mesh_of_all() -> None:
    round_, scene = slicing()
    round_.advance(replace(scene, slices=sliced(2, failed=True) | sliced(0)), MS)
    assert told(round_) == (2, False, (), [0, 1, 2, 3])
    assert round_.detail[-1] == "then mesh: failed at rack 2"
    round_, scene = slicing()
    round_.advance(replace(scene, slices=sliced(0, 1, 3)), ATTEMPT_STALL_NS - 1)
    assert told(round_) == (1, True, (2, 2, 0, 2), [0, 1, 2, 3])
    round_.advance(scene, ATTEMPT_STALL_NS)
    assert told(round_) == (2, False, (), [0, 1, 2, 3])
    assert round_.detail[-1] == "then mesh: stalled"
    round_.advance(scene, 2 * ATTEMPT_STALL_NS)
    assert told(round_)[0] == 2, "all bytes are there, so the mesh goes on"


def test_results_that_differ_are_compared_in_a_mesh_and_the_next_round_shards_again() -> None:
    round_, scene = slicing()
    unequal = held(0) | held(1, 2, digests=BAD) | held(3, digests=(digest(3),))
    round_.advance(replace(scene, held=unequal), MS)
    assert told(round_)[:2] == (2, False)
    assert round_.detail[-1] == "then mesh: results differ"
    commit = round_.advance(replace(scene, held=held(0, 1, 2, 3, attempt=2)), 2 * MS)
    assert isinstance(commit, Commit)
    assert commit.reason == "all-in, 4 of 4 racks, sharded, then mesh: results differ"
    round_.on_decided(3 * MS)
    newer = tuple(offer(rack, 2, base=1, applied=1) for rack in range(4))
    round_.advance(replace(scene, version=1, offers=newer, arrived=newer), 4 * MS)
    assert told(round_)[1] is True


def test_in_lockstep_a_silent_member_is_waited_for() -> None:
    round_, scene = slicing(lockstep=True)
    round_.advance(replace(scene, live=frozenset({0, 1, 2})), MS)
    assert told(round_) == (1, True, (), [0, 1, 2, 3])
