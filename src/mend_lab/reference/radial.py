"""The radial-directional mean of one tensor, to read and to test against."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor


def fp32(value: float | Fraction) -> float:
    """The nearest float32, as a Python float."""
    rounded: float = struct.unpack("<f", struct.pack("<f", float(value)))[0]
    return rounded


def on_grid(offer: Tensor) -> tuple[list[int], int]:
    """Rounded to multiples of 2^step, which the greatest element decides; as integers, and step."""
    greatest = float(offer.abs().max()) if offer.numel() else 0.0
    step = 24 * (math.frexp(greatest)[1] // 24 - 1)
    return [int(x) for x in torch.round(offer.double() * 2.0**-step).tolist()], step


def radial(offers: Sequence[Tensor], weights: Sequence[float]) -> list[float]:
    """f of the radial-directional mean sum f v = (sum w |v|) phi(sum w phi(v)), phi(x) = x / |x|.

    Lengths and products of the rounded vectors are exact; from there on, doubles in rack order.
    """
    grids = [on_grid(offer) for offer in offers]
    roots = [math.sqrt(sum(x * x for x in v)) for v, _ in grids]
    lengths = [math.ldexp(root, step) for root, (_, step) in zip(roots, grids, strict=True)]
    length = square = 0.0
    for w, v in zip(weights, lengths, strict=True):
        length += w * v
    pointing = [m for m, v in enumerate(lengths) if v > 1e-12]
    for m in pointing:
        for n in pointing:
            product = sum(x * y for x, y in zip(grids[m][0], grids[n][0], strict=True))
            square += weights[m] * weights[n] * (product / (roots[m] * roots[n]))
    direction = math.sqrt(max(square, 0.0))
    if len(offers) == 1 or direction < 1e-6:
        return list(weights)  # nothing to average, or the directions cancel out: the plain mean
    factors = [0.0] * len(offers)
    for m in pointing:
        factors[m] = length * weights[m] / (lengths[m] * direction)
    try:
        return [fp32(f) for f in factors]
    except OverflowError:  # one offer is 2^100 times as long as another
        return list(weights)
