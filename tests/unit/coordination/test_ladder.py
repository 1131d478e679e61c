"""When rounds stop waiting for a slow rack, by what they have lost; and when they wait again."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mend.consensus.log import LogState
from mend.consensus.records import (
    AWAITED,
    EVICTED,
    EVICTIONS_MAX,
    NOT_AWAITED,
    SMALLER,
    Mitigation,
    Roster,
)
from mend.coordination.grace import Mean
from mend.coordination.ladder import (
    AWAY_NS,
    CALM_DETECTS,
    COUNTED_NS_MAX,
    Ladder,
    event_of,
    taken_of,
    worst_of,
)
from mend.coordination.messages import FailSlow, Pace, Report
from mend.coordination.round import Round
from mend.events.kinds import (
    RackAwaited,
    RackBatchChanged,
    RackEvicted,
    RackMitigated,
    RackNotAwaited,
)
from mend.types import MS, SECOND, WITNESS
from tests.unit.coordination.nouns import genesis, report

DETECT_NS = 2 * SECOND
STEP_NS = 50 * MS
PRICE_NS = 8 * STEP_NS
"""H is 8, with one fragment."""

SLOW = FailSlow(1, 0, True, 40, 30)
BY_COMPUTE = replace(SLOW, cause="compute")
LIVE = frozenset(range(3))


def log(**changes: object) -> LogState:
    """Of three racks."""
    found, first = LogState(), genesis(racks=3)
    found.take(replace(first, policy=replace(first.policy, **{"acts": True, **changes})))
    return found


def reports(batch: int = 0) -> dict[int, Report]:
    """`batch`: micro-batches that their scripts ask about."""
    paces = replace(report(1), pace=Pace(batch=batch))
    return {rack: replace(paces, step_ns=STEP_NS * (3 if rack == 1 else 1)) for rack in LIVE}


def waiting(*racks: int, hidden_ns: int = 0) -> list[Round]:
    return [Round(0, Mean(), Mean(), waiting=frozenset(racks), hidden_ns=hidden_ns)]


def due(
    ladder: Ladder, of: LogState, *judged: FailSlow, now_ns: int = 0, batch: int = 0
) -> Mitigation | None:
    return ladder.next(of, judged, reports(batch), LIVE, now_ns, DETECT_NS)


def test_a_move_is_due_when_what_was_lost_has_reached_its_price() -> None:
    ladder, rounds = Ladder(), waiting(1)
    ladder.count(rounds, [SLOW], PRICE_NS - MS)
    assert due(ladder, log(), SLOW) is None
    ladder.count(rounds, [SLOW], PRICE_NS)
    move = due(ladder, log(), SLOW)
    assert (move.rack, move.stage) == (1, NOT_AWAITED)
    assert "rack 1 is slow: 3.0x" in move.reason
    assert "rounds have lost 400 ms with it, one without it costs 400 ms" in move.reason
    assert due(ladder, log(), SLOW) is None, "what led to a move is paid for"


def test_time_hidden_by_the_overlap_is_not_counted_as_lost() -> None:
    ladder = Ladder()
    ladder.count(waiting(1, hidden_ns=PRICE_NS), [SLOW], 2 * PRICE_NS - MS)
    assert ladder.lost_ns == {1: PRICE_NS - MS}


def test_only_who_is_slow_is_charged_and_only_when_nobody_else_is_missing() -> None:
    ladder = Ladder()
    ladder.count(waiting(1, 2), [SLOW], 9 * SECOND)
    ladder.count(waiting(2), [SLOW], 9 * SECOND)
    ladder.count(waiting(), [SLOW], 9 * SECOND)
    assert not any(ladder.lost_ns.values())
    ladder.count(waiting(1), [SLOW], 9 * SECOND)
    ladder.count(waiting(), [], 9 * SECOND)
    assert ladder.lost_ns == {}, "a verdict that is over takes its bill along"


def test_slow_rack_is_waited_for_again_when_it_has_been_well_for_a_while() -> None:
    ladder, of = Ladder(), log()
    of.take(Mitigation(1, NOT_AWAITED, "slow"))
    calm_ns = CALM_DETECTS * DETECT_NS
    assert due(ladder, of, SLOW, now_ns=1) is None
    assert due(ladder, of, now_ns=2) is None
    assert due(ladder, of, SLOW, now_ns=3) is None
    assert due(ladder, of, now_ns=4) is None
    assert due(ladder, of, now_ns=4 + calm_ns - 1) is None
    assert due(ladder, of, now_ns=4 + calm_ns) == Mitigation(1, AWAITED, "it is no longer slow")


def test_a_coordinator_that_has_heard_nothing_of_it_leaves_it_as_it_is() -> None:
    ladder, of, unheard = Ladder(), log(), reports()
    del unheard[1]
    of.take(Mitigation(1, NOT_AWAITED, "slow"))
    for now_ns in (0, 60 * SECOND):
        assert ladder.next(of, (), unheard, LIVE, now_ns, DETECT_NS) is None
        assert ladder.next(of, (), reports(), LIVE - {1}, now_ns, DETECT_NS) is None


def test_nothing_moves_where_nobody_asked_for_it() -> None:
    for changes, batch in (({"acts": False}, 8), ({"lockstep": True}, 0)):
        ladder = Ladder()
        ladder.count(waiting(1), [SLOW], 9 * SECOND)
        assert due(ladder, log(**changes), SLOW, batch=batch) is None


# -------------------------------------------------------------- fewer micro-batches


def test_the_nearest_number_of_micro_batches_is_taken_and_never_none() -> None:
    assert [taken_of(4, pct) for pct in (100, 88, 87, 62, 50, 37, 12, 1)] == [
        4, 4, 3, 2, 2, 1, 1, 1,
    ]  # fmt: skip
    assert taken_of(1, 10) == 1


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_rack_whose_script_asks_takes_fewer_micro_batches_before_it_is_left(
    lockstep: bool,
) -> None:
    """In lockstep, too: there all others wait for it."""
    ladder, of, rounds = Ladder(), log(lockstep=lockstep), waiting(1)
    ladder.count(rounds, [BY_COMPUTE], STEP_NS - MS)
    assert due(ladder, of, BY_COMPUTE, batch=8) is None
    ladder.count(rounds, [BY_COMPUTE], STEP_NS)
    move = due(ladder, of, BY_COMPUTE, batch=8)
    assert (move.rack, move.stage, move.batch_pct) == (1, SMALLER, 33)
    assert "lost 50 ms with it, fewer micro-batches cost 50 ms" in move.reason
    of.take(move)
    ladder.count(rounds, [BY_COMPUTE], STEP_NS + 2 * PRICE_NS - MS)
    assert due(ladder, of, BY_COMPUTE, batch=8) is None, "it has time to take effect"
    ladder.count(rounds, [BY_COMPUTE], STEP_NS + 2 * PRICE_NS)
    left = due(ladder, of, BY_COMPUTE, batch=8)
    if lockstep:
        assert left is None
    else:
        assert (left.stage, left.batch_pct) == (NOT_AWAITED, 33), "it keeps what it has"


@pytest.mark.parametrize(("cause", "batch"), [("compute", 0), ("compute", 1), ("link", 8)], ids=str)
def test_where_fewer_cannot_help_or_be_had_it_is_left(cause: str, batch: int) -> None:
    ladder, slow = Ladder(), replace(SLOW, cause=cause)
    ladder.count(waiting(1), [slow], PRICE_NS)
    move = due(ladder, log(), slow, batch=batch)
    assert (move.stage, move.batch_pct) == (NOT_AWAITED, 100)


def test_for_an_unknown_reason_fewer_are_tried_once_and_cost_as_much_as_to_leave_it() -> None:
    ladder, of, rounds = Ladder(), log(), waiting(1)
    ladder.count(rounds, [SLOW], PRICE_NS - MS)
    assert due(ladder, of, SLOW, batch=8) is None
    ladder.count(rounds, [SLOW], PRICE_NS)
    move = due(ladder, of, SLOW, batch=8)
    assert move.stage == SMALLER
    of.take(move)
    worse = replace(SLOW, ratio_tenths=60)
    ladder.count(rounds, [worse], 9 * SECOND)
    again = due(ladder, of, worse, batch=8)
    assert (again.stage, again.batch_pct) == (NOT_AWAITED, 33)


def test_micro_batches_come_back_by_as_much_as_it_has_recovered_and_not_at_once() -> None:
    ladder, of = Ladder(), log()
    of.take(Mitigation(1, SMALLER, "slow", 25))
    better, calm_ns = replace(BY_COMPUTE, ratio_tenths=15), CALM_DETECTS * DETECT_NS
    assert due(ladder, of, replace(better, ratio_tenths=36), batch=8, now_ns=0) is None
    assert due(ladder, of, better, batch=8, now_ns=1) is None
    move = due(ladder, of, better, batch=8, now_ns=1 + calm_ns)
    assert (move.stage, move.batch_pct) == (SMALLER, 66)
    of.take(move)
    assert due(ladder, of, batch=8, now_ns=2 + calm_ns) is None
    over = due(ladder, of, batch=8, now_ns=2 + 2 * calm_ns)
    assert over == Mitigation(1, AWAITED, "it is no longer slow")


@pytest.mark.parametrize(("before", "after"), [(SMALLER, AWAITED), (NOT_AWAITED, NOT_AWAITED)])
def test_micro_batches_come_back_when_the_cause_turns_out_to_be_a_link(
    before: int, after: int
) -> None:
    """Over a slow link fewer of them help nobody, however slow the rack is. What else is done
    about it stays."""
    ladder, of, calm_ns = Ladder(), log(), CALM_DETECTS * DETECT_NS
    of.take(Mitigation(1, before, "slow", 33))
    by_link = replace(SLOW, cause="link", link_to=2, ratio_tenths=60)
    assert due(ladder, of, by_link, batch=8, now_ns=1) is None
    assert due(ladder, of, BY_COMPUTE, batch=8, now_ns=2) is None
    assert due(ladder, of, by_link, batch=8, now_ns=3) is None
    move = due(ladder, of, by_link, batch=8, now_ns=3 + calm_ns)
    assert (move.rack, move.stage, move.batch_pct) == (1, after, 100)
    assert "by its link to rack 2" in move.reason
    of.take(move)
    assert due(ladder, of, by_link, batch=8, now_ns=4 + 9 * calm_ns) is None


def test_noise_moves_nothing() -> None:
    ladder, of = Ladder(), log()
    of.take(Mitigation(1, SMALLER, "slow", 33))
    ladder.count(waiting(1), [BY_COMPUTE], STEP_NS)
    for ratio_tenths in (28, 33):
        judged = replace(BY_COMPUTE, ratio_tenths=ratio_tenths)
        assert due(ladder, of, judged, batch=512, now_ns=60 * SECOND) is None


def test_the_worst_of_two_verdicts_counts() -> None:
    """With few micro-batches a rack that was slow from the start looks slow to its own past, by
    what a step costs besides: it must not get more of them for that."""
    ladder, of = Ladder(), log()
    of.take(Mitigation(1, SMALLER, "slow", 33))
    judged = replace(SLOW, ratio_tenths=11), replace(BY_COMPUTE, own_past=False)
    for now_ns in (0, 60 * SECOND):
        assert ladder.next(of, judged, reports(8), LIVE, now_ns, DETECT_NS) is None


@pytest.mark.parametrize("unknown", ["", "unknown"])
@pytest.mark.parametrize("own_is_worse", [False, True])
def test_a_cause_that_one_verdict_knows_counts_for_the_worst(
    unknown: str, own_is_worse: bool
) -> None:
    """The peers' verdict knows no links: with a greater ratio it must not hide that a link of the
    rack is slow, where fewer micro-batches do not help."""
    own = replace(SLOW, cause="link", link_to=2)
    peers = replace(SLOW, own_past=False, ratio_tenths=28 if own_is_worse else 32, cause=unknown)
    worst = worst_of([own, peers])[1]
    assert worst.ratio_tenths == max(30, peers.ratio_tenths)
    assert (worst.cause, worst.link_to) == ("link", 2)
    assert worst_of([replace(peers, cause="compute", ratio_tenths=32), own])[1].cause == "compute"
    ladder = Ladder()
    ladder.count(waiting(1), [own, peers], PRICE_NS)
    move = ladder.next(log(), (own, peers), reports(8), LIVE, 0, DETECT_NS)
    assert (move.stage, move.batch_pct) == (NOT_AWAITED, 100)
    assert "by its link to rack 2" in move.reason


OF_LINK = FailSlow(1, 0, True, 40, 90, 999, "link", 2, of_link=True)


def test_rounds_stop_waiting_for_a_rack_whose_bytes_come_late_though_its_steps_do_not() -> None:
    ladder = Ladder()
    ladder.count(waiting(1), [OF_LINK], PRICE_NS)
    move = due(ladder, log(), OF_LINK, batch=8)
    assert (move.stage, move.batch_pct) == (NOT_AWAITED, 100)
    assert "the link 1 -> 2 is slow: pulls by rank 0 of rack 2 take 9.0x" in move.reason


@pytest.mark.parametrize("link_first", [False, True])
def test_a_rack_that_computes_slowly_takes_fewer_micro_batches_beside_a_slow_link(
    link_first: bool,
) -> None:
    judged = (OF_LINK, BY_COMPUTE) if link_first else (BY_COMPUTE, OF_LINK)
    assert worst_of(judged) == {1: BY_COMPUTE}, "however slow the link is"
    assert worst_of((OF_LINK, SLOW)) == {1: SLOW}, "nor does the link say why its steps are slow"


def test_a_move_is_noted_by_what_changes() -> None:
    """Rounds never stopped waiting for a rack that only took fewer micro-batches."""

    def move(before: int, stage: int) -> type[RackMitigated]:
        return type(event_of(before, Mitigation(1, stage, "rack 1 is slow")))

    assert move(AWAITED, SMALLER) is RackBatchChanged
    assert move(SMALLER, SMALLER) is RackBatchChanged
    assert move(SMALLER, AWAITED) is RackBatchChanged
    assert move(NOT_AWAITED, NOT_AWAITED) is RackBatchChanged
    assert move(AWAITED, NOT_AWAITED) is move(SMALLER, NOT_AWAITED) is RackNotAwaited
    assert move(NOT_AWAITED, AWAITED) is RackAwaited
    assert move(NOT_AWAITED, EVICTED) is move(AWAITED, EVICTED) is RackEvicted
    assert move(EVICTED, AWAITED) is RackAwaited


# -------------------------------------------------------------- eviction

START_MS = 2_000
ALL = LIVE | {WITNESS}


def evicting(racks: int = 3, *, witness: bool = False, **changes: object) -> LogState:
    found = LogState()
    first = genesis(racks=racks, witness=witness)
    policy = replace(first.policy, **{"acts": True, "evicts": True, "racks": racks, **changes})
    found.take(replace(first, policy=policy))
    return found


def started(**changes: object) -> dict[int, Report]:
    """Reports of racks that took two seconds to start. `changes`: of rack 1's."""
    usual = report(1, pace=Pace(start_ms=START_MS), step_ns=STEP_NS)
    return {**dict.fromkeys(LIVE, usual), 1: replace(usual, **changes)}


def lost(ladder: Ladder, ns: int, *judged: FailSlow) -> None:
    """So much time passes while the verdicts are in force."""
    at_ns = ladder._counted_ns or 1
    ladder.count([], judged, at_ns)
    for passed_ns in range(COUNTED_NS_MAX, ns + 1, COUNTED_NS_MAX):
        ladder.count([], judged, at_ns + passed_ns)
    ladder.count([], judged, at_ns + ns)


def test_a_rack_is_evicted_once_it_has_lost_what_starting_it_again_costs() -> None:
    """Three times slower it loses two thirds of its time."""
    ladder, of = Ladder(), evicting()
    lost(ladder, 3 * SECOND - 9 * MS, BY_COMPUTE)
    assert ladder.next(of, [BY_COMPUTE], started(), ALL, 0, DETECT_NS) is None
    lost(ladder, 12 * MS, BY_COMPUTE)
    move = ladder.next(of, [BY_COMPUTE], started(), ALL, 0, DETECT_NS)
    assert (move.rack, move.stage) == (1, EVICTED)
    assert "rack 1 is slow by the compute of rank 0" in move.reason
    assert "this has cost it 2001 ms, a restart costs 2000 ms" in move.reason
    of.take(move)
    lost(ladder, 60 * SECOND, BY_COMPUTE)
    assert ladder.next(of, [BY_COMPUTE], started(), ALL, 0, DETECT_NS) is None, "it is told once"


def test_the_sleep_of_the_coordinator_is_nobodys_loss() -> None:
    ladder = Ladder()
    ladder.count([], [BY_COMPUTE], 1)
    ladder.count([], [BY_COMPUTE], 1 + 60 * SECOND)
    assert ladder.behind_ns == {1: COUNTED_NS_MAX * 2 // 3}
    ladder.count([], [], 2 + 60 * SECOND)
    assert ladder.behind_ns == {}, "a verdict that is over takes its bill along"


def test_a_slow_link_is_no_loss_of_the_rack_that_is_pulled_from() -> None:
    """What its steps lose counts from when they are slow, at their own ratio."""
    link = replace(SLOW, own_past=True, cause="link", of_link=True, link_to=2, ratio_tenths=100)
    ladder = Ladder()
    lost(ladder, 600 * SECOND, link)
    assert ladder.behind_ns == {}
    lost(ladder, 3 * SECOND, BY_COMPUTE, link)
    assert ladder.behind_ns == {1: 3 * (2 * SECOND // 3)}


def spared(
    of: LogState, verdict: FailSlow = BY_COMPUTE, live: frozenset[int] = ALL, **mine: object
) -> bool:
    """Whether a rack that has been slow for ten minutes is not evicted."""
    ladder = Ladder()
    lost(ladder, 600 * SECOND, verdict)
    return ladder.next(of, [verdict], started(**mine), live, 0, DETECT_NS) is None


def test_only_what_a_restart_may_mend_is_restarted() -> None:
    assert not spared(evicting())
    assert not spared(evicting(), replace(SLOW, cause="unknown"))
    for cause in ("link", "input", ""):
        assert spared(evicting(), replace(SLOW, cause=cause))
    slow_from_the_start = replace(BY_COMPUTE, own_past=False)
    assert spared(evicting(), slow_from_the_start), "so would its next life be"
    assert spared(evicting(), pace=Pace()), "what it costs is not known"
    assert spared(evicting(), leaving=True)
    for changes in ({"evicts": False}, {"acts": False}):
        assert spared(evicting(**changes))


def test_rack_that_the_others_need_is_not_evicted() -> None:
    assert not spared(evicting(2, witness=True))
    assert spared(evicting(2)), "two racks without a witness"
    assert spared(evicting(2, witness=True), live=LIVE), "the witness is silent"
    assert spared(evicting(), live=ALL - {0})
    assert spared(evicting(), live=ALL - {1}), "it would not hear of it"
    assert spared(evicting(merge_min_racks=3))
    away = evicting()
    away.take(Mitigation(2, EVICTED, "slow"))
    assert spared(away), "one at a time"


def test_an_eviction_is_counted_in_the_log_and_not_for_ever() -> None:
    of = evicting()
    for _ in range(EVICTIONS_MAX):
        assert not spared(of)
        of.take(Mitigation(1, EVICTED, "slow"))
        of.take(Mitigation(1, AWAITED, "well"))
    assert spared(of)


def test_an_eviction_is_taken_back_where_the_rack_is_needed_or_well_again() -> None:
    ladder, of = Ladder(), evicting()
    of.take(Mitigation(1, EVICTED, "slow", 50))
    judged, calm_ns = [replace(BY_COMPUTE, ratio_tenths=15)], CALM_DETECTS * DETECT_NS
    for now_ns in (0, calm_ns):
        assert ladder.next(of, judged, started(), ALL, now_ns, DETECT_NS) is None, "half a mend"
    move = ladder.next(of, judged, started(), ALL - {2}, 0, DETECT_NS)
    assert move == Mitigation(1, SMALLER, "it is needed: rack 2 is absent", 50)
    leaving = started(leaving=True)
    assert ladder.next(of, [], leaving, ALL - {2}, 0, DETECT_NS) is None, "it is on its way"
    assert ladder.next(of, [], started(), ALL, 0, DETECT_NS) is None
    well = ladder.next(of, [], started(), ALL, calm_ns, DETECT_NS)
    assert well == Mitigation(1, AWAITED, "it is no longer slow")


def test_an_eviction_that_failed_is_taken_back_and_not_tried_again() -> None:
    """The record would say of a rack that trains on that it is evicted, until it is well."""
    ladder, of, judged = Ladder(), evicting(), [BY_COMPUTE]
    of.take(Mitigation(1, EVICTED, "slow"))
    assert ladder.next(of, judged, started(), ALL, 0, DETECT_NS) is None
    stays = started(pace=Pace())
    assert ladder.next(of, judged, stays, ALL - {1}, 0, DETECT_NS) is None, "it may have died"
    move = ladder.next(of, judged, stays, ALL, 0, DETECT_NS)
    assert move == Mitigation(1, AWAITED, "it stays: its work could not be merged in time")
    of.take(move)
    assert spared(of, pace=Pace())


def gone(of: LogState, rack: int) -> None:
    """Evicted, it leaves; what a quorum needs is left."""
    of.take(Mitigation(rack, EVICTED, "slow"))
    seats = tuple(seat for other, seat in of.seats.items() if other != rack)
    of.take(Roster(of.roster_number + 1, seats, (), of.witness, "left"))


def test_an_evicted_rack_that_nobody_starts_again_is_lost_and_others_may_be_evicted() -> None:
    """It kept the job from ever evicting another one."""
    for limit_ns, said_ns in ((AWAY_NS, 0), (9 * SECOND, 9 * SECOND)):
        ladder, of = Ladder(), evicting(witness=True, seat_timeout_ns=said_ns)
        gone(of, 2)
        assert spared(of), "it is awaited"
        for now_ns in (5, 5 + limit_ns - 1):
            assert ladder.next(of, [], started(), ALL - {2}, now_ns, DETECT_NS) is None
        move = ladder.next(of, [], started(), ALL - {2}, 5 + limit_ns, DETECT_NS)
        told = f"it was evicted and has not come back for {limit_ns // SECOND} s"
        assert move == Mitigation(2, AWAITED, told)
        of.take(move)
        assert of.away == {}
        assert ladder.next(of, [], started(), ALL - {2}, 5 + 2 * limit_ns, DETECT_NS) is None
        assert not spared(of), "the others can do without it"
        assert spared(of, live=LIVE - {2}), "nor may it be the last but one"


def test_new_coordinator_restarts_the_time_of_an_evicted_rack() -> None:
    ladder, of = Ladder(), evicting(witness=True)
    gone(of, 2)
    ladder.next(of, [], started(), ALL, 5, DETECT_NS)
    assert Ladder().next(of, [], started(), ALL, 5 + AWAY_NS, DETECT_NS) is None
