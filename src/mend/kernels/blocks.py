"""kernels.blocks: codecs of blocks, compiled. Touches arrays only.

The formats are those of mend.codec: linear, e3m0, topk. Every operation is one of theirs, rounded
to fp32 where theirs is: no fused multiply-add, no other order of a sum. Numbers are compared and
cut up as their bits, as that has one result on every machine, and is faster.

numba widens the result of whole-number arithmetic to 64 bits, so it is narrowed where a loop is to
fill a vector register; and a view of an array costs as much as the arithmetic of 50 elements, so
loops over blocks take none.

Legend: b blocks, k elements of a block, c bytes of a block, s elements of a block that are kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mend.kernels import BlockKernels, compiled, part

_F32, _I32, _U32 = np.float32, np.int32, np.uint32
_U16, _U8, _I8 = np.uint16, np.uint8, np.int8
_TINY = _F32(2.0**-100)
"""codec.blocks.TINY"""
SIZE = _I32(0x7FFFFFFF)
"""All bits of a number but its sign: magnitudes have the order of these bits, and Inf and NaN are
above all numbers."""

_KEEP, _BINS = 64, 2048
_HALF, _QUARTER = 32, 16
_VALUES = 4 + 3 * _HALF
"""Where the two bits of each value begin in a chunk of topk."""


@part
def _peak(bits_bk: Any, b: Any, numel: Any) -> Any:
    """The greatest magnitude of a block; 0 where it is below TINY."""
    top = _I32(0)
    for i in range(numel):
        top = max(top, _I32(bits_bk[b, i] & SIZE))
    peak = _I32(top).view(_F32)
    return _F32(0) if peak < _TINY else peak


@part
def _over(numerator: Any, peak: Any) -> Any:
    """numerator / peak as torch computes it; 0 where the peak is 0."""
    return _F32(0) if peak == _F32(0) else _F32(_F32(1) / peak) * numerator


@part
def _put(scale: Any, rows_bc: Any, b: Any) -> None:
    bits = _F32(scale).view(_U32)
    for i in range(4):
        rows_bc[b, i] = _U8((bits >> _U32(8 * i)) & _U32(255))


@part
def _get(rows_bc: Any, b: Any) -> Any:
    bits = _U32(0)
    for i in range(4):
        bits |= _U32(rows_bc[b, i]) << _U32(8 * i)
    return _U32(bits).view(_F32)


@part
def _int8_encode(x_bk: Any, rows_bc: Any) -> None:
    bits_bk, levels_bc = x_bk.view(_I32), rows_bc.view(_I8)
    for b in range(len(x_bk)):
        peak = _peak(bits_bk, b, 128)
        factor = _over(_F32(127), peak)
        _put(peak / _F32(127), rows_bc, b)
        for i in range(128):
            levels_bc[b, 4 + i] = _I8(_I32(np.rint(x_bk[b, i] * factor)))


@part
def _int8_decode(rows_bc: Any, out_bk: Any) -> None:
    levels_bc = rows_bc.view(_I8)
    for b in range(len(rows_bc)):
        scale = _get(rows_bc, b)
        for i in range(128):
            out_bk[b, i] = _F32(levels_bc[b, 4 + i]) * scale


@part
def _int4_encode(x_bk: Any, rows_bc: Any) -> None:
    bits_bk, pairs_bc = x_bk.view(_I32), rows_bc.view(_I8)
    for b in range(len(x_bk)):
        peak = _peak(bits_bk, b, 128)
        factor = _over(_F32(7), peak)
        _put(peak / _F32(7), rows_bc, b)
        for i in range(64):
            low, high = np.rint(x_bk[b, i] * factor), np.rint(x_bk[b, 64 + i] * factor)
            # Whole numbers from -111 to 127: exact.
            pairs_bc[b, 4 + i] = _I8(_I32(high * _F32(16) + low + _F32(8)))


@part
def _int4_decode(rows_bc: Any, out_bk: Any) -> None:
    pairs_bc = rows_bc.view(_I8)
    for b in range(len(rows_bc)):
        scale = _get(rows_bc, b)
        for i in range(64):
            pair = _I32(pairs_bc[b, 4 + i])
            out_bk[b, i] = _F32(_I32(pair & _I32(15)) - _I32(8)) * scale
            out_bk[b, 64 + i] = _F32(_I32(pair >> _I32(4))) * scale


@part
def _e3m0_code(value: Any) -> Any:
    """See codec.e3m0: sign, exponent and 7 bits of mantissa decide."""
    bits = _I32(_F32(value).view(_I32) >> _I32(16))
    size = _I32(bits & _I32(0x7FFF))
    lowest = max(_I32(min(_I32(size >> _I32(7)), _I32(120)) - _I32(119)), _I32(0))
    level = _I32(_I32(_I32(size + _I32(64)) >> _I32(7)) - _I32(120))
    return _I32(max(level, lowest) + _I32(_I32(bits >> _I32(12)) & _I32(8)))


@part
def _e3m0_encode(x_bk: Any, rows_bc: Any) -> None:
    bits_bk = x_bk.view(_I32)
    for b in range(len(x_bk)):
        peak = _peak(bits_bk, b, 256)
        factor = _over(_F32(1), peak)
        _put(peak, rows_bc, b)
        for i in range(128):
            low, high = _e3m0_code(x_bk[b, i] * factor), _e3m0_code(x_bk[b, 128 + i] * factor)
            rows_bc[b, 4 + i] = _U8(_I32(high << _I32(4)) | low)


@part
def _e3m0_value(code: Any) -> Any:
    level = _I32(code & _I32(7))
    size = _I32(0) if level == _I32(0) else _I32(_I32(level + _I32(120)) << _I32(23))
    return _I32(size | _I32(_I32(code & _I32(8)) << _I32(28))).view(_F32)


@part
def _e3m0_decode(rows_bc: Any, out_bk: Any) -> None:
    for b in range(len(rows_bc)):
        scale = _get(rows_bc, b)
        for i in range(128):
            pair = _I32(rows_bc[b, 4 + i])
            out_bk[b, i] = _e3m0_value(_I32(pair & _I32(15))) * scale
            out_bk[b, 128 + i] = _e3m0_value(_I32(pair >> _I32(4))) * scale


@part
def _count(bits_k: Any, bins: Any, shift: Any, prefix: Any) -> None:
    """Count how often each value of the bits from `shift` on occurs: 11 bits of all magnitudes,
    then 10 more of those that begin with `prefix`."""
    bins[:] = 0
    if shift == 20:
        for i in range(len(bits_k)):
            bins[(bits_k[i] & SIZE) >> 20] += 1
    else:
        for i in range(len(bits_k)):
            rest = ((bits_k[i] & SIZE) >> shift) - (prefix << 10)
            if 0 <= rest < 1024:
                bins[rest] += 1


@part
def _greatest(bits_k: Any, bins: Any, index_s: Any) -> None:
    """The indices of the KEEP greatest magnitudes, ascending; among equals the first ones. The
    least of them is found bit by bit, as far as it takes to separate them from the others."""
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
        size = (bits_k[i] & SIZE) >> shift
        if size > prefix or (size == prefix and missing > 0):
            missing -= size == prefix
            index_s[kept] = i
            kept += 1


@part
def _mean(size_s: Any, chosen_s: Any, room_s: Any) -> Any:
    """The mean of the chosen, added up as a tree of halves; 0 if there are none. As the bits of a
    bfloat16, rounded to nearest even."""
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
    """The kept magnitudes, and which of them count: in place of each 0 the last nonzero element is
    sent again."""
    last = 0
    for s in range(_KEEP):
        counts_s[s] = x_k[index_s[s]] != _F32(0)
        if counts_s[s]:
            last = index_s[s]
    for s in range(_KEEP):
        if not counts_s[s]:
            index_s[s] = last
        size_s[s] = abs(x_k[index_s[s]])


@part
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


@part
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


@part
def _bfloat16_encode(x_bk: Any, rows_bc: Any) -> None:
    """Rounds to nearest even. No element is Inf or NaN."""
    bits_bk, half_bk = x_bk.view(_U32), rows_bc.view(_U16)
    for b in range(len(x_bk)):
        for i in range(256):
            bits = bits_bk[b, i]
            odd = _U32(_U32(bits >> _U32(16)) & _U32(1))
            half_bk[b, i] = _U16(_U32(_U32(bits + _U32(0x7FFF)) + odd) >> _U32(16))


@part
def _bfloat16_decode(rows_bc: Any, out_bk: Any) -> None:
    half_bk, bits_bk = rows_bc.view(_U16), out_bk.view(_U32)
    for b in range(len(rows_bc)):
        for i in range(256):
            bits_bk[b, i] = _U32(half_bk[b, i]) << _U32(16)


class BlockParts(NamedTuple):
    """One codec: fp32 (b, k) -> uint8 (b, c), the inverse, k and c."""

    encode: Any
    decode: Any
    block: int
    block_bytes: int


PARTS = {
    "bfloat16": BlockParts(_bfloat16_encode, _bfloat16_decode, 256, 512),
    "int8": BlockParts(_int8_encode, _int8_decode, 128, 132),
    "int4": BlockParts(_int4_encode, _int4_decode, 128, 68),
    "e3m0": BlockParts(_e3m0_encode, _e3m0_decode, 256, 132),
    "topk": BlockParts(_topk_encode, _topk_decode, 4096, 116),
}


def kernels(codec: str) -> BlockKernels:
    """The kernels of this codec."""
    parts = PARTS[codec]
    return BlockKernels(
        compiled("void(f4[:, ::1], u1[:, ::1])", parts.encode.py_func),
        compiled("void(u1[:, ::1], f4[:, ::1])", parts.decode.py_func),
    )
