"""Which fragment is due after which step: for every rank the same, from the configuration alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mend.consensus.records import MomentFragments
from mend.coordination.schedule import Calendar, Schedule, gap_steps, overlap_at, poll_steps
from mend_lab.reference import Settings


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    period = draw(st.integers(1, 12))
    return Schedule(draw(st.integers(1, 15)), period, draw(st.integers(0, period - 1)))


def test_moments_have_periods_and_offsets_of_their_own() -> None:
    groups = (MomentFragments(2, 12), MomentFragments(1, 20))
    schedule = Schedule(2, 4, 1, moments=groups)
    assert schedule.count == 5
    found = {step: schedule.captures(step) for step in range(1, 25) if schedule.captures(step)}
    assert [step for step, due in found.items() if 2 in due] == [6, 18]
    assert [step for step, due in found.items() if 3 in due] == [12, 24]
    assert [step for step, due in found.items() if 4 in due] == [20]
    assert found[12] == (1, 3)
    assert gap_steps(schedule.fragments, schedule.period_steps) == 2, "between rounds of weights"
    calendar = Calendar(schedule)
    for step in range(1, 25):
        assert calendar.captures(step) == found.get(step, ())
        for fragment in found.get(step, ()):
            calendar.mark(fragment, step, 0)


def test_four_fragments_take_turns() -> None:
    schedule = Schedule(4, 8, 2)
    due = {step: schedule.captures(step) for step in range(1, 17) if schedule.captures(step)}
    assert due == {2: (0,), 4: (1,), 6: (2,), 8: (3,), 10: (0,), 12: (1,), 14: (2,), 16: (3,)}
    assert gap_steps(schedule.fragments, schedule.period_steps) == 2


def test_more_fragments_than_steps_share_steps() -> None:
    schedule = Schedule(5, 2, 1)
    assert [schedule.captures(step) for step in (1, 2, 3)] == [(2, 3), (0, 1, 4), (2, 3)]
    assert gap_steps(schedule.fragments, schedule.period_steps) == 1


@given(schedules())
def test_every_fragment_is_captured_once_per_period(schedule: Schedule) -> None:
    for fragment in range(schedule.fragments):
        due = [step for step in range(1, 60) if fragment in schedule.captures(step)]
        first = schedule.offset(fragment) or schedule.period_steps
        assert due == list(range(first, 60, schedule.period_steps))
        assert first <= schedule.period_steps


@given(schedules())
def test_a_rack_that_joins_no_round_keeps_the_schedule(schedule: Schedule) -> None:
    calendar, tau = Calendar(schedule), schedule.overlap_steps
    for step in range(1, 60):
        captures = calendar.captures(step)
        assert captures == schedule.captures(step)
        lasts = set(calendar.lasts(step)) | (set(captures) if tau == 0 else set())
        assert lasts == (set(schedule.captures(step - tau)) if step > tau else set())
        assert step >= calendar.next_step or not (captures or lasts)
        for fragment in captures:
            calendar.mark(fragment, step, step)
        calendar.past(step)


def test_a_mark_moves_what_follows_it() -> None:
    calendar = Calendar(Schedule(2, 8, 2, polls=3))
    calendar.mark(1, 5, 0)
    calendar.past(5)
    assert [calendar.due(0), calendar.due(1), calendar.last(1)] == [4, 13, 7]
    assert calendar.lasts(7) == (1,)
    assert [calendar.is_poll(step) for step in (5, 6, 7)] == [False, True, False]
    assert calendar.joins([-1, 0]) == []
    assert calendar.joins([0, 1]) == [0, 1], "the one that was never captured first"


def test_result_is_waited_for_after_tau_steps_and_in_lockstep_after_fewer_at_first() -> None:
    for polls, waited in ((0, 9), (4, 14)):
        calendar = Calendar(Schedule(1, 20, 6, 10, polls=polls))
        calendar.mark(0, 8, 0)
        calendar.past(8)
        assert calendar.event_step == waited
        assert [step for step in range(9, 30) if calendar.lasts(step)] == [waited]
        calendar.past(waited)
        assert calendar.event_step == 28


def test_result_is_applied_at_any_poll_but_in_lockstep_not_before_the_overlap_ends() -> None:
    for polls, first in ((0, 14), (2, 9)):
        calendar = Calendar(Schedule(1, 20, 6, polls=polls))
        calendar.mark(0, 8, 0)
        assert next(step for step in range(9, 30) if calendar.applies(0, step)) == first


def test_the_next_step_is_that_of_a_capture_an_apply_or_a_poll() -> None:
    calendar = Calendar(Schedule(1, 8, 2, polls=5))
    assert calendar.next_step == 5
    calendar.past(5)
    assert calendar.next_step == 8
    calendar.mark(0, 6, 0)
    calendar.past(6)
    assert calendar.next_step == 8
    calendar.past(8)
    assert calendar.next_step == 10


def test_the_overlap_rises_with_the_versions_up_to_tau() -> None:
    schedule = Schedule(1, 64, 8, 10)
    assert [schedule.overlap(v) for v in (0, 1, 2, 10, 40, 90, 1000)] == [1, 1, 1, 4, 7, 8, 8]
    calendar = Calendar(schedule)
    calendar.mark(0, 64, 10)
    assert calendar.last(0) == 68
    for tau in (0, 1, 8):
        assert {overlap_at(v, tau, 0) for v in range(99)} == {tau}, "without a ramp"
    for tau in (0, 1):
        assert {overlap_at(v, tau, 10) for v in range(99)} == {tau}, "no room to rise"


@given(st.integers(0, 2000), st.integers(0, 64), st.integers(0, 50))
def test_the_overlap_of_the_reference_is_that_of_the_protocol(v: int, tau: int, c: int) -> None:
    settings = Settings(fragments=[[0]], period=65, overlap=tau, overlap_ramp=c)
    assert settings.tau(v) == overlap_at(v, tau, c)


@pytest.mark.parametrize(
    ("fragments", "period", "tau", "steps"),
    [(4, 128, 8, 2), (4, 128, 40, 8), (1, 64, 0, 16), (4, 8, 2, 1), (15, 2, 1, 1)],
)
def test_polls_are_four_times_a_gap_and_an_overlap(
    fragments: int, period: int, tau: int, steps: int
) -> None:
    assert poll_steps(2, fragments, period, tau) == steps
    assert poll_steps(1, fragments, period, tau) == 1, "one rank agrees with nobody"


@pytest.mark.parametrize(
    ("fragments", "period", "tau"), [(0, 4, 1), (1, 0, 0), (1, 4, 4), (1, 4, -1)]
)
def test_a_schedule_that_cannot_be_is_refused(fragments: int, period: int, tau: int) -> None:
    with pytest.raises(AssertionError):
        Schedule(fragments, period, tau)


def test_poll_that_found_nothing_leaves_captures_and_applies_where_they_are() -> None:
    calendar = Calendar(Schedule(1, 8, 2, polls=3))
    assert (calendar.next_step, calendar.event_step) == (3, 8)
    calendar.polled(3)
    assert (calendar.next_step, calendar.event_step) == (6, 8)
    calendar.polled(6)
    assert (calendar.next_step, calendar.event_step) == (8, 8)
