"""kernels.blocks: codecs of blocks, compiled. Touches arrays only.

The formats are those of mend.codec: linear, e3m0, topk. Every operation is one of theirs, rounded
to fp32 where theirs is: no fused multiply-add, no other order of a sum. Numbers are compared and
cut up as their bits, as that has one result on every machine, and is faster.

Legend: b blocks, k elements of a block, c bytes of a block, s elements of a block that are kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mend.kernels import BlockKernels, compiled, part

_F32, _I32, _U32, _U8, _I8 = np.float32, np.int32, np.uint32, np.uint8, np.int8
_TINY = _F32(2.0**-100)
"""codec.blocks.TINY"""
_SIZE = _I32(0x7FFFFFFF)
"""All bits of a number but its sign."""

_KEEP, _BINS = 64, 2048
_HALF, _QUARTER = 32, 16
_VALUES = 4 + 3 * _HALF
"""Where the two bits of each value begin in a chunk of topk."""


@part
def _peak(x_k: Any) -> Any:
    """The greatest magnitude; 0 where it is below TINY."""
    top, bits_k = _I32(0), x_k.view(_I32)
    for i in range(len(bits_k)):
        top = max(top, bits_k[i] & _SIZE)
    peak = _I32(top).view(_F32)
    return _F32(0) if peak < _TINY else peak


@part
def _over(numerator: Any, peak: Any) -> Any:
    """numerator / peak as torch computes it; 0 where the peak is 0."""
    return _F32(0) if peak == _F32(0) else _F32(_F32(1) / peak) * numerator


@part
def _put(scale: Any, row_c: Any) -> None:
    bits = _F32(scale).view(_U32)
    for i in range(4):
        row_c[i] = _U8((bits >> _U32(8 * i)) & _U32(255))


@part
def _get(row_c: Any) -> Any:
    bits = _U32(0)
    for i in range(4):
        bits |= _U32(row_c[i]) << _U32(8 * i)
    return _U32(bits).view(_F32)


def _int8_encode(x_bk: Any, rows_bc: Any) -> None:
    for b in range(len(x_bk)):
        x_k, row_c = x_bk[b], rows_bc[b]
        peak = _peak(x_k)
        factor = _over(_F32(127), peak)
        _put(peak / _F32(127), row_c)
        levels = row_c[4:].view(_I8)
        for i in range(128):
            levels[i] = _I8(np.rint(x_k[i] * factor))


def _int8_decode(rows_bc: Any, out_bk: Any) -> None:
    for b in range(len(rows_bc)):
        scale, levels, out_k = _get(rows_bc[b]), rows_bc[b, 4:].view(_I8), out_bk[b]
        for i in range(128):
            out_k[i] = _F32(levels[i]) * scale


def _int4_encode(x_bk: Any, rows_bc: Any) -> None:
    for b in range(len(x_bk)):
        x_k, row_c = x_bk[b], rows_bc[b]
        peak = _peak(x_k)
        factor = _over(_F32(7), peak)
        _put(peak / _F32(7), row_c)
        for i in range(64):
            low, high = _I32(np.rint(x_k[i] * factor)), _I32(np.rint(x_k[i + 64] * factor))
            row_c[4 + i] = _U8(high * _I32(16) + low + _I32(8))


def _int4_decode(rows_bc: Any, out_bk: Any) -> None:
    for b in range(len(rows_bc)):
        scale, pairs, out_k = _get(rows_bc[b]), rows_bc[b, 4:].view(_I8), out_bk[b]
        for i in range(64):
            pair = _I32(pairs[i])
            out_k[i] = _F32((pair & _I32(15)) - _I32(8)) * scale
            out_k[i + 64] = _F32(pair >> _I32(4)) * scale


@part
def _e3m0_code(value: Any) -> Any:
    """codec.e3m0 says why: sign, exponent and 7 bits of mantissa decide."""
    bits = _F32(value).view(_I32) >> _I32(16)
    size = bits & _I32(0x7FFF)
    lowest = max(min(size >> _I32(7), _I32(120)) - _I32(119), _I32(0))
    level = ((size + _I32(64)) >> _I32(7)) - _I32(120)
    return max(level, lowest) + ((bits >> _I32(12)) & _I32(8))


def _e3m0_encode(x_bk: Any, rows_bc: Any) -> None:
    for b in range(len(x_bk)):
        x_k, row_c = x_bk[b], rows_bc[b]
        peak = _peak(x_k)
        factor = _over(_F32(1), peak)
        _put(peak, row_c)
        for i in range(128):
            low, high = _e3m0_code(x_k[i] * factor), _e3m0_code(x_k[i + 128] * factor)
            row_c[4 + i] = _U8((high << _I32(4)) | low)


@part
def _e3m0_value(code: Any) -> Any:
    level = code & _I32(7)
    size = _I32(0) if level == _I32(0) else (level + _I32(120)) << _I32(23)
    return _I32(size | ((code & _I32(8)) << _I32(28))).view(_F32)


def _e3m0_decode(rows_bc: Any, out_bk: Any) -> None:
    for b in range(len(rows_bc)):
        scale, out_k = _get(rows_bc[b]), out_bk[b]
        for i in range(128):
            pair = _I32(rows_bc[b, 4 + i])
            out_k[i] = _e3m0_value(pair & _I32(15)) * scale
            out_k[i + 128] = _e3m0_value(pair >> _I32(4)) * scale


@part
def _count(bits_k: Any, bins: Any, shift: Any, prefix: Any) -> None:
    """How often each value of the bits from `shift` on is there: of all magnitudes 11 bits, then of
    those that begin with `prefix` 10 more."""
    bins[:] = 0
    if shift == 20:
        for i in range(len(bits_k)):
            bins[(bits_k[i] & _SIZE) >> 20] += 1
    else:
        for i in range(len(bits_k)):
            rest = ((bits_k[i] & _SIZE) >> shift) - (prefix << 10)
            if 0 <= rest < 1024:
                bins[rest] += 1


@part
def _greatest(bits_k: Any, bins: Any, index_s: Any) -> None:
    """The indices of the KEEP greatest magnitudes, ascending; of equals the first. The least of
    them is found bit by bit, as far as it takes to part them from the others."""
    shift, prefix, missing, alike = 30, _I32(0), _KEEP, len(bits_k)
    while shift and alike > missing:
        shift -= 10
        _count(bits_k, bins, shift, prefix)
        place = _BINS - 1
        while bins[place] < missing:
            missing -= bins[place]
            place -= 1
        alike, prefix = bins[place], _I32((prefix << 10) + place)
    kept = 0
    for i in range(len(bits_k)):
        size = (bits_k[i] & _SIZE) >> shift
        if size > prefix or (size == prefix and missing > 0):
            missing -= size == prefix
            index_s[kept] = i
            kept += 1


@part
def _mean(size_s: Any, chosen_s: Any, room_s: Any) -> Any:
    """Of the chosen, as a tree of halves; 0 of none. The bits of a bfloat16, to nearest even."""
    count = 0
    for i in range(_KEEP):
        room_s[i] = size_s[i] if chosen_s[i] else _F32(0)
        count += chosen_s[i]
    width = _KEEP
    while width > 1:
        width //= 2
        for i in range(width):
            room_s[i] += room_s[i + width]
    mean = room_s[0] / _F32(max(count, 1))
    bits = _U32(0) if mean < _TINY else _F32(mean).view(_U32)
    return (bits + _U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1))) >> _U32(16)


@part
def _kept(x_k: Any, index_s: Any, size_s: Any, counts_s: Any) -> None:
    """Their magnitudes, and which count: in place of each 0 the last that is none is sent again."""
    last = 0
    for s in range(_KEEP):
        counts_s[s] = x_k[index_s[s]] != _F32(0)
        if counts_s[s]:
            last = index_s[s]
    for s in range(_KEEP):
        if not counts_s[s]:
            index_s[s] = last
        size_s[s] = abs(x_k[index_s[s]])


def _topk_encode(x_bk: Any, rows_bc: Any) -> None:
    bins, index_s, codes = np.empty(_BINS, _I32), np.empty(_KEEP, _I32), np.empty(_KEEP, _U8)
    size_s, room_s = np.empty(_KEEP, _F32), np.empty(_KEEP, _F32)
    counts_s, great_s = np.empty(_KEEP, np.bool_), np.empty(_KEEP, np.bool_)
    for b in range(len(x_bk)):
        x_k, row_c = x_bk[b], rows_bc[b]
        _greatest(x_k.view(_I32), bins, index_s)
        _kept(x_k, index_s, size_s, counts_s)
        middle = (size_s.max() + size_s.min()) / _F32(2)
        for s in range(_KEEP):
            great = size_s[s] >= middle
            codes[s] = _U8(great) + _U8(2) * _U8(x_k[index_s[s]] < _F32(0))
            great_s[s], counts_s[s] = great and counts_s[s], counts_s[s] and not great
        small, large = _mean(size_s, counts_s, room_s), _mean(size_s, great_s, room_s)
        row_c[0], row_c[1] = _U8(small & _U32(255)), _U8(small >> _U32(8))
        row_c[2], row_c[3] = _U8(large & _U32(255)), _U8(large >> _U32(8))
        for s in range(_HALF):
            first, second = index_s[s], index_s[s + _HALF]
            row_c[4 + s] = _U8(first & _I32(255))
            row_c[4 + _HALF + s] = _U8(second & _I32(255))
            row_c[4 + 2 * _HALF + s] = _U8((first >> _I32(8)) | ((second >> _I32(8)) << _I32(4)))
        for s in range(_QUARTER):
            code = _U8(0)
            for each in range(4):
                code |= codes[s + each * _QUARTER] << _U8(2 * each)
            row_c[_VALUES + s] = code


def _topk_decode(rows_bc: Any, out_bk: Any) -> None:
    for b in range(len(rows_bc)):
        row_c, bits_k = rows_bc[b], out_bk[b].view(_U32)
        small = (_U32(row_c[0]) << _U32(16)) | (_U32(row_c[1]) << _U32(24))
        large = (_U32(row_c[2]) << _U32(16)) | (_U32(row_c[3]) << _U32(24))
        bits_k[:] = _U32(0)
        for s in range(_KEEP):
            high = _U32(row_c[4 + 2 * _HALF + s % _HALF]) >> _U32(s // _HALF * 4)
            code = row_c[_VALUES + s % _QUARTER] >> _U8(s // _QUARTER * 2)
            size = large if code & _U8(1) else small
            place = _U32(row_c[4 + s]) | ((high & _U32(15)) << _U32(8))
            bits_k[place] = size ^ (_U32(code & _U8(2)) << _U32(30))


_KERNELS = {
    "int8": (_int8_encode, _int8_decode),
    "int4": (_int4_encode, _int4_decode),
    "e3m0": (_e3m0_encode, _e3m0_decode),
    "topk": (_topk_encode, _topk_decode),
}


def kernels(codec: str) -> BlockKernels:
    """Those of this codec."""
    encode, decode = _KERNELS[codec]
    return BlockKernels(
        compiled("void(f4[:, ::1], u1[:, ::1])", encode),
        compiled("void(u1[:, ::1], f4[:, ::1])", decode),
    )
