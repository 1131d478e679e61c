"""kernels.triton_offers: an offer in a single pass on a GPU, in Triton. Touches tensors only.

The formats are those of mend.codec: raw, linear, e3m0. The bits are those of the host, so every
operation is rounded where it is rounded there: divisions are IEEE (`div_rn`; Triton's `/` is not),
nothing is fused (`enable_fp_fusion=False` at the launch), numbers become whole or bfloat16 by
arithmetic that rounds to nearest even everywhere, and subnormals are kept.

A program reads snapshot, anchor and residual of ROW_NUMEL elements. It writes the delta in place
of the snapshot, the payload, what is left out, and a column of `found`: the greatest magnitude of x
and of what is left out (NaN where one is NaN), the sums of the squares of what is left out and of
x.

Legend: N elements, B payload bytes, G programs, r blocks of a program, h elements of half a block;
_p: pointers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor, float32, int8, int16

from mend.kernels import ROW_NUMEL, DeviceOfferKernel

_TILE = tl.constexpr(ROW_NUMEL)
_WARPS = 8
_WHOLE = tl.constexpr(1.5 * 2.0**23)
"""Added and taken away again it leaves a number rounded to a whole one, ties to even."""
_TINY = tl.constexpr(2.0**-100)
"""codec.blocks.TINY"""


# Triton looks names of annotations up: they must be its own.


def _part(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


@_part
def _size(x: tl.tensor) -> tl.tensor:
    """The bits of the magnitudes. They have the magnitudes' order, with NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@_part
def _x(
    delta_p: tl.tensor,
    anchor_p: tl.tensor,
    residual_p: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    owes: tl.constexpr,
) -> tl.tensor:
    """(anchor - snapshot) + residual; 0 outside. The delta takes the place of the snapshot."""
    snapshot = tl.load(delta_p + place, mask=inside, other=0.0)
    x = tl.load(anchor_p + place, mask=inside, other=0.0) - snapshot
    tl.store(delta_p + place, x, mask=inside)
    if owes:
        x = x + tl.load(residual_p + place, mask=inside, other=0.0)
    return x


@_part
def _tell(
    found_p: tl.tensor, size: tl.tensor, left_size: tl.tensor, left: tl.tensor, length: tl.tensor
) -> None:
    """Sizes of magnitudes, and sums of squares: one each."""
    column_p, programs = found_p + tl.program_id(0), tl.num_programs(0)
    tl.store(column_p, size.to(tl.float32, bitcast=True))
    tl.store(column_p + programs, left_size.to(tl.float32, bitcast=True))
    tl.store(column_p + 2 * programs, left)
    tl.store(column_p + 3 * programs, length)


@_part
def _bfloat16(
    delta_p: tl.tensor, anchor_p: tl.tensor, residual_p: tl.tensor, left_p: tl.tensor,
    payload_p: tl.tensor, found_p: tl.tensor, numel: tl.tensor, owes: tl.constexpr,
) -> None:  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * _TILE + tl.arange(0, _TILE)
    inside = place < numel
    x = _x(delta_p, anchor_p, residual_p, place, inside, owes)
    size, sign = _size(x), (x.to(tl.int32, bitcast=True) >> 16) & 0x8000
    half = ((size + 0x7FFF + ((size >> 16) & 1)) >> 16) | sign
    tl.store(payload_p + place, half.to(tl.int16), mask=inside)
    left = x - (half << 16).to(tl.float32, bitcast=True)
    tl.store(left_p + place, left, mask=inside)
    left_size = tl.max(_size(left), axis=0)
    _tell(found_p, tl.max(size, axis=0), left_size, tl.sum(left * left), tl.sum(x * x))


@_part
def _level(x_rh: tl.tensor, factor_r: tl.tensor) -> tl.tensor:
    return ((x_rh * factor_r[:, None] + _WHOLE) - _WHOLE).to(tl.int32)


@_part
def _power(x_rh: tl.tensor, factor_r: tl.tensor) -> tl.tensor:
    """codec.e3m0 says why: sign, exponent and 7 bits of mantissa decide."""
    bits = (x_rh * factor_r[:, None]).to(tl.int32, bitcast=True) >> 16
    size = bits & 0x7FFF
    lowest = tl.maximum(tl.minimum(size >> 7, 120) - 119, 0)
    return tl.maximum(((size + 64) >> 7) - 120, lowest) + ((bits >> 12) & 8)


@_part
def _power_value(code: tl.tensor) -> tl.tensor:
    level = code & 7
    size = tl.where(level == 0, 0, (level + 120) << 23)
    return (size | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@_part
def _blocks(
    delta_p: tl.tensor, anchor_p: tl.tensor, residual_p: tl.tensor, left_p: tl.tensor,
    bytes_p: tl.tensor, scales_p: tl.tensor, found_p: tl.tensor, numel: tl.tensor,
    owes: tl.constexpr, half: tl.constexpr, stride: tl.constexpr, highest: tl.constexpr,
) -> None:  # fmt: skip
    """Blocks of 2 * half elements in `stride` bytes. highest: level; 0: levels are powers of two,
    the greatest of which is the scale."""
    rows: tl.constexpr = _TILE // (2 * half)
    row_r = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    h = tl.arange(0, half)[None, :]
    low_place, used_r = row_r[:, None] * (2 * half) + h, row_r * (2 * half) < numel
    high_place = low_place + half
    low_inside, high_inside = low_place < numel, high_place < numel
    low = _x(delta_p, anchor_p, residual_p, low_place, low_inside, owes)
    high = _x(delta_p, anchor_p, residual_p, high_place, high_inside, owes)
    size_r = tl.maximum(tl.max(_size(low), axis=1), tl.max(_size(high), axis=1))
    peak_r = size_r.to(tl.float32, bitcast=True)
    peak_r = tl.where(peak_r < _TINY, 0.0, peak_r)
    inverse_r = tl.where(peak_r == 0.0, 0.0, tl.div_rn(1.0, peak_r))
    pair_p, used = bytes_p + (row_r[:, None] * stride + 4 + h), used_r[:, None]
    if highest == 0:
        scale_r = peak_r
        low_code, high_code = _power(low, inverse_r), _power(high, inverse_r)
        tl.store(pair_p, ((high_code << 4) | low_code).to(tl.int8), mask=used)
        low_sent = _power_value(low_code) * scale_r[:, None]
        high_sent = _power_value(high_code) * scale_r[:, None]
    else:
        scale_r = tl.div_rn(peak_r, 1.0 * highest)
        factor_r = tl.where(peak_r == 0.0, 0.0, inverse_r * highest)
        low_level, high_level = _level(low, factor_r), _level(high, factor_r)
        if highest == 7:
            tl.store(pair_p, (high_level * 16 + low_level + 8).to(tl.int8), mask=used)
        else:
            tl.store(pair_p, low_level.to(tl.int8), mask=used)
            tl.store(pair_p + half, high_level.to(tl.int8), mask=used)
        low_sent = low_level.to(tl.float32) * scale_r[:, None]
        high_sent = high_level.to(tl.float32) * scale_r[:, None]
    tl.store(scales_p + row_r * (stride // 4), scale_r, mask=used_r)
    low_left, high_left = low - low_sent, high - high_sent
    tl.store(left_p + low_place, low_left, mask=low_inside)
    tl.store(left_p + high_place, high_left, mask=high_inside)
    left_size = tl.max(tl.maximum(tl.max(_size(low_left), 1), tl.max(_size(high_left), 1)), 0)
    left_r = tl.sum(low_left * low_left + high_left * high_left, axis=1)
    length_r = tl.sum(low * low + high * high, axis=1)
    _tell(found_p, tl.max(size_r, axis=0), left_size, tl.sum(left_r, 0), tl.sum(length_r, 0))


_BLOCKS = {"int8": (64, 132, 127), "int4": (64, 68, 7), "e3m0": (128, 132, 0)}
"""codec -> elements of half a block, bytes of a block, highest level."""


def kernel(codec: str) -> DeviceOfferKernel:
    """Of the codec of this name: bfloat16, int8, int4 or e3m0."""

    def run(
        delta_N: Tensor,
        anchor_N: Tensor,
        residual_N: Tensor | None,
        left_N: Tensor,
        payload_B: Tensor,
        found_4G: Tensor,
    ) -> None:
        owes, grid = residual_N is not None, (found_4G.shape[1],)
        vectors = delta_N, anchor_N, residual_N if residual_N is not None else delta_N, left_N
        how = {"num_warps": _WARPS, "enable_fp_fusion": False}
        if codec == "bfloat16":
            rest = payload_B.view(int16), found_4G, delta_N.numel(), owes
            _bfloat16[grid](*vectors, *rest, **how)
        else:
            rows = payload_B.view(int8), payload_B.view(float32)
            _blocks[grid](*vectors, *rows, found_4G, delta_N.numel(), owes, *_BLOCKS[codec], **how)

    return run
