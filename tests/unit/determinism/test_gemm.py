"""Products are what the definition says, whatever else is in the matrices, on any threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from mend.determinism import gemm
from mend.determinism.digests import same_bits
from mend.determinism.gemm import (
    LEAF_MAX,
    batch_product,
    by_definition,
    leaf_of,
    outer_product,
    row_sums,
    rows_product,
)
from mend.determinism.trees import tree_sum
from mend.errors import NotDeterministic
from tests.unit.determinism.numbers import noise


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_fused_multiply_add_rounds_once() -> None:
    a, b, c = (noise(400, seed=seed) * 10.0 ** (seed - 6) for seed in (5, 6, 7))
    c[::3] = -(a * b)[::3]  # what is left is the rounding of the product
    found = gemm._fma(a, b, c)
    for x, y, z, each in zip(a.tolist(), b.tolist(), c.tolist(), found.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        near = np.float32(float(exact))
        around = [np.nextafter(near, np.float32(way)) for way in (-np.inf, np.inf)]
        best = min((near, *around), key=lambda value: abs(Fraction(float(value)) - exact))
        assert abs(Fraction(each) - exact) == abs(Fraction(float(best)) - exact)


@pytest.mark.parametrize(
    ("numel", "leaf"), [(64, 8), (32, 4), (4096, 128), (11008, 86), (172, 43), (7, 7), (999, 128)]
)
def test_leaf_of_a_product_has_its_pinned_length(numel: int, leaf: int) -> None:
    assert leaf_of(numel) == leaf


def test_a_product_is_the_definition() -> None:
    a, b = noise(20, 64), noise(24, 64, seed=6)
    leaves = by_definition(a.view(20, 8, 8).transpose(0, 1), b.view(24, 8, 8).permute(1, 2, 0))
    assert same_bits(rows_product(a, b, 8), tree_sum(leaves, 0))
    assert torch.allclose(rows_product(a, b, 8), a @ b.t(), atol=1e-4)


def in_parts(parts: list[Iterable[int]]) -> Tensor:
    """The check's numbers, as a BLAS that makes a chain of each part and adds these would."""
    left, right, _ = gemm._probe()
    total = torch.zeros(())
    for part in parts:
        chain = torch.zeros(())
        for k in part:
            chain = gemm._fma(left[k], right[k], chain)
        total = total + chain
    return total


@pytest.mark.parametrize("pairs", [2, 3, 4, 5, 7, 8, 12, 31, 128])
def test_the_check_sees_every_other_order(pairs: int) -> None:
    """On a processor with AVX2, MKL adds the products of the last two of 32 rows otherwise. Numbers
    drawn at random had the same bits by that order, in chains of two: the check had let it pass."""
    chain = gemm._probe()[2][:pairs]
    every, last = range(pairs), chain[-1]
    assert in_parts([every]) == last
    others = {"from the end": in_parts([reversed(every)])}
    others["the last two"] = in_parts([[*every[:-2], pairs - 1, pairs - 2]])
    others["not fused"] = in_parts([[k] for k in every])
    others |= {
        f"cut at {k}": in_parts([every[:k], every[k:]])
        for k in {1, 2, pairs // 2, pairs - 1} - {pairs}
    }
    others |= {f"{n} lanes": in_parts([every[k::n] for k in range(n)]) for n in (2, 3, 4, 8)}
    assert [name for name, found in others.items() if found == last] == []


@pytest.mark.parametrize("pairs", [1, 2, 3, 8, 127, 128])
def test_the_check_sees_what_is_added_otherwise_than_behind_the_chain(pairs: int) -> None:
    left, right, chain = (each[:pairs] for each in gemm._probe())
    fused = rounded = before = -chain[-1]
    for a, b in zip(left, right, strict=True):
        fused, rounded = gemm._fma(a, b, fused), rounded + a * b
    so_far = chain[-2] if pairs > 1 else torch.zeros(())
    assert before + chain[-1] == 0
    assert fused != 0
    assert pairs == 1 or rounded != 0
    assert gemm._fma(left[-1], right[-1], before + so_far) != 0


@pytest.mark.parametrize("pairs", [1, 2, 3, 16, 43, 128])
def test_rows_product_of_odd_shapes_has_the_bits_of_the_definition(pairs: int) -> None:
    """In rows and columns that are no multiples of what a kernel takes at once."""
    for rows, columns in ((32, 16), (33, 17), (46, 35)):
        a, b = noise(rows, 8 * pairs), noise(columns, 8 * pairs, seed=6)
        leaves = by_definition(
            a.view(rows, 8, pairs).transpose(0, 1), b.view(columns, 8, pairs).permute(1, 2, 0)
        )
        assert same_bits(rows_product(a, b, pairs), tree_sum(leaves, 0)), (rows, columns)


def test_an_order_that_blas_does_not_keep_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A BLAS that begins at the end of K: the check says so, and the definition takes over."""
    a, b = noise(18, 40), noise(17, 40, seed=6)
    expected = rows_product(a, b, 5)
    monkeypatch.setattr(gemm, "_shapes", {})
    monkeypatch.setattr(
        gemm, "_blas", lambda x, y: torch.bmm(x.flip(2), y.flip(1), out=torch.empty(0))
    )
    assert same_bits(rows_product(a, b, 5), expected)
    assert len(gemm.shapes_without_blas()) == 1


def test_a_sum_that_blas_does_not_add_behind_the_chain_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A BLAS whose chain begins with what is there in place of 0."""
    a, b = noise(18, 40), noise(17, 40, seed=6)
    expected = rows_product(a, b, 5)

    def begins_there(nodes: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        one = torch.ones(nodes.shape[0], 1, 1)
        for k in range(x.shape[2]):
            nodes.copy_(gemm._fma(x[:, :, k, None] * one, y[:, k, None, :] * one, nodes))

    monkeypatch.setattr(gemm, "_shapes", {})
    monkeypatch.setattr(gemm, "_blas", by_definition)  # that of this machine may keep no order
    monkeypatch.setattr(gemm, "_blas_added", begins_there)
    assert same_bits(rows_product(a, b, 5), expected)
    assert list(gemm._shapes.values()) == [True, False]
    assert gemm.shapes_without_blas() == [], "the products themselves keep the order"


@pytest.mark.parametrize("pairs", [1, 5, 128, 150, 256, 700])
@pytest.mark.parametrize("rows", [1, 40])
def test_sums_of_rows_are_chains_of_128(rows: int, pairs: int) -> None:
    x = noise(rows, pairs) * 1e3
    found = row_sums(x)
    leaves = []
    for first in range(0, pairs, LEAF_MAX):
        total = torch.zeros(rows)
        for k in range(first, min(first + LEAF_MAX, pairs)):
            total = total + x[:, k]
        leaves.append(total)
    assert found.shape == (rows, 1)
    assert same_bits(found[:, 0].clone(), tree_sum(torch.stack(leaves), 0))
    assert same_bits(row_sums(torch.cat([x, x.new_zeros(rows, 90)], 1)), found)
    wide = x.double()
    assert same_bits(row_sums(wide)[:, 0], tree_sum(wide, -1))


@pytest.mark.parametrize(("rows", "columns", "pairs"), [(64, 40, 64), (33, 24, 300), (128, 7, 7)])
@pytest.mark.usefixtures("threads")
def test_a_row_does_not_depend_on_the_others(rows: int, columns: int, pairs: int) -> None:
    a, b, leaf = noise(rows, pairs), noise(columns, pairs, seed=6), leaf_of(pairs)
    whole = rows_product(a, b, leaf)
    for first, count in ((0, 1), (1, 2), (5, 16), (rows - 17, 17)):
        part = slice(first, first + count)
        assert same_bits(rows_product(a[part], b, leaf), whole[part])
    assert same_bits(rows_product(a, b[3:5], leaf), whole[:, 3:5])
    assert same_bits(rows_product(a.t().contiguous().t(), b, leaf), whole)
    for count in (1, 2):
        torch.set_num_threads(count)
        assert same_bits(rows_product(a, b, leaf), whole)


def test_pieces_of_a_large_product_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = noise(100, 32), noise(20, 32, seed=6)
    x, y = noise(7, 9, 20), noise(7, 9, 32, seed=6)
    whole, gradient = rows_product(a, b, 4), outer_product(x, y)
    monkeypatch.setattr(gemm, "ELEMENTS_MAX", 1500)
    assert same_bits(rows_product(a, b, 4), whole)
    assert same_bits(outer_product(x, y), gradient)


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_shards_of_what_is_summed_are_subtrees(shards: int) -> None:
    a, b = noise(20, 64), noise(24, 64, seed=6)
    parts = [
        rows_product(left, right, leaf_of(64))
        for left, right in zip(a.chunk(shards, 1), b.chunk(shards, 1), strict=True)
    ]
    assert same_bits(tree_sum(torch.stack(parts), 0), rows_product(a, b, leaf_of(64)))


@pytest.mark.parametrize("tokens", [5, 300])
def test_a_weights_gradient_is_a_tree_over_sequences(tokens: int) -> None:
    x, y = noise(8, tokens, 20), noise(8, tokens, 24, seed=6)
    whole = outer_product(x, y)
    halves = [outer_product(x[part], y[part]) for part in (slice(0, 4), slice(4, 8))]
    assert same_bits(halves[0] + halves[1], whole)
    padding = x.new_zeros(8, 40, 20), y.new_ones(8, 40, 24)
    padded = [torch.cat([part, more], 1) for part, more in zip((x, y), padding, strict=True)]
    assert same_bits(outer_product(*padded), whole)
    assert torch.allclose(whole, torch.einsum("btn,btk->nk", x, y), atol=1e-2)


def test_leaves_of_a_batch_begin_at_fixed_places() -> None:
    a, b = noise(3, 20, 300), noise(3, 300, 16, seed=6)
    whole = batch_product(a, b)
    longer = torch.cat([a, a.new_zeros(3, 20, 500)], 2), torch.cat([b, b.new_ones(3, 500, 16)], 1)
    assert same_bits(batch_product(*longer), whole)
    assert same_bits(batch_product(a[1:2], b[1:2]), whole[1:2])


def test_bf16_is_summed_in_fp32() -> None:
    a, b = noise(16, 32).bfloat16(), noise(16, 32, seed=6).bfloat16()
    assert same_bits(rows_product(a, b, 4), rows_product(a.float(), b.float(), 4))


def test_fp64_is_refused() -> None:
    with pytest.raises(NotDeterministic, match="float64"):
        rows_product(noise(16, 32).double(), noise(16, 32).double(), 4)


@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 0, 5), (2, 4, 0)])
def test_nothing_to_multiply(shape: tuple[int, int, int]) -> None:
    rows, columns, pairs = shape
    found = rows_product(noise(rows, pairs), noise(columns, pairs), 1)
    assert same_bits(found, torch.zeros(rows, columns))
