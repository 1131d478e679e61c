"""Ballots and attempts are single numbers, so that newer is greater and nothing is named twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mend.consensus.ballots import (
    ATTEMPT_LAST,
    NUMBER_MAX,
    attempt_of,
    ballot_of,
    count_of,
    number_of,
    owner_of,
)
from mend.types import WITNESS

EPOCHS = st.tuples(st.integers(1, NUMBER_MAX - 1), st.sampled_from([0, 1, 2, 63, WITNESS]))
COUNTS = st.integers(1, ATTEMPT_LAST)


@given(EPOCHS, EPOCHS)
def test_ballots_are_ordered_by_number_then_by_owner(
    a: tuple[int, int], b: tuple[int, int]
) -> None:
    assert (ballot_of(*a) < ballot_of(*b)) == (a < b)
    assert (ballot_of(*a) == ballot_of(*b)) == (a == b)


@given(EPOCHS)
def test_ballot_names_its_owner(ballot: tuple[int, int]) -> None:
    assert (number_of(ballot_of(*ballot)), owner_of(ballot_of(*ballot))) == ballot
    assert ballot_of(*ballot) > 0, "0 is before the first"


@given(EPOCHS, COUNTS, EPOCHS, COUNTS)
def test_attempts_of_two_ballots_are_never_the_same_number(
    a: tuple[int, int], i: int, b: tuple[int, int], j: int
) -> None:
    """Slices of two attempts must never be taken for one another, whoever coordinated them."""
    first, second = attempt_of(ballot_of(*a), i), attempt_of(ballot_of(*b), j)
    assert (first == second) == ((a, i) == (b, j))
    assert (first < second) == ((a, i) < (b, j)), "a higher ballot's attempts are higher"
    assert count_of(first) == i


def test_the_highest_of_both_still_travels() -> None:
    """Counts on the wire end at 2^62."""
    assert attempt_of(ballot_of(NUMBER_MAX, WITNESS), ATTEMPT_LAST) < 2**62


def test_two_lives_of_a_rack_never_own_the_same_ballot() -> None:
    """One of them may only be cut off; both could win it, each with promises given to the other."""
    first, second = ballot_of(2, 1, 7), ballot_of(2, 1, 8)
    assert first != second
    assert owner_of(first) == owner_of(second) == 1
    assert number_of(first) == number_of(second) == 2
    assert ballot_of(3, 0, 0) > max(first, second), "a higher number wins whatever the life"
