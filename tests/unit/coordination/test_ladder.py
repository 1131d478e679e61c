"""When rounds stop waiting for a slow rack, by what they have lost; and when they wait again."""

from __future__ import annotations

from msgspec.structs import replace

from mend.consensus.log import LogState
from mend.consensus.records import AWAITED, NOT_AWAITED, Mitigation
from mend.coordination.grace import Mean
from mend.coordination.ladder import CALM_DETECTS, Ladder
from mend.coordination.messages import FailSlow, Report
from mend.coordination.round import Round
from mend.types import MS, SECOND
from tests.unit.coordination.nouns import genesis, report

DETECT_NS = 2 * SECOND
STEP_NS = 50 * MS
PRICE_NS = 8 * STEP_NS
"""H is 8, with one fragment."""

SLOW = FailSlow(1, 0, True, 40, 30)
LIVE = frozenset(range(3))


def log(**changes: object) -> LogState:
    """Of three racks."""
    found, first = LogState(), genesis(racks=3)
    found.take(replace(first, policy=replace(first.policy, **{"acts": True, **changes})))
    return found


def reports() -> dict[int, Report | None]:
    return {rack: replace(report(1), step_ns=STEP_NS * (3 if rack == 1 else 1)) for rack in LIVE}


def waiting(*racks: int, hidden_ns: int = 0) -> list[Round]:
    return [Round(0, Mean(), Mean(), waiting=frozenset(racks), hidden_ns=hidden_ns)]


def due(ladder: Ladder, of: LogState, *judged: FailSlow, now_ns: int = 0) -> Mitigation | None:
    return ladder.next(of, judged, reports(), LIVE, now_ns, DETECT_NS)


def test_a_move_is_due_when_what_was_lost_has_reached_its_price() -> None:
    ladder, rounds = Ladder(), waiting(1)
    ladder.count(rounds, [SLOW], PRICE_NS - MS)
    assert due(ladder, log(), SLOW) is None
    ladder.count(rounds, [SLOW], PRICE_NS)
    move = due(ladder, log(), SLOW)
    assert move is not None
    assert (move.rack, move.stage) == (1, NOT_AWAITED)
    assert "rack 1 is slow: 3.0x" in move.reason
    assert "rounds have lost 400 ms with it, one without it costs 400 ms" in move.reason
    assert due(ladder, log(), SLOW) is None, "what led to a move is paid for"


def test_what_the_overlap_hides_is_not_lost() -> None:
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


def test_it_is_waited_for_again_when_it_has_been_well_for_a_while() -> None:
    ladder, of = Ladder(), log()
    of.take(Mitigation(1, NOT_AWAITED, "slow"))
    calm_ns = CALM_DETECTS * DETECT_NS
    assert due(ladder, of, SLOW, now_ns=1) is None
    assert due(ladder, of, now_ns=2) is None
    assert due(ladder, of, SLOW, now_ns=3) is None
    assert due(ladder, of, now_ns=4) is None
    assert due(ladder, of, now_ns=4 + calm_ns - 1) is None
    assert due(ladder, of, now_ns=4 + calm_ns) == Mitigation(1, AWAITED, "it is slow no more")


def test_a_coordinator_that_has_heard_nothing_of_it_leaves_it_as_it_is() -> None:
    ladder, of, unheard = Ladder(), log(), {**reports(), 1: None}
    of.take(Mitigation(1, NOT_AWAITED, "slow"))
    for now_ns in (0, 60 * SECOND):
        assert ladder.next(of, (), unheard, LIVE, now_ns, DETECT_NS) is None
        assert ladder.next(of, (), reports(), LIVE - {1}, now_ns, DETECT_NS) is None


def test_nothing_moves_where_nobody_asked_for_it() -> None:
    for changes in ({"acts": False}, {"lockstep": True}):
        ladder = Ladder()
        ladder.count(waiting(1), [SLOW], 9 * SECOND)
        assert due(ladder, log(**changes), SLOW) is None
