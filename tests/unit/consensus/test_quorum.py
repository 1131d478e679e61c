"""Votes, bytes and statistics are three questions; the first two must always fit together."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mend.consensus.quorum import hold, quorum, worthwhile
from mend.types import WITNESS

VOTERS = st.frozensets(st.sampled_from([0, 1, 2, 3, 4, 5, WITNESS]), min_size=1)
RACKS = st.frozensets(st.sampled_from([0, 1, 2, 3, 4, 5, 6, WITNESS]))


def subsets(of: frozenset[int]) -> list[frozenset[int]]:
    ordered = sorted(of)
    sizes = range(len(ordered) + 1)
    return [frozenset(s) for s in chain.from_iterable(combinations(ordered, n) for n in sizes)]


@given(VOTERS)
def test_two_quorums_always_share_a_voter(voters: frozenset[int]) -> None:
    quorums = [votes for votes in subsets(voters) if quorum(votes, voters)]
    assert quorums, "all together must be able to decide"
    assert all(a & b for a in quorums for b in quorums)


@given(VOTERS)
def test_voters_cut_in_two_have_a_quorum_on_exactly_one_side(voters: frozenset[int]) -> None:
    for side in subsets(voters):
        assert quorum(side, voters) != quorum(voters - side, voters)


@given(RACKS, VOTERS)
def test_holders_that_meet_every_quorum_hold(
    holders: frozenset[int], voters: frozenset[int]
) -> None:
    met = all(holders & votes for votes in subsets(voters) if quorum(votes, voters))
    assert hold(holders, voters) == met


@given(RACKS, VOTERS)
def test_votes_of_strangers_do_not_count(votes: frozenset[int], voters: frozenset[int]) -> None:
    assert quorum(votes, voters) == quorum(votes & voters, voters)


@pytest.mark.parametrize(
    ("votes", "voters", "may"),
    [
        ({0}, {0, 1}, True),  # half, with the lowest
        ({1}, {0, 1}, False),
        ({0, WITNESS}, {0, 1, WITNESS}, True),
        ({1, WITNESS}, {0, 1, WITNESS}, True),
        ({0}, {0, 1, WITNESS}, False),
        ({1, 2}, {0, 1, 2}, True),
        ({1, 2, WITNESS}, {0, 1, 2, 3, WITNESS}, True),
        ({2, WITNESS}, {1, 2, 3, WITNESS}, False),  # the witness is the highest, not the lowest
        (set(), set(), False),
        ({0}, set(), False),
    ],
)
def test_votes_decide_with_a_majority_or_half_and_the_lowest_voter(
    votes: set[int], voters: set[int], may: bool
) -> None:
    assert quorum(votes, voters) is may


def test_two_racks_and_a_witness_need_the_bytes_twice() -> None:
    """The witness has no bytes, and either rack may die with the witness' vote left."""
    assert not hold({0}, {0, 1, WITNESS})
    assert hold({0, 1}, {0, 1, WITNESS})
    assert hold({0}, {0, 1})
    assert not hold({1}, {0, 1})


def test_worthwhile_counts_offers_and_nothing_else() -> None:
    assert [worthwhile(n, 2) for n in range(4)] == [False, False, True, True]
    assert worthwhile(0, 0)
