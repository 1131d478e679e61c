"""kernels.triton_offers: an offer in a single pass on a GPU, in Triton. Touches tensors only.

The formats are those of mend.codec: raw, linear, e3m0, topk. The bits are those of the host, so
every operation is rounded where it is rounded there: divisions are IEEE (`div_rn`; Triton's `/` is
not), nothing is fused (`enable_fp_fusion=False` at the launch), numbers become whole or bfloat16 by
arithmetic that rounds to nearest even everywhere, and subnormals are kept.

A program reads snapshot, anchor and residual of ROW_NUMEL elements. It writes the delta in place of
the snapshot, the payload, what is left out, and a column of `found`: the greatest magnitudes of x
and of what is left out (NaN where one is NaN), and the sums of the squares of what is left out and
of x.

Legend: N elements, B payload bytes, G programs, r blocks of a program, h elements of half a block,
k = ROW_NUMEL elements, s of them that topk keeps; _p: pointers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor, float32, int8, int16, int32

from mend.kernels import ROW_NUMEL, DeviceOfferKernel

_TILE = tl.constexpr(ROW_NUMEL)
_WARPS = 8
_TOPK = {"num_warps": 4, "maxnreg": 128}
"""The search holds a chunk in registers: 4 such programs fit on a multiprocessor, not 3."""
_WHOLE = tl.constexpr(1.5 * 2.0**23)
"""Adding and subtracting it rounds a number to a whole one, ties to even."""
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
    """Write the column of this program: magnitudes as their bits, and sums of squares."""
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
    """See codec.e3m0: sign, exponent and 7 bits of mantissa decide."""
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
    """Blocks of 2 * half elements in `stride` bytes. highest: the greatest level; 0: levels are
    powers of two, the greatest of which is the scale."""
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


# Parts of topk. The 64 greatest elements of a chunk are those that reach a border. The search for
# it reads the chunk few times, as that takes the time. Which numbers are tried may differ between
# devices; what is kept does not.

_KEEP, _CHUNK_BYTES, _COLS = tl.constexpr(64), tl.constexpr(116), tl.constexpr(32)
_INF = tl.constexpr(0x7F800000)
_NEAR = tl.constexpr(2 << 23)
"""Where the search for the border begins: at a quarter of the greatest magnitude."""
_GUESSES = tl.constexpr(10)
_AIM = tl.constexpr(63.7)


@_part
def _next(
    low: tl.tensor, high: tl.tensor, above: tl.tensor, below: tl.tensor, looks: tl.tensor
) -> tl.tensor:
    """The number that KEEP elements are expected to reach, if the logarithm of how many reach a
    number falls evenly. In the end it halves the interval, which bounds the number of looks."""
    half = low + ((high - low) >> 1)
    share = tl.maximum(above, 0.0) / (tl.maximum(above, 0.0) + below)
    guess = low + ((high - low).to(tl.float32) * share).to(tl.int32)
    guess = tl.where(low == 1, tl.maximum(high - _NEAR, half), guess)
    return tl.where(looks < _GUESSES, tl.maximum(tl.minimum(guess, high - 1), low + 1), half)


@_part
def _border(size: tl.tensor, top: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The greatest number that KEEP sizes reach, or one that exactly KEEP reach, if that is found
    sooner; and how many reach it."""
    high = tl.minimum(top, _INF) + 1
    near = tl.maximum(high - _NEAR, 1)
    counts = tl.sum((size >= near).to(tl.int32) + ((size >= 1).to(tl.int32) << 16))
    found, nonzero = counts & 0xFFFF, counts >> 16
    enough, few = found >= _KEEP, nonzero < _KEEP
    low = tl.where(enough, near, tl.where(few, 0, 1))
    high = tl.where(enough, high, tl.where(few, 1, near))
    count = tl.where(enough, found, tl.where(few, _TILE, nonzero))
    beyond = tl.where(enough, 0, found)
    above = tl.log2(count.to(tl.float32) / _AIM)
    below = tl.log2(_AIM / tl.maximum(beyond.to(tl.float32), 0.5))
    looks, side, empty = 0, 0, False
    while (high - low > 1) & (count > _KEEP):
        if empty:  # nothing was between the last two: equal sizes end there
            middle = tl.maximum(tl.max(tl.where(size < high, size, 0)), low + 1)
        else:
            middle = _next(low, high, above, below, looks)
        found = tl.sum((size >= middle).to(tl.int32))
        enough = found >= _KEEP
        high = tl.where(enough, tl.where(empty, middle + 1, high), middle)
        low = tl.where(enough, middle, low)
        empty = (empty == 0) & ((found == count) | (found == beyond))
        # A side that stays counts for half, so that it does not stay for long (Illinois method).
        away = tl.log2(tl.maximum(found.to(tl.float32), 0.5) / _AIM)
        above = tl.where(enough, away, tl.where(side < 0, above * 0.5, above))
        below = tl.where(enough, tl.where(side > 0, below * 0.5, below), -away)
        count, beyond = tl.where(enough, found, count), tl.where(enough, beyond, found)
        side, looks = tl.where(enough, 1, -1), looks + 1
    return low, count


@_part
def _word(chosen: tl.tensor, c: tl.tensor) -> tl.tensor:
    """A bit per column."""
    return tl.xor_sum(chosen.to(tl.int32) << c, axis=1)


@_part
def _ones(bits: tl.tensor) -> tl.tensor:
    """How many bits are set."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return (((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@_part
def _lowest(bits: tl.tensor, most: tl.tensor) -> tl.tensor:
    """The lowest set bits, at most `most`."""
    place = bits & 0
    for step in tl.static_range(5):
        further = place + (16 >> step)
        place = tl.where(_ones(bits & ((1 << further) - 1)) <= most, further, place)
    return tl.where(_ones(bits) <= most, bits, bits & ((1 << place) - 1))


@_part
def _kept(size: tl.tensor, border: tl.tensor, count: tl.tensor, c: tl.tensor) -> tl.tensor:
    """One bit per element, a row of the chunk in a word: set for those above the border, and for
    the first of those at it."""
    if count > _KEEP:
        bits_r, alike_r = _word(size > border, c), _word(size == border, c)
        missing, ones_r = _KEEP - tl.sum(_ones(bits_r), axis=0), _ones(alike_r)
        bits_r = bits_r | _lowest(alike_r, missing - (tl.cumsum(ones_r, axis=0) - ones_r))
    else:
        bits_r = _word(size >= border, c)
    return bits_r


@_part
def _list(bits_r: tl.tensor, row_r: tl.tensor, room_p: tl.tensor) -> None:
    """The indices of what is kept, ascending."""
    count_r = _ones(bits_r)
    place_r = tl.cumsum(count_r, axis=0) - count_r
    most = tl.max(count_r, axis=0)
    while most > 0:
        lowest = (bits_r & -bits_r).to(tl.float32).to(tl.int32, bitcast=True)
        index_r = row_r * _COLS + (((lowest >> 23) & 255) - 127)
        # More than KEEP elements are NaN or Inf.
        tl.store(room_p + place_r, index_r, mask=(bits_r != 0) & (place_r < _KEEP))
        bits_r, place_r, most = bits_r & (bits_r - 1), place_r + 1, most - 1


@_part
def _means(size_s: tl.tensor, counts_s: tl.tensor, great_s: tl.tensor) -> tl.tensor:
    """The mean of those that are not great, and 16 bits above it the mean of those that are, as
    bfloat16, rounded to nearest even. Added up as a tree of halves; 0 if there are none."""
    chosen = counts_s[None, :] & (great_s[None, :] == (tl.arange(0, 2)[:, None] == 1))
    half = tl.where(chosen, size_s[None, :], 0).to(tl.float32, bitcast=True)
    half = tl.sum(tl.reshape(half, (2, 2, 32)), axis=1)
    half = tl.sum(tl.reshape(half, (2, 2, 16)), axis=1)
    half = tl.sum(tl.reshape(half, (2, 2, 8)), axis=1)
    half = tl.sum(tl.reshape(half, (2, 2, 4)), axis=1)
    half = tl.sum(tl.reshape(half, (2, 2, 2)), axis=1)
    count = tl.maximum(tl.sum(chosen.to(tl.int32), axis=1), 1)
    mean = tl.div_rn(tl.sum(half, axis=1), count.to(tl.float32))
    bits = tl.where(mean < _TINY, 0.0, mean).to(tl.int32, bitcast=True)
    return tl.sum(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << (16 * tl.arange(0, 2)), axis=0)


@_part
def _together(parts: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """The numbers of a column as one, each `bits` bits above the one before."""
    shift = bits * tl.arange(0, parts.shape[0])
    return tl.sum(parts << shift[:, None], axis=0)


@_part
def _put(
    index_s: tl.tensor, x_s: tl.tensor, top: tl.tensor, bytes_p: tl.tensor, words_p: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Write a chunk from the bits of what is kept. Returns its two magnitudes, and from which size
    on an element gets the great one."""
    size_s = x_s & 0x7FFFFFFF
    counts_s = size_s != 0
    # In place of each 0 the last nonzero element is sent again.
    last = tl.max(tl.where(counts_s, index_s, 0), axis=0)
    x_last = tl.sum(tl.where(counts_s & (index_s == last), x_s, 0), axis=0)
    index_s, x_s = tl.where(counts_s, index_s, last), tl.where(counts_s, x_s, x_last)
    size_s = x_s & 0x7FFFFFFF
    least = tl.min(size_s, axis=0).to(tl.float32, bitcast=True)
    middle = ((top.to(tl.float32, bitcast=True) + least) * 0.5).to(tl.int32, bitcast=True)
    great_s = size_s >= middle
    means = _means(size_s, counts_s, great_s)
    tl.store(words_p, means)
    s, half, quarter = tl.arange(0, _KEEP), tl.arange(0, _KEEP // 2), tl.arange(0, _KEEP // 4)
    tl.store(bytes_p + 4 + s, index_s.to(tl.int8))
    high = _together(tl.reshape(index_s >> 8, (2, _KEEP // 2)), 4)
    tl.store(bytes_p + 4 + _KEEP + half, high.to(tl.int8))
    code_s = great_s.to(tl.int32) | ((x_s >> 30) & 2)
    codes = _together(tl.reshape(code_s, (4, _KEEP // 4)), 2)
    tl.store(bytes_p + 4 + _KEEP + _KEEP // 2 + quarter, codes.to(tl.int8))
    return means, middle


@_part
def _topk(
    delta_p: tl.tensor, anchor_p: tl.tensor, residual_p: tl.tensor, left_p: tl.tensor,
    room_p: tl.tensor, bytes_p: tl.tensor, words_p: tl.tensor, found_p: tl.tensor,
    numel: tl.tensor, owes: tl.constexpr, in_weights: tl.constexpr,
) -> None:  # fmt: skip
    """room: the memory of `left` as int32; it holds the indices of what is kept until `left` is
    written."""
    chunk = tl.program_id(0).to(tl.int64)
    begin = chunk * _TILE
    row_r, c, s = tl.arange(0, _TILE // _COLS), tl.arange(0, _COLS)[None, :], tl.arange(0, _KEEP)
    k, rest = row_r[:, None] * _COLS + c, tl.minimum(numel - begin, _TILE).to(tl.int32)
    delta_p, anchor_p, residual_p = delta_p + begin, anchor_p + begin, residual_p + begin
    room_p, left_p = room_p + begin, left_p + begin
    x = _x(delta_p, anchor_p, residual_p, k, k < rest, owes)
    size = _size(x)
    top = tl.max(size)
    border, count = _border(size, top)
    bits_r = _kept(size, border, count, c)
    _list(bits_r, row_r, room_p)
    tl.debug_barrier()  # the indices and the delta are written
    index_s = tl.load(room_p + s)
    x_s = tl.load(delta_p + index_s, mask=index_s < rest, other=0.0)
    if owes:
        x_s = x_s + tl.load(residual_p + index_s, mask=index_s < rest, other=0.0)
    tl.debug_barrier()  # `left` may overwrite the indices
    bytes_p, words_p = bytes_p + chunk * _CHUNK_BYTES, words_p + chunk * (_CHUNK_BYTES // 4)
    means, middle = _put(index_s, x_s.to(tl.int32, bitcast=True), top, bytes_p, words_p)
    level = tl.where(size >= middle, means & ~0xFFFF, means << 16)
    sign = x.to(tl.int32, bitcast=True) ^ size
    kept = ((bits_r[:, None] >> c) & 1) != 0
    sent = tl.where(kept & (size != 0), level | sign, 0).to(tl.float32, bitcast=True)
    left = x - sent
    if in_weights:
        tl.store(left_p + k, sent, mask=k < rest)
    else:
        tl.store(left_p + k, left, mask=k < rest)
    _tell(found_p, top, tl.max(_size(left)), tl.sum(left * left), tl.sum(x * x))


_BLOCKS = {"int8": (64, 132, 127), "int4": (64, 68, 7), "e3m0": (128, 132, 0)}
"""codec -> elements of half a block, bytes of a block, highest level."""


def kernel(codec: str, in_weights: bool) -> DeviceOfferKernel:
    """The kernel of the codec of this name: bfloat16, int8, int4, e3m0 or topk. Only topk may keep
    what it leaves out in the weights."""
    if in_weights and codec != "topk":
        raise ValueError(f"{codec} keeps in a buffer what it leaves out")

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
        elif codec == "topk":
            parts = left_N.view(int32), payload_B.view(int8), payload_B.view(int32), found_4G
            _topk[grid](*vectors, *parts, delta_N.numel(), owes, in_weights, **{**how, **_TOPK})
        else:
            rows = payload_B.view(int8), payload_B.view(float32)
            _blocks[grid](*vectors, *rows, found_4G, delta_N.numel(), owes, *_BLOCKS[codec], **how)

    return run
