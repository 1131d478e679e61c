"""A difference gives the bits of the new vector, or is not made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mend.engine.features.difference import BLOCK_NUMEL, DENSE, difference_of, with_difference
from mend.errors import WireError


def noise(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


@pytest.mark.parametrize("numel", [1, 7, 4096, BLOCK_NUMEL + 3, 2 * BLOCK_NUMEL])
@pytest.mark.parametrize("every", [2, 10, 1000])
def test_sparse_change_comes_back_bit_by_bit(numel: int, every: int) -> None:
    old = noise(numel)
    new = old.clone()
    new[1::every] += 1.0
    new[::every] = -new[::every]
    new[numel // 2] = -0.0 if float(old[numel // 2]) == 0.0 else old[numel // 2]
    data = difference_of(old, new)
    if data == DENSE:
        assert every == 2 or numel < 64
        return
    assert len(data) < 4 * numel
    assert with_difference(old, data).view(torch.int32).tolist() == new.view(torch.int32).tolist()


def test_zero_that_changes_its_sign_is_a_change() -> None:
    old, new = torch.zeros(100), torch.zeros(100)
    new[7] = -0.0
    assert with_difference(old, difference_of(old, new)).view(torch.int32)[7] != 0


def test_training_changes_everything_and_makes_no_difference() -> None:
    old = noise(4096)
    assert difference_of(old, old * 1.01) == DENSE


@pytest.mark.parametrize("harm", ["short", "long", "kind", "counts"])
def test_damaged_difference_is_refused(harm: str) -> None:
    old = noise(100)
    new = old.clone()
    new[3] += 1
    data = bytearray(difference_of(old, new))
    if harm == "short":
        data = data[:9]
    elif harm == "long":
        data += b"\0\0"
    elif harm == "kind":
        data[0] = 7
    else:
        data[1] ^= 0x80
    with pytest.raises(WireError):
        with_difference(old, bytes(data))
