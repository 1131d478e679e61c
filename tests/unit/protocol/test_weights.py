"""Shares of a merge: exact until the one rounding, the same number on every machine."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mend.protocol.weights import merge_weights

WORK = st.lists(st.tuples(st.integers(1, 2**62), st.integers(1, 2**62)), min_size=1, max_size=8)


def is_float32(value: float) -> bool:
    return bool(struct.unpack("<f", struct.pack("<f", value))[0] == value)


def test_weight_is_quantity_times_quality() -> None:
    """tokens * (tokens / steps): twice the tokens in the same steps count four times."""
    assert merge_weights([(10, 1), (20, 1)], token_weighted=True) == pytest.approx([0.2, 0.8])
    assert merge_weights([(10, 1), (10, 4)], token_weighted=True) == pytest.approx([0.8, 0.2])


def test_unweighted_shares_are_equal_whatever_was_done() -> None:
    assert merge_weights([(1, 1), (999, 3), (5, 7), (2, 2)], token_weighted=False) == [0.25] * 4


def test_a_single_member_has_all_of_it() -> None:
    assert merge_weights([(3, 7)], token_weighted=True) == [1.0]


@given(WORK, st.booleans())
def test_each_share_is_the_exact_one_rounded_once(
    work: list[tuple[int, int]], token_weighted: bool
) -> None:
    raw = [Fraction(t * t, s) if token_weighted else Fraction(1) for t, s in work]
    for share, exact in zip(merge_weights(work, token_weighted=token_weighted), raw, strict=True):
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
