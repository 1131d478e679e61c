"""Which rack gets which units of data, from the log and the reports."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mend.consensus.log import LogState
from mend.consensus.records import Grant, Record
from mend.consensus.units import all_free
from mend.coordination.messages import Report, UnitsAsk
from mend.coordination.unit_grants import GRANT_MIN, next_grant, racks_without_rows, why_no_units
from mend.errors import require
from tests.unit.coordination.nouns import genesis, log_of, member, report

A, B = member(0), member(1)
BOTH = frozenset({0, 1})


def log(total: int, *records: Record, lockstep: bool = False, epochs: int = 1) -> LogState:
    first = replace(genesis(), units=all_free(total))
    each = total // epochs
    policy = replace(first.policy, lockstep=lockstep, units=each, epochs=epochs)
    return log_of(replace(first, policy=policy), *records).appended


def asks(*each: tuple[int, int, bool] | None) -> dict[int, Report]:
    """(given, size, empty) of rack 0, 1, ..."""
    made = [None if one is None else UnitsAsk(*one) for one in each]
    return {rack: report(1, units=ask) for rack, ask in enumerate(made)}


def test_one_record_answers_all_racks_in_their_order() -> None:
    grant = next_grant(log(10_000), asks((0, 64, True), (0, 100, True)), BOTH)
    assert grant == Grant(((A, ((0, 64),)), (B, ((64, 100),))))


def test_ask_that_is_answered_gets_nothing_more() -> None:
    given = Grant(((A, ((0, 64),)),))
    assert next_grant(log(10_000, given), asks((0, 64, True), None), BOTH) is None


def test_dead_rack_gets_nothing() -> None:
    grant = next_grant(log(10_000), asks((0, 64, True), (0, 64, True)), frozenset({1}))
    assert grant == Grant(((B, ((0, 64),)),))


@pytest.mark.parametrize(("free", "gets"), [(400, 100), (40, GRANT_MIN), (5, 5)])
def test_grant_becomes_smaller_towards_the_end(free: int, gets: int) -> None:
    assert next_grant(log(free), asks((0, 1000, True), None), BOTH) == Grant(((A, ((0, gets),)),))


def test_units_end_when_all_racks_have_taken_theirs() -> None:
    state = log(20, Grant(((A, ((0, 10),)), (B, ((10, 10),)))))
    assert next_grant(state, asks((10, 64, True), (10, 64, False)), BOTH) is None
    assert next_grant(state, asks((10, 64, True), (10, 64, True)), BOTH) == Grant(())


def test_silent_rack_is_waited_for_at_the_end() -> None:
    """Its units may become free."""
    state = log(20, Grant(((A, ((0, 10),)), (B, ((10, 10),)))))
    silent = asks((10, 64, True), (10, 64, False))
    assert next_grant(state, silent, frozenset({0})) is None


def test_units_end_without_the_ask_of_a_rack_that_holds_none() -> None:
    """It joins, and waits for the state of the rack that waits for the end."""
    state = log(20, Grant(((A, ((0, 20),)),)))
    joins = asks((20, 64, True), None)
    joins[1] = report(1, wants=True)
    assert next_grant(state, joins, BOTH) == Grant(())


def test_rack_that_has_stopped_gives_back_what_it_did_not_merge() -> None:
    state = log(20, Grant(((A, ((0, 10),)), (B, ((10, 10),)))))
    reports = asks((10, 64, True), None) | {1: report(1, leaving=True, idle=True)}
    assert next_grant(state, reports, BOTH) == Grant((), back=(B,))


def without_rows(total: int, live: frozenset[int] = BOTH, **of_the_other: bool) -> frozenset[int]:
    """Rack 0 has taken its 10 units and wants more; rack 1 has taken some of its 10."""
    state = log(total, Grant(((A, ((0, 10),)), (B, ((10, 10),)))))
    reports = asks((10, 64, True), None) | {1: report(1, **of_the_other)}
    return racks_without_rows(state, reports, live)


def test_rack_is_without_rows_while_only_one_that_leaves_holds_some() -> None:
    assert without_rows(20, leaving=True) == {0}
    assert without_rows(20) == frozenset()
    assert without_rows(20, leaving=True, live=frozenset({0})) == frozenset()
    assert without_rows(21, leaving=True) == frozenset(), "a unit is free"
    assert without_rows(20, leaving=True, idle=True) == frozenset(), "its units are free at once"


def test_no_rack_is_without_rows_in_lockstep_or_where_no_units_are_given_out() -> None:
    state = log(20, Grant(((A, ((0, 10),)), (B, ((10, 10),)))), lockstep=True)
    reports = asks((10, 64, True), None) | {1: report(1, leaving=True)}
    assert racks_without_rows(state, reports, BOTH) == frozenset()
    assert racks_without_rows(log_of(genesis()).appended, reports, BOTH) == frozenset()


def test_in_lockstep_first_record_waits_for_all_and_gives_out_everything() -> None:
    state = log(21, lockstep=True)
    assert next_grant(state, asks((0, 64, True), None), BOTH) is None
    grant = next_grant(state, asks((0, 64, True), (0, 100, True)), BOTH)
    assert grant == Grant(((A, ((0, 11),)), (B, ((11, 10),))))


def test_in_lockstep_racks_share_each_epoch() -> None:
    """What does not divide goes to another rack in each."""
    grant = next_grant(log(15, lockstep=True, epochs=3), asks((0, 64, True), (0, 64, True)), BOTH)
    a, b = ((0, 3), (5, 2), (10, 3)), ((3, 2), (7, 3), (13, 2))
    assert grant == Grant(((A, a), (B, b)))
    joined = log(15, require(grant, "due"), lockstep=True, epochs=3).units
    assert joined is not None
    assert (joined.free, [book.given for book in joined.books]) == ((), [8, 7])


def test_in_lockstep_a_rack_ends_without_the_others() -> None:
    """They would wait for its offers."""
    state = log(21, Grant(((A, ((0, 11),)), (B, ((11, 10),)))), lockstep=True)
    assert next_grant(state, asks((11, 64, False), (10, 64, True)), BOTH) == Grant(())


def test_in_lockstep_the_wait_for_the_first_rows_names_the_racks_that_have_not_asked() -> None:
    state = log(21, lockstep=True)
    why = "data ledger: waiting for rack 1 to read the ledger"
    assert why_no_units(state, asks((0, 64, True), None), BOTH) == why
    silent = f"{why}, silent: rack 1 (`mend retire 1`, if it is lost)"
    assert why_no_units(state, asks((0, 64, True), None), frozenset({0})) == silent
    assert why_no_units(state, asks(None, None), BOTH) == "", "nobody waits"
    assert why_no_units(state, asks((0, 64, True), (0, 64, True)), BOTH) == "", "it is due"


def test_wait_at_the_end_names_the_racks_that_hold_rows() -> None:
    given = Grant(((A, ((0, 10),)), (B, ((10, 10),))))
    ends, state = asks((10, 64, True), (10, 64, False)), log(20, given)
    why = "data ledger: waiting for rack 1 to take the last rows that were given out"
    assert why_no_units(state, ends, BOTH) == why
    assert why_no_units(state, asks((10, 64, False), None), BOTH) == "", "nobody waits"
    assert why_no_units(state, asks((10, 64, True), (10, 64, True)), BOTH) == "", "all have ended"
    assert why_no_units(log(21, given), ends, BOTH) == "", "a unit is left"
    assert why_no_units(log(20, given, Grant(())), ends, BOTH) == "", "it has ended"
    assert why_no_units(log(20, given, lockstep=True), ends, BOTH) == "", "it ends at once"


def test_job_without_units_gets_no_grant() -> None:
    state = log_of(genesis()).appended
    assert next_grant(state, asks((0, 64, True), None), BOTH) is None
    assert why_no_units(state, asks((0, 64, True), None), BOTH) == ""
