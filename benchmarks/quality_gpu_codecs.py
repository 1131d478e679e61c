"""benchmarks.quality_gpu_codecs: mend's lossy codecs on many vectors at once, on any device; what
is decoded, without the bytes.

Legend: M vectors, N elements of each, B blocks of k elements.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from mend.codec.blocks import TINY

CODECS = ("none", "bf16", "int8", "int4", "e3m0", "topk")
KEEP = 64


def sent(x_MN: Tensor, codec: str) -> Tensor:
    """What the others decode. Equal to mend's own codec on the CPU, to the bit; on a GPU ties of
    topk may go another way."""
    if codec == "none":
        return x_MN
    if codec == "bf16":
        return x_MN.bfloat16().float()
    size, rule = _RULES[codec]
    numel = x_MN.shape[-1]
    x_MBk = pad(x_MN, (0, -numel % size)).unflatten(-1, (-1, size))
    return rule(x_MBk).flatten(-2)[..., :numel]


def _scaled(x_MBk: Tensor, levels: float) -> tuple[Tensor, Tensor]:
    """x in units of a level, and the greatest magnitude; 0 for blocks that are next to nothing."""
    peak = x_MBk.abs().amax(-1, keepdim=True)
    peak = torch.where(peak < TINY, 0.0, peak)
    return x_MBk * torch.where(peak == 0, 0.0, levels / peak), peak


def _linear(levels: int) -> Callable[[Tensor], Tensor]:
    def rule(x_MBk: Tensor) -> Tensor:
        scaled, peak = _scaled(x_MBk, levels)
        return scaled.round() * (peak / levels)

    return rule


def _e3m0(x_MBk: Tensor) -> Tensor:
    scaled, peak = _scaled(x_MBk, 1)
    power = torch.zeros_like(scaled)
    for exponent in range(-6, 1):
        least = 0.75 * 2.0**exponent if exponent > -6 else 2.0**-7
        power[scaled.abs() >= least] = 2.0**exponent
    return scaled.sign() * power * peak


def _topk(x_MBk: Tensor) -> Tensor:
    index = x_MBk.abs().topk(KEEP, -1).indices.sort(-1).values
    kept = x_MBk.gather(-1, index)
    size = kept.abs()
    least = torch.where(size > 0, size, torch.inf).amin(-1, keepdim=True)
    great = size >= (size.amax(-1, keepdim=True) + least) / 2
    small = ~great & (size > 0)
    level = torch.where(great, _mean(size, great), _mean(size, small))
    level = torch.where(size > 0, level, 0.0)
    return torch.zeros_like(x_MBk).scatter(-1, index, torch.where(kept < 0, -level, level))


def _mean(size: Tensor, chosen: Tensor) -> Tensor:
    total, width = torch.where(chosen, size, 0.0), KEEP
    while width > 1:
        width //= 2
        total = total[..., :width] + total[..., width : 2 * width]
    mean = total / chosen.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mean < TINY, 0.0, mean).bfloat16().float()


_RULES: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "int8": (128, _linear(127)),
    "int4": (128, _linear(7)),
    "e3m0": (256, _e3m0),
    "topk": (4096, _topk),
}
