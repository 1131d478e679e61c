"""benchmarks.quality_gpu_codecs: mend's lossy codecs on many vectors at once, on any device; what
is decoded, without the bytes.

Legend: M vectors, N elements of each, B blocks of k elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from mend.codec.blocks import TINY
from mend.codec.powersgd import RANK_MAX

CODECS = ("none", "bf16", "int8", "int4", "e3m0", "topk")
KEEP = 64


def rank_of(codec: str) -> int:
    """r of powersgd-r, 0 for every other codec. Raises ValueError for a name that is none."""
    name, _, rank = codec.partition("-")
    if name == "powersgd" and rank.isdecimal() and 1 <= int(rank) <= RANK_MAX:
        return int(rank)
    if codec not in CODECS:
        raise ValueError(f"codec {codec!r}: there are {', '.join(CODECS)}, powersgd-1 to -64")
    return 0


def sent(x_MN: Tensor, codec: str) -> Tensor:
    """x encoded and decoded. Equal to mend's own codec on the CPU, to the bit; on a GPU ties of
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


class LowRank:
    """powersgd of one fragment: mend's rule (codec.powersgd) in float32, without its rounding to
    whole numbers. `shapes`: of the weights in the fragment, end to end. Racks share a seed's basis.

    Legend: S seeds, R racks, m rows, n columns, k the length of a basis or factor, r the rank.
    """

    def __init__(self, rank: int, shapes: Sequence[Sequence[int]], seeds: int) -> None:
        self._rank, self._shapes = rank, [tuple(shape) for shape in shapes]
        self._cuts = list(accumulate((torch.Size(s).numel() for s in shapes), initial=0))
        self._seeds, self.version = seeds, 0
        self.bases: list[list[Tensor]] = []
        """Bases by side and matrix: (S, k, r)."""

    def _matrices(self) -> list[int]:
        return [i for i, s in enumerate(self._shapes) if len(s) == 2 and min(s) > self._rank]

    def _begin(self, device: torch.device) -> None:
        chance = torch.Generator().manual_seed(self._rank)
        self.bases = [
            [
                _orthonormal(
                    torch.randn(self._shapes[i][1 - side], self._rank, generator=chance)
                ).to(device)[None].repeat(self._seeds, 1, 1)
                for i in self._matrices()
            ]
            for side in (0, 1)
        ]  # fmt: skip

    def sent(self, x_SRN: Tensor) -> tuple[Tensor, list[Tensor]]:
        """x encoded and decoded, and the factors (S, R, k, r) that are sent."""
        if not self.bases:
            self._begin(x_SRN.device)
        side, y_SRN, factors = self.version % 2, x_SRN.bfloat16().float(), []
        for number, i in enumerate(self._matrices()):
            begin, end = self._cuts[i], self._cuts[i + 1]
            x_SRmn = x_SRN[..., begin:end].unflatten(-1, self._shapes[i])
            basis_S1kr = self.bases[side][number][:, None]
            factor = (x_SRmn.mT if side else x_SRmn) @ basis_S1kr
            factors.append(factor)
            left, right = (basis_S1kr, factor) if side else (factor, basis_S1kr)
            y_SRN[..., begin:end] = (left @ right.mT).flatten(-2)
        return y_SRN, factors

    def advance(self, side: int, factors: Sequence[Tensor], weights: Sequence[float]) -> None:
        """The other side's basis, from the merged factors of offers of this side."""
        self.version += 1
        if side != (self.version - 1) % 2:
            return  # offers of the version before: the newest basis of that side stays
        share = torch.tensor(weights, device=factors[0].device)[:, None, None]
        merged = [(each * share).sum(1) for each in factors]
        self.bases[self.version % 2] = [_orthonormal(_fill_up(each)) for each in merged]


def _fill_up(merged_Skr: Tensor) -> Tensor:
    """Add a little noise, so that there are r directions."""
    chance = torch.Generator().manual_seed(merged_Skr.shape[-2])
    noise = torch.rand(merged_Skr.shape[-2:], generator=chance).to(merged_Skr.device) * 2 - 1
    peak = merged_Skr.abs().amax((-2, -1), keepdim=True).clamp(min=TINY)
    return merged_Skr / peak + 2.0**-10 * noise


def _orthonormal(values_kr: Tensor) -> Tensor:
    return torch.linalg.qr(values_kr.float()).Q


_RULES: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "int8": (128, _linear(127)),
    "int4": (128, _linear(7)),
    "e3m0": (256, _e3m0),
    "topk": (4096, _topk),
}
