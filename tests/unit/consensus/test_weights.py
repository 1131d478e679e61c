"""Shares of a merge: exact until the one rounding, the same number on every machine."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mend.consensus.weights import WHOLE, merge_weights, momentum_waits, part_of, stretch_of

H = 8
WORK = st.lists(st.tuples(st.integers(1, 2**62), st.integers(1, 2**62)), min_size=1, max_size=8)


def is_float32(value: float) -> bool:
    return bool(struct.unpack("<f", struct.pack("<f", value))[0] == value)


def stretched(*work: tuple[int, int]) -> float:
    return stretch_of(work, token_weighted=True, period_steps=H)


def test_each_token_counts_alike_whoever_trained_it() -> None:
    """A step of 2 tokens is half of one of 4; two such steps are two steps long already."""
    assert merge_weights([(10, 5), (20, 5)], token_weighted=True) == pytest.approx([1 / 3, 2 / 3])
    assert merge_weights([(10, 5), (20, 10)], token_weighted=True) == [0.5, 0.5]
    assert merge_weights([(35, 28), (10, 8)], token_weighted=True) == [0.5, 0.5]


def test_racks_in_step_are_stretched_by_nothing() -> None:
    assert stretched((10, 5), (20, 5), (1, 5)) == 1
    assert stretched((7, 3)) == 1
    assert stretch_of([(9, 9), (1, 1)], token_weighted=False, period_steps=H) == 1


def test_unequal_steps_stretch_the_step_to_that_of_the_mean_token() -> None:
    """8, 4 and 2 steps of one batch: their mean is 14/3 long, the mean token is behind 84/14."""
    assert stretched((8, 8), (4, 4), (2, 2)) == pytest.approx(84 / 14 / (14 / 3))
    assert stretched((80, 8), (40, 4), (20, 2)) == stretched((8, 8), (4, 4), (2, 2))


def test_more_than_a_period_stretches_nothing() -> None:
    """A straggler's four periods beside racks of one: its length is in the mean as it is."""
    assert stretched((8, 8), (8, 8), (32, 32)) == 1


@given(WORK)
def test_a_stretch_is_between_1_and_the_racks_and_has_no_order(work: list[tuple[int, int]]) -> None:
    found = stretched(*work)
    assert 1 <= found <= len(work)
    assert is_float32(found)
    assert stretched(*work[::-1]) == found


def test_a_merge_is_the_part_of_a_round_that_its_members_weigh() -> None:
    def part(named: list[tuple[int, int]], absent: list[tuple[int, int]]) -> float:
        return part_of(named, absent, token_weighted=True, period_steps=H) / WHOLE

    assert part([(10, 8)], []) == 1
    assert part([(10, 8)], [(10, 8)]) == 0.5
    assert part([(10, 8), (10, 8)], [(20, 8)]) == 0.5, "by its tokens"
    assert part([(8, 8)], [(32, 32)]) == 0.5, "of a period at most"
    assert part([(8, 8)], [(2, 2)]) == pytest.approx(0.8), "who makes fewer steps is missed less"
    assert part([(1, 1)], [(2**62, 1)]) == 1 / WHOLE, "never nothing"
    assert part_of([(9, 1)], [(1, 1)], token_weighted=False, period_steps=H) == WHOLE // 2


@given(WORK, WORK, st.booleans())
def test_a_part_is_a_float32_and_sums_of_parts_are_exact(
    named: list[tuple[int, int]], absent: list[tuple[int, int]], token_weighted: bool
) -> None:
    found = part_of(named, absent, token_weighted=token_weighted, period_steps=H)
    assert 0 < found <= WHOLE
    assert is_float32(found / WHOLE)


def test_unweighted_shares_are_equal_whatever_was_done() -> None:
    assert merge_weights([(1, 1), (999, 3), (5, 7), (2, 2)], token_weighted=False) == [0.25] * 4


def test_a_single_member_has_all_of_it() -> None:
    assert merge_weights([(3, 7)], token_weighted=True) == [1.0]


@given(WORK, st.booleans())
def test_each_share_is_the_exact_one_rounded_once(
    work: list[tuple[int, int]], token_weighted: bool
) -> None:
    raw = [Fraction(*each) if token_weighted else Fraction(1) for each in work]
    found = merge_weights(work, token_weighted=token_weighted)
    for share, exact in zip(found, raw, strict=True):
        assert is_float32(share)
        # half a unit in the last place of float32, or the smallest number there is
        assert abs(Fraction(share) - exact / sum(raw)) <= max(
            Fraction(math.ulp(1.0)) * 2**29 * exact / sum(raw), Fraction(1, 2**149)
        )


@given(WORK)
def test_a_share_belongs_to_its_member_not_to_its_place(work: list[tuple[int, int]]) -> None:
    forward = merge_weights(work, token_weighted=True)
    assert merge_weights(work[::-1], token_weighted=True) == forward[::-1]


def test_a_merge_of_nothing_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="merge of nothing"):
        merge_weights([], token_weighted=True)


def test_momentum_waits_below_a_balance_of_minus_three_twentieths() -> None:
    assert not momentum_waits([(425, 575)], [1.0]), "at the limit"
    assert momentum_waits([(424, 576)], [1.0])
    assert not momentum_waits([(55, 45)], [1.0])
    assert not momentum_waits([(0, 0), (0, 0)], [0.5, 0.5]), "nothing is compared"


def test_momentum_waits_by_the_weighted_mean_of_the_offers_balances() -> None:
    along, against = (3, 1), (100, 300)
    assert not momentum_waits([along, against], [0.5, 0.5])
    assert momentum_waits([along, against], [0.25, 0.75])
    assert momentum_waits([against, along], [0.75, 0.25])
    assert momentum_waits([against, (0, 0)], [0.5, 0.5])
