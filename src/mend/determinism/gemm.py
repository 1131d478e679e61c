"""Products of matrices whose bits do not depend on their sizes. Sees tensors.

Definition. One element of a product is a tree (trees.py) over leaves of K; a leaf of k <= 128
pairs is a chain of k fused multiply-adds in fp32, in the order of K, that begins with 0. Rows and
columns never mix. Any BLAS that keeps this order is as good as any other: Legend below.

The chain is taken from BLAS where it has been seen to keep the order: for every new shape the
whole product is first made with numbers whose chain is known, and every element compared. Where it
does not, `by_definition` makes it, slowly. The first level of a tree comes from BLAS as well, which
adds a leaf's chain to what is there already (beta = 1); that is checked likewise.

Legend: L leaves, M rows, N columns, K = L * k what is summed over.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mend.determinism import chains
from mend.determinism.fitting import no_product
from mend.determinism.trees import ZERO, Stack, sum_nodes, tree_sum
from mend.errors import NotDeterministic

LEAF_MAX = 128
"""No BLAS seen so far cuts a K of 128; MKL on some EPYCs cuts 256, after 192."""

LEAVES_MIN = 8
"""Least leaves of a linear's sum, where K allows: shards of 2, 4 and 8 ranks are subtrees."""

SIDE_MIN = 16
"""Rows and columns are padded to it: below, BLAS takes kernels for vectors, of another order."""

ELEMENTS_MAX = 1 << 23
"""Most elements of leaves' products at once; larger products are made in pieces."""

ELEMENTS_MAX_ON_GPU = 1 << 28

SHAPES_MAX = 4096
"""Shapes whose check is remembered."""

_ONES = torch.ones(1, LEAF_MAX, SIDE_MIN)

_SCALES = torch.tensor([1.0, -2.0, 4.0, -8.0])
"""Of the rows and columns of a check: powers of two leave all roundings as they are."""

_whole_chains = False
"""At level everywhere there are no leaves of K and no BLAS: chains.py has other orders."""

_shapes: dict[tuple[tuple[object, ...], bool], bool] = {}
"""(Shape, whether it is added to what is there) -> whether BLAS keeps the order."""


def set_whole_chains(whole: bool) -> None:
    """Choose the order of this process: that of level everywhere, or that of this file."""
    global _whole_chains
    _whole_chains = whole


def has_whole_chains() -> bool:
    """Whether the order is that of level everywhere."""
    return _whole_chains


@cache
def leaf_of(numel: int) -> int:
    """Pairs in a leaf of a linear that sums over `numel`; for a shard: that of the whole."""
    leaf = numel
    while leaf % 2 == 0 and (leaf > LEAF_MAX or numel // leaf < LEAVES_MIN):
        leaf //= 2
    return min(leaf, LEAF_MAX)


def rows_product(a_MK: Tensor, b_NK: Tensor, leaf: int) -> Tensor:
    """a @ b.T as (M, N) in fp32: both are summed over their last dimension, in leaves."""
    if _whole_chains:
        return chains.product(a_MK[None], b_NK.t()[None])[0]
    refuse_wide(a_MK, b_NK)
    (rows, pairs), (columns, inputs) = a_MK.shape, b_NK.shape
    if pairs != inputs:
        raise no_product(a_MK, b_NK.t())
    if pairs % leaf or not rows or not pairs:
        return batch_product(a_MK[None], b_NK.t()[None], leaf)[0]
    leaves = pairs // leaf
    a_MLk, b_NLk = _fp32(a_MK).view(rows, leaves, leaf), _fp32(b_NK).view(columns, leaves, leaf)
    a_LMk, b_LkN = a_MLk.transpose(0, 1), b_NLk.permute(1, 2, 0)
    step = max(SIDE_MIN, ELEMENTS_MAX // max(1, leaves * columns))
    if rows <= step:
        return _tree(a_LMk, b_LkN)
    return torch.cat([_tree(a_LMk[:, row : row + step], b_LkN) for row in range(0, rows, step)])


def batch_product(a_BMK: Tensor, b_BKN: Tensor, leaf: int = LEAF_MAX) -> Tensor:
    """a @ b as (B, M, N) in fp32; leaves begin at multiples of `leaf`, the last may be short."""
    if _whole_chains:
        return chains.product(a_BMK, b_BKN)
    refuse_wide(a_BMK, b_BKN)
    a_BMK, b_BKN = _fp32(a_BMK), _fp32(b_BKN)
    (batch, rows, pairs), (others, inputs, columns) = a_BMK.shape, b_BKN.shape
    if batch != others or pairs != inputs:
        raise no_product(a_BMK, b_BKN)
    if not pairs or not batch * rows * columns:
        return a_BMK.new_zeros(batch, rows, columns)
    a_BMK, b_BKN = _pad(a_BMK, b_BKN)
    if pairs <= leaf:
        return _trim(_chains(a_BMK, b_BKN).add_(ZERO), rows, columns)
    stack = Stack()
    for k in range(0, pairs, 2 * leaf):
        node, odd = _chains(a_BMK[:, :, k : k + leaf], b_BKN[:, k : k + leaf]), k + leaf
        if odd < pairs:
            _add_chains(node, a_BMK[:, :, odd : odd + leaf], b_BKN[:, odd : odd + leaf])
        stack.push(node)
    return _trim(stack.total(), rows, columns)


def row_sums(x: Tensor) -> Tensor:
    """Sums over the last dimension, which stays, with size 1; fp32 for narrower floats.

    Leaves at multiples of 128 (products with 1), trailing zeros change nothing. For dimensions that
    are never sharded: the features of a norm, the keys of a softmax.
    """
    if x.dtype == torch.float64 or x.device.type not in ("cpu", "cuda"):  # no products for them
        return tree_sum(x, -1).unsqueeze(-1)
    if _whole_chains:
        return chains.row_sums(x.reshape(x.shape[:-1].numel(), x.shape[-1])).view(*x.shape[:-1], 1)
    if x.is_cuda:
        from mend.determinism.gpu_kernels import row_sums as on_gpu

        flat: Tensor = on_gpu(_fp32(x).reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous())
        return flat.view(*x.shape[:-1], 1)
    wide, pairs = _fp32(x).reshape(x.shape[:-1].numel(), x.shape[-1]), x.shape[-1]
    if not x.numel():
        summed = wide.new_zeros(x.shape[:-1].numel())
    elif pairs <= LEAF_MAX and len(wide) >= SIDE_MIN:  # a chain of sums is never -0
        summed = _chains(_plain_strides(wide)[None], _ONES[:, :pairs])[0, :, 0]
    else:
        ones = wide.new_ones(SIDE_MIN, pairs)
        summed = rows_product(wide, ones, min(pairs, LEAF_MAX))[:, 0]
    return summed.reshape(*x.shape[:-1], 1)


def outer_product(a_BTN: Tensor, b_BTK: Tensor) -> Tensor:
    """sum over B and T of a[n] * b[k] as (N, K) in fp32: the gradient of a weight.

    Every one of the B sequences has leaves of its own, at multiples of 128 tokens; their sums are
    the leaves of a tree over B.
    """
    refuse_wide(a_BTN, b_BTK)
    (batch, tokens, rows), columns = a_BTN.shape, b_BTK.shape[2]
    if not batch or not tokens:
        return a_BTN.new_zeros(rows, columns, dtype=torch.float32)
    group = 1
    most = ELEMENTS_MAX_ON_GPU if a_BTN.is_cuda else ELEMENTS_MAX
    while group < batch and 2 * group * rows * columns <= most:
        group *= 2
    stack = Stack()
    for first in range(0, batch, group):
        a_GNT, b_GTK = a_BTN[first : first + group].transpose(1, 2), b_BTK[first : first + group]
        if tokens <= LEAF_MAX and not _whole_chains:
            part = _tree(_fp32(a_GNT), _fp32(b_GTK))
        else:
            part = tree_sum(batch_product(a_GNT, b_GTK), 0)
        if group >= batch:
            return part
        stack.push(part)
    return stack.total()


def by_definition(a_LMk: Tensor, b_LkN: Tensor) -> Tensor:
    """The chain of fused multiply-adds, one pair after another. Exact on every IEEE 754 machine."""
    total = a_LMk.new_zeros(a_LMk.shape[0], a_LMk.shape[1], b_LkN.shape[2])
    for k in range(a_LMk.shape[2]):
        total = _fma(a_LMk[:, :, k, None], b_LkN[:, k, None, :], total)
    return total


def shapes_without_blas() -> list[tuple[object, ...]]:
    """(L, M, k, N, strides, threads) of the products that BLAS did not make in this order."""
    return [shape for (shape, adds), holds in _shapes.items() if not holds and not adds]


def refuse_wide(*tensors: Tensor) -> None:
    """Raises NotDeterministic: the definition is of fp32 and what fits into it."""
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotDeterministic(
                f"a matrix product of {tensor.dtype} has no order at level shape",
                "use float32, bfloat16 or float16",
            )


def _fp32(x: Tensor) -> Tensor:
    return x.float().contiguous() if x.dtype != torch.float32 else x


def _tree(a_LMk: Tensor, b_LkN: Tensor) -> Tensor:
    """(M, N): the tree over leaves, at least 1."""
    rows, columns = a_LMk.shape[1], b_LkN.shape[2]
    a_LMk, b_LkN = _pad(a_LMk, b_LkN)
    if a_LMk.shape[0] == 1:
        return _trim(_chains(a_LMk, b_LkN)[0].add_(ZERO), rows, columns)
    nodes = _chains(a_LMk[::2], b_LkN[::2])
    odd = a_LMk[1::2]
    _add_chains(nodes[: odd.shape[0]], odd, b_LkN[1::2])
    return _trim(sum_nodes(nodes), rows, columns)


def _chains(a_LMk: Tensor, b_LkN: Tensor) -> Tensor:
    """(L, M, N): one chain per leaf, of padded sides."""
    return _blas(a_LMk, b_LkN) if _keeps(a_LMk, b_LkN) else by_definition(a_LMk, b_LkN)


def _add_chains(nodes_LMN: Tensor, a_LMk: Tensor, b_LkN: Tensor) -> None:
    """Add one chain to every node."""
    if _keeps(a_LMk, b_LkN, adds=True):
        _blas_added(nodes_LMN, a_LMk, b_LkN)
    else:
        nodes_LMN.add_(_chains(a_LMk, b_LkN))


def _keeps(a_LMk: Tensor, b_LkN: Tensor, adds: bool = False) -> bool:
    """Whether BLAS keeps the order for these shapes and strides; asked once."""
    layout = (*a_LMk.shape, b_LkN.shape[2], a_LMk.stride(), b_LkN.stride(), torch.get_num_threads())
    found = _shapes.get((layout, adds))
    if found is None:
        if len(_shapes) >= SHAPES_MAX:
            _shapes.clear()
        found = _shapes[layout, adds] = _keeps_order(a_LMk, b_LkN, adds)
    return found


def _pad(a_LMk: Tensor, b_LkN: Tensor) -> tuple[Tensor, Tensor]:
    """With at least SIDE_MIN rows and columns."""
    (leaves, rows, pairs), columns = a_LMk.shape, b_LkN.shape[2]
    if rows < SIDE_MIN:
        a_LMk = torch.cat([a_LMk, a_LMk.new_zeros(leaves, SIDE_MIN - rows, pairs)], 1)
    if columns < SIDE_MIN:
        b_LkN = torch.cat([b_LkN, b_LkN.new_zeros(leaves, pairs, SIDE_MIN - columns)], 2)
    return _plain_strides(a_LMk), _plain_strides(b_LkN)


def _trim(product: Tensor, rows: int, columns: int) -> Tensor:
    """Without what _pad() put on."""
    if rows < SIDE_MIN or columns < SIDE_MIN:
        trimmed = product[..., :rows, :columns]
        return trimmed.clone(memory_format=torch.contiguous_format)
    return product


def _plain_strides(x: Tensor) -> Tensor:
    """No dimension may overlap another, as expand() makes them."""
    return x.contiguous() if 0 in x.stride() else x


def _blas(a: Tensor, b: Tensor) -> Tensor:
    # The form with `out` is the library's own product; bmm() may be ours.
    return torch.bmm(a, b, out=a.new_empty(a.shape[0], a.shape[1], b.shape[2]))


def _blas_added(nodes: Tensor, a: Tensor, b: Tensor) -> None:
    torch.baddbmm(nodes, a, b, out=nodes)


def _keeps_order(a_LMk: Tensor, b_LkN: Tensor, adds: bool) -> bool:
    """Whether BLAS makes the chain at every place of a product of these shapes and strides."""
    left_K, right_K, chain_K = _probe()
    (_, rows, pairs), columns = a_LMk.shape, b_LkN.shape[2]
    a = torch.empty_strided(a_LMk.size(), a_LMk.stride())
    b = torch.empty_strided(b_LkN.size(), b_LkN.stride())
    row_M, column_N = _SCALES[torch.arange(rows) % 4], _SCALES[torch.arange(columns) % 4]
    a.copy_(row_M[:, None] * left_K[:pairs])
    b.copy_(right_K[:pairs, None] * column_N)
    expected = chain_K[pairs - 1] * row_M[:, None] * column_N
    if not adds:
        return bool((_blas(a, b) == expected).all())
    nodes = -expected.repeat(a.shape[0], 1, 1)  # 0 is left of the chain, and of no other sum
    _blas_added(nodes, a, b)
    return bool((nodes == 0).all())


@cache
def _probe() -> tuple[Tensor, Tensor, Tensor]:
    """One row, one column, and their chain up to every length.

    Every product takes away half of what is there or more. So whatever is rounded otherwise, at any
    pair, is in the bits of every longer chain: of sums in other orders, in parts, or not fused.
    """
    generator = torch.Generator().manual_seed(18)
    left, right = [torch.tensor(1.23)], [torch.tensor(1.71 * 2**90)]
    chain = [torch.zeros(()), left[0] * right[0]]
    while len(left) < LEAF_MAX:
        a, part = torch.rand(2, 64, generator=generator)
        a, b = a + 1, chain[-1] / (a + 1) * (part / 4 - 0.75)
        totals = _fma(a, b, chain[-1])
        swapped = _fma(left[-1], right[-1], _fma(a, b, chain[-2]))
        shown = int(((totals != a * b + chain[-1]) & (totals != swapped)).nonzero()[0])
        for each, found in ((left, a), (right, b), (chain, totals)):
            each.append(found[shown])
    return torch.stack(left), torch.stack(right), torch.stack(chain[1:])


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c with one rounding, of fp32 tensors.

    The product is exact in fp64. The sum is rounded to odd there, which leaves the rounding to
    fp32 as if it were the only one (Boldo, Melquiond 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)  # TwoSum: total + error is exact
    bits = total.view(torch.int64)
    nearer = torch.where((error > 0) == (total > 0), bits + 1, bits - 1)
    return torch.where((error != 0) & (bits & 1 == 0), nearer, bits).view(torch.float64).float()
