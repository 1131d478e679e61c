"""Dropout by a counter. Whether an element is kept depends on the seed, the step, the layer and the
element's place in the global batch, not on what else is in the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from mend.determinism.coverage import unseen
from mend.determinism.layout import layout
from mend.determinism.linear import refuse_subclass

_BITS = 24
"""Of the number that p is compared with."""

_ADD, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""SplitMix64's constants (Steele, Lea, Flood 2014), as signed integers."""


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """aten::dropout.

    One number is drawn from torch's generator: seeded per step, it names the layer, and activation
    checkpointing, which restores the generator, draws it again.
    """
    if not train or p == 0:
        return x
    refuse_subclass("dropout", x)
    if p == 1:
        return x * 0
    layer = int(torch.randint(0, 1 << 62, ()))
    with unseen():
        kept = kept_elements(x, p, layer)
    return x * kept.to(x.dtype) / (1 - p)


def kept_elements(x: Tensor, p: float, layer: int) -> Tensor:
    """Booleans of x's shape; an element's depends on `layer` and its indices, not on the shape."""
    at, shape = layout(), x.shape
    if not (at.packs(x, 1) or at.packs(x, 2)):
        x = at.unflatten(x)
    first = torch.arange(x.shape[0] if x.dim() else 1, device=x.device)
    rest = list(x.shape[1:])
    hashed = _mix(first + (at.first_row + layer))
    lead = 1
    if at.packs(x, 1) or at.packs(x, 2):
        lead = 1 if at.packs(x, 1) else 2
        sizes = torch.tensor(at.lengths)
        row = torch.arange(len(sizes)).repeat_interleave(sizes).to(x.device)
        within = torch.cat([torch.arange(size) for size in at.lengths]).to(x.device)
        hashed = _mix(_mix(row + (at.first_row + layer)) ^ within)
        rest = list(x.shape[lead:])
    for dim, size in enumerate(rest):
        start = at.first_token if dim == 0 else 0
        hashed = _mix(hashed[..., None] ^ torch.arange(start, start + size, device=x.device))
    kept = ((hashed >> (64 - _BITS)) & ((1 << _BITS) - 1)) >= round(p * (1 << _BITS))
    return kept.reshape(shape)


def _mix(z: Tensor) -> Tensor:
    z = z + _ADD
    z = (z ^ _shift_right(z, 30)) * _FIRST
    z = (z ^ _shift_right(z, 27)) * _SECOND
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)
