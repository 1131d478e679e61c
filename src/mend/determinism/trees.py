"""Sums in one fixed order. Touches tensors only.

The order is a binary tree over neighbours, as if the terms were followed by zeros without end: the
terms may be cut at any multiple of a power of two, and the sums of the parts are nodes of the tree.
Its fp32 additions are elementwise additions of whole tensors, whose bits IEEE 754 defines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FEW = 8
"""Nodes that are added one by one."""

ROW_TYPES = (torch.float32, torch.bfloat16, torch.float16)

ZERO = torch.zeros(())
"""A tensor: torch spends longer on a number of Python's than on adding it to a small tensor."""


_row_trees: Callable[[Tensor], Tensor] | None = None


def set_row_kernel(kernel: Callable[[Tensor], Tensor] | None) -> None:
    """Let `kernel` compute trees over the last dimension of tensors on a GPU: (N, D) of fp32, bf16
    or fp16 with D > 0, contiguous -> (N) in fp32. None: as on a CPU, one pass for every level."""
    global _row_trees
    _row_trees = kernel


def widen(x: Tensor) -> Tensor:
    """A narrower float in fp32; any other tensor as it is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over one dimension, which is removed. fp32 for narrower floats, rounded once."""
    total = wide_sum(x, dim)
    return total if total.dtype == x.dtype else total.to(x.dtype)


def wide_sum(x: Tensor, dim: int) -> Tensor:
    """tree_sum() that stays in fp32."""
    on_gpu = x.is_cuda and x.dtype in ROW_TYPES and x.numel()
    if _row_trees is not None and on_gpu and dim in (-1, x.dim() - 1):
        return _row_trees(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape[:-1])
    wide = widen(x).movedim(dim, 0) if dim else widen(x)
    count = wide.shape[0]
    if count == 0:
        return wide.new_zeros(wide.shape[1:])
    if count == 1:
        return wide[0] + 0.0
    nodes = wide.new_empty((count + 1) // 2, *wide.shape[1:])
    torch.add(wide[0 : count - 1 : 2], wide[1::2], out=nodes[: count // 2])
    if count % 2:
        nodes[-1].copy_(wide[-1])
    return sum_nodes(nodes)


def sum_nodes(nodes: Tensor) -> Tensor:
    """The tree over the first dimension, at least 1, whose memory is given up for it."""
    while (count := nodes.shape[0]) > FEW:
        nodes[0 : count - 1 : 2].add_(nodes[1::2])
        nodes = nodes[::2]
    # Fewer calls than slices of all of them, and this is where a small sum spends its time.
    row = list(nodes.unbind(0))
    while len(row) > 2:
        for index in range(0, len(row) - 1, 2):
            row[index].add_(row[index + 1])
        row = row[::2]
    # In memory of its own: what is returned must not keep that of all nodes. A sum of nothing but
    # -0 depends on how many zeros follow it.
    total = row[0] + row[1] if len(row) == 2 else row[0]
    return total.add_(ZERO)


def tree_sum_dims(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """Sum over several dimensions, the last of them first; none named: over all."""
    return wide_sum_dims(x, dims, keepdim).to(x.dtype)


def wide_sum_dims(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """tree_sum_dims() that stays in fp32."""
    chosen = sorted({dim % x.dim() for dim in dims} if dims else range(x.dim()), reverse=True)
    total = x if chosen else widen(x)
    for dim in chosen:
        total = wide_sum(total, dim)
    for dim in sorted(chosen) if keepdim else ():
        total = total.unsqueeze(dim)
    return total


class Stack:
    """The tree for parts that come one after another: a binary counter of finished nodes."""

    def __init__(self) -> None:
        self._nodes: list[tuple[int, Tensor]] = []

    def push(self, part: Tensor) -> None:
        """The next leaf, or the next whole subtree, always of the same number of leaves."""
        height = 0
        while self._nodes and self._nodes[-1][0] == height:
            part = self._nodes.pop()[1] + part
            height += 1
        self._nodes.append((height, part))

    def total(self, dtype: torch.dtype | None = None) -> Tensor:
        """Of all that was pushed, at least one part, rounded once to `dtype`; the stack is empty
        again."""
        _, total = self._nodes.pop()
        while self._nodes:
            total = self._nodes.pop()[1] + total
        if dtype in (None, total.dtype):
            return total + 0.0
        return torch.add(total, 0.0, out=torch.empty_like(total, dtype=dtype))  # one pass
