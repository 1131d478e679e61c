"""Which rows of a merged delta point against the momentum. Every sum has one order.

Legend: N elements of a block, r its rows of k = ROW_NUMEL elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mend.kernels import ROW_NUMEL, AgainstKernel, against_kernel

NUMEL_MIN = 1 << 15
"""Shorter blocks use torch only: loading numba would take longer than it saves."""


def kernel_for(numel: int) -> AgainstKernel | None:
    """That for blocks of a vector of this length. The first call may take seconds."""
    return against_kernel() if numel >= NUMEL_MIN else None


def against(delta_N: Tensor, state_N: Tensor) -> Tensor:
    """Of each row, whether the sum of delta times state over it is below 0; bool (r,). The sum is
    one of fp64, as a tree of halves of the row, the last of which is filled up with zeros."""
    numel = delta_N.numel()
    rows = -(-numel // ROW_NUMEL)
    against_r = torch.zeros(rows, dtype=torch.bool, device="cpu")
    if (kernel := kernel_for(numel)) is not None:
        kernel(delta_N.numpy(), state_N.numpy(), against_r.numpy())
        return against_r
    product_rk = torch.zeros(rows, ROW_NUMEL, dtype=torch.float64, device="cpu")
    product_N = product_rk.view(-1)[:numel]
    product_N.copy_(delta_N).mul_(state_N)  # exact: twice the 24 bits of an fp32 number
    width = ROW_NUMEL
    while width > 1:
        width //= 2
        product_rk[:, :width].add_(product_rk[:, width : 2 * width])
    return torch.lt(product_rk[:, 0], 0, out=against_r)


def scaled(state_N: Tensor, momentum: float, against_r: Tensor, out_N: Tensor) -> None:
    """out = state * momentum, with a momentum of 0 in the rows that are against."""
    whole = state_N.numel() // ROW_NUMEL
    momentum_r = torch.full(against_r.shape, momentum, dtype=torch.float32, device="cpu")
    momentum_r.masked_fill_(against_r, 0.0)
    state_rk, out_rk = (x[: whole * ROW_NUMEL].view(whole, ROW_NUMEL) for x in (state_N, out_N))
    torch.mul(state_rk, momentum_r[:whole, None], out=out_rk)
    if whole < len(momentum_r):
        rest = slice(whole * ROW_NUMEL, None)
        torch.mul(state_N[rest], momentum_r[-1], out=out_N[rest])
