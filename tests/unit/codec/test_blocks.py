"""What block codecs share: scales that are never subnormal, and errors that say what was wrong."""

from __future__ import annotations

import pytest
import torch

from mend.codec import Int8
from mend.codec.blocks import TINY, get_scales, over, peaks, put_scales
from mend.errors import WireError


def test_a_peak_below_tiny_counts_as_zero() -> None:
    x = torch.zeros(3, 4)
    x[0, 1], x[1, 2] = -TINY, TINY / 2
    sizes, peak = peaks(x)
    assert torch.equal(sizes, x.abs())
    assert peak.tolist() == [[TINY], [0.0], [0.0]]
    assert over(1, peak).tolist() == [[1 / TINY], [0.0], [0.0]]


def test_scales_are_the_first_bytes_of_a_block() -> None:
    rows = torch.full((2, 9), 7, dtype=torch.uint8)
    put_scales(torch.tensor([[1.5], [-2.0]]), rows)
    assert get_scales(rows).tolist() == [[1.5], [-2.0]]
    assert rows[:, 4:].unique().tolist() == [7]


def test_a_range_that_is_not_there_is_named() -> None:
    payload = Int8().encode(torch.ones(128))
    with pytest.raises(WireError, match=r"\[0, 129\) are not in 132 bytes of int8, 132 for each"):
        Int8().decode(payload, 0, 129, torch.empty(129))
