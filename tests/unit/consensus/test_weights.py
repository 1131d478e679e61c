"""Shares of a merge: exact until the one rounding, the same number on every machine."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mend.consensus.weights import WHOLE, merge_weights, part_of

H = 8
WORK = st.lists(st.tuples(st.integers(1, 2**62), st.integers(1, 2**62)), min_size=1, max_size=8)


def is_float32(value: float) -> bool:
    return bool(struct.unpack("<f", struct.pack("<f", value))[0] == value)


def test_weight_is_quantity_times_quality() -> None:
    """tokens * (tokens / steps): twice the tokens in the same steps count four times."""
    assert merge_weights([(10, 1), (20, 1)], token_weighted=True, period_steps=H) == pytest.approx(
        [0.2, 0.8]
    )
    assert merge_weights([(10, 1), (10, 4)], token_weighted=True, period_steps=H) == pytest.approx(
        [0.8, 0.2]
    )


def test_an_offer_of_several_periods_weighs_as_one_of_each() -> None:
    """Two equal racks, of which one missed two rounds and a half: 1 and 1, not 3.5 and 1."""
    assert merge_weights([(35, 28), (10, 8)], token_weighted=True, period_steps=H) == [0.5, 0.5]
    assert merge_weights([(5, 4), (10, 8)], token_weighted=True, period_steps=H) == pytest.approx(
        [1 / 3, 2 / 3]
    ), "less than a period is no less per step"


def test_a_merge_is_the_part_of_a_round_that_its_members_weigh() -> None:
    def part(named: list[tuple[int, int]], absent: list[tuple[int, int]]) -> float:
        return part_of(named, absent, token_weighted=True, period_steps=H) / WHOLE

    assert part([(10, 8)], []) == 1
    assert part([(10, 8)], [(10, 8)]) == 0.5
    assert part([(10, 8), (10, 8)], [(20, 8)]) == pytest.approx(1 / 3, rel=1e-6)
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
    assert (
        merge_weights([(1, 1), (999, 3), (5, 7), (2, 2)], token_weighted=False, period_steps=H)
        == [0.25] * 4
    )


def test_a_single_member_has_all_of_it() -> None:
    assert merge_weights([(3, 7)], token_weighted=True, period_steps=H) == [1.0]


@given(WORK, st.booleans())
def test_each_share_is_the_exact_one_rounded_once(
    work: list[tuple[int, int]], token_weighted: bool
) -> None:
    def weight(tokens: int, steps: int) -> Fraction:
        spanned = max(Fraction(1), Fraction(steps, H))
        return Fraction(tokens**2, steps) / spanned if token_weighted else Fraction(1)

    raw = [weight(*each) for each in work]
    found = merge_weights(work, token_weighted=token_weighted, period_steps=H)
    for share, exact in zip(found, raw, strict=True):
        assert is_float32(share)
        # half a unit in the last place of float32, or the smallest number there is
        assert abs(Fraction(share) - exact / sum(raw)) <= max(
            Fraction(math.ulp(1.0)) * 2**29 * exact / sum(raw), Fraction(1, 2**149)
        )


@given(WORK)
def test_a_share_belongs_to_its_member_not_to_its_place(work: list[tuple[int, int]]) -> None:
    forward = merge_weights(work, token_weighted=True, period_steps=H)
    assert merge_weights(work[::-1], token_weighted=True, period_steps=H) == forward[::-1]


def test_a_merge_of_nothing_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="merge of nothing"):
        merge_weights([], token_weighted=True, period_steps=H)
