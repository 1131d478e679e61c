"""A gap in the ticks of a process is its own sleep."""

from __future__ import annotations

from mend.coordination.awake import AwakeClock, Sleep

BEAT = 100


def slept(*ran: int) -> int:
    clock = AwakeClock(BEAT)
    for now_ns in ran:
        clock.run(now_ns)
    return clock.slept_ns


def test_process_that_runs_each_heartbeat_sleeps_never() -> None:
    assert slept(0, 100, 200, 299, 400) == 0


def test_gap_of_more_than_a_heartbeat_is_sleep_but_for_half_of_one() -> None:
    assert slept(0, 199, 398) == 0
    assert slept(0, 1000, 1100) == 950


def test_process_that_is_always_late_is_awake_in_part() -> None:
    """Else it would never notice that another is silent."""
    assert slept(*range(0, 2001, 200)) == 1500


def test_start_of_the_clock_is_no_sleep() -> None:
    assert slept(10**12) == 0


def test_machines_of_one_process_take_the_same_sleep_in_whichever_runs_first() -> None:
    clock = AwakeClock(BEAT)
    one, other = Sleep(clock), Sleep(clock)
    assert [one.take(0), other.take(0)] == [0, 0]
    assert one.take(1000) == 950
    assert one.take(1010) == 0, "it has taken that in"
    assert other.take(1010) == 950


def test_process_has_to_run_again_within_a_heartbeat() -> None:
    clock = AwakeClock(BEAT)
    assert clock.awake_ns(10**9) == 10**9
    clock.run(7)
    assert (clock.awake_ns(10**9), clock.awake_ns(50)) == (107, 50)
