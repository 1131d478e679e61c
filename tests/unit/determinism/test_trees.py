"""The tree's bits do not depend on where it is cut, on zeros behind it, or on strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mend.determinism.digests import same_bits
from mend.determinism.trees import Stack, tree_sum, tree_sum_dims


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4)) * 1e3


def test_sum_is_the_tree_over_neighbours() -> None:
    a, b, c, d, e = noise(5)
    assert same_bits(tree_sum(torch.stack([a, b, c, d, e]), 0), ((a + b) + (c + d)) + e)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 61])
def test_zeros_behind_change_nothing_and_the_sum_is_right(count: int) -> None:
    x = noise(count, 5)
    padded = torch.cat([x, x.new_zeros(13, 5)])
    assert same_bits(tree_sum(padded, 0), tree_sum(x, 0))
    assert torch.allclose(tree_sum(x, 0).double(), x.double().sum(0), atol=1e-2)


def test_a_sum_of_negative_zeros_is_zero_however_long() -> None:
    x = torch.full((3,), -0.0)
    assert same_bits(tree_sum(x, 0), torch.tensor(0.0))


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_parts_are_nodes(parts: int) -> None:
    x = noise(32, 3)
    sums = torch.stack([tree_sum(part, 0) for part in x.chunk(parts)])
    assert same_bits(tree_sum(sums, 0), tree_sum(x, 0))
    assert not same_bits(x.sum(0), tree_sum(x, 0)), "torch's order: the test would see nothing"


@pytest.mark.parametrize("count", [1, 3, 5, 6, 7, 8, 13])
def test_a_stack_builds_the_same_tree(count: int) -> None:
    x, stack = noise(count, 4), Stack()
    for part in x:
        stack.push(part)
    assert same_bits(stack.total(), tree_sum(x, 0))


def test_the_total_of_a_stack_is_rounded_once() -> None:
    x, stack = noise(6, 4), Stack()
    x[:, 0] = -0.0
    for part in x:
        stack.push(part)
    assert same_bits(stack.total(torch.bfloat16), tree_sum(x, 0).bfloat16())


def test_several_dims_and_strides() -> None:
    x = noise(4, 8, 5)
    expected = tree_sum(tree_sum(x, 1), 0)
    assert same_bits(tree_sum_dims(x, (0, 1)), expected)
    assert same_bits(tree_sum_dims(x.permute(2, 0, 1), (1, -1)), expected)
    assert tree_sum_dims(x, (0, 2), True).shape == (1, 8, 1)
    assert tree_sum_dims(x, ()).shape == ()
    assert same_bits(tree_sum(x[:0], 0), torch.zeros(8, 5))


def test_bf16_is_rounded_once() -> None:
    x = noise(64).bfloat16()
    assert same_bits(tree_sum(x, 0), tree_sum(x.float(), 0).bfloat16())
