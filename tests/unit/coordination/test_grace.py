"""How long a round waits for those that are not in: never longer than it must, never not at all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mend.coordination.grace import Mean, adaptive_grace_ns
from mend.types import MS, SECOND

TIMES = st.integers(0, 10 * SECOND)


def grace(**changes: int | None) -> int:
    told: dict[str, int | None] = {
        "step_ns": 100 * MS, "quorum_ns": 100 * MS, "sync_ns": 100 * MS, "overlap_steps": 10,
        "gap_steps": 20, "limit_ns": 10 * SECOND,
    }  # fmt: skip
    return adaptive_grace_ns(**{**told, **changes})


def test_half_of_the_slack_is_spent() -> None:
    """10 steps of 100 ms, less 100 ms until K were in and 100 ms for the merge: 800 ms."""
    assert grace() == 400 * MS + 100 * MS  # the floor, a quarter of the gap of 2 s
    assert grace(gap_steps=4) == 400 * MS


def test_a_window_is_at_most_one_gap() -> None:
    assert grace(gap_steps=2) == 200 * MS


def test_without_slack_a_quarter_of_the_gap_is_left() -> None:
    assert grace(overlap_steps=1, sync_ns=SECOND, gap_steps=8) == 200 * MS
    assert grace(overlap_steps=0, gap_steps=8, limit_ns=50 * MS) == 50 * MS


def test_before_anything_is_known_a_whole_gap_is_waited() -> None:
    assert grace(quorum_ns=None) == 2 * SECOND
    assert grace(sync_ns=None, limit_ns=SECOND) == SECOND
    assert grace(step_ns=0, limit_ns=SECOND) == SECOND  # not even the time of a step


@given(TIMES, st.none() | TIMES, st.none() | TIMES, st.integers(0, 50), st.integers(1, 50), TIMES)
def test_a_window_is_an_integer_between_nothing_and_the_limits(
    step_ns: int, quorum_ns: int | None, sync_ns: int | None, tau: int, gap: int, limit_ns: int
) -> None:
    found = grace(
        step_ns=step_ns, quorum_ns=quorum_ns, sync_ns=sync_ns, overlap_steps=tau, gap_steps=gap,
        limit_ns=limit_ns,
    )  # fmt: skip
    assert isinstance(found, int)
    assert 0 <= found <= max(step_ns * gap, limit_ns)


def test_a_mean_takes_the_first_sample_and_a_tenth_of_every_other() -> None:
    mean = Mean()
    assert mean.value_ns is None
    for sample_ns, expected_ns in [(1000, 1000), (2000, 1100), (1100, 1100), (0, 990)]:
        mean.observe(sample_ns)
        assert mean.value_ns == expected_ns
