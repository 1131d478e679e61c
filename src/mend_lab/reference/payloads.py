"""The decoded values of a vector, per codec. Formulas block by block, no bytes; imports nothing of
mend on purpose.

Legend: N elements of a vector; k elements of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_TINY = 2.0**-100


def sent(x_N: Tensor, payload: str) -> Tensor:
    """The decoded values of `x_N`."""
    if payload in ("float32", "sparse"):
        return x_N
    if payload == "bfloat16":
        return x_N.to(torch.bfloat16).float()
    size, rule = _RULES[payload]
    cuts = [x_N[start : start + size] for start in range(0, len(x_N), size)]
    blocks = [rule(torch.nn.functional.pad(cut, (0, size - len(cut)))) for cut in cuts]
    return torch.cat(blocks)[: len(x_N)] if blocks else x_N


def _linear(levels: int) -> Callable[[Tensor], Tensor]:
    def rule(x_k: Tensor) -> Tensor:
        """The nearest of `levels` whole numbers up to the greatest magnitude, of either sign."""
        peak = x_k.abs().max()
        if peak < _TINY:
            return torch.zeros_like(x_k)
        return torch.round(x_k * (levels / peak)) * (peak / levels)

    return rule


def _e3m0(x_k: Tensor) -> Tensor:
    """0 or 2^-6 to 2^0 of the greatest magnitude, the nearest; the greater of two as near."""
    peak = x_k.abs().max()
    if peak < _TINY:
        return torch.zeros_like(x_k)
    share = (x_k * (1 / peak)).abs()
    power = torch.zeros_like(x_k)
    for exponent in range(-6, 1):
        least = 0.75 * 2.0**exponent if exponent > -6 else 2.0**-7
        power[share >= least] = 2.0**exponent
    return torch.sign(x_k) * power * peak


def _topk(x_k: Tensor) -> Tensor:
    """The 64 greatest, the first of equals, as one of two magnitudes with their sign; not zeros."""
    size_k = x_k.abs()
    kept = torch.sort(size_k, descending=True, stable=True).indices[:64].sort().values
    size = size_k[kept]
    out_k = torch.zeros_like(x_k)
    if not size.any():
        return out_k
    great = size >= (size.max() + size[size > 0].min()) / 2
    magnitude = torch.where(great, _mean(size, great), _mean(size, ~great & (size > 0)))
    magnitude = torch.where(size > 0, magnitude, 0.0)
    out_k[kept] = torch.where(x_k[kept] < 0, -magnitude, magnitude)
    return out_k


def _mean(size: Tensor, chosen: Tensor) -> Tensor:
    """In bfloat16; added up as a tree: first and second half, until one number is left."""
    total, count = torch.where(chosen, size, 0.0), max(1, int(chosen.sum()))
    while len(total) > 1:
        total = total[: len(total) // 2] + total[len(total) // 2 :]
    mean = total[0] / count
    return (mean if mean >= _TINY else torch.zeros(())).bfloat16().float()


_RULES = {
    "int8": (128, _linear(127)),
    "int4": (128, _linear(7)),
    "e3m0": (256, _e3m0),
    "topk": (4096, _topk),
}
