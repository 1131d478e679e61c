"""kernels.grams: exact lengths and products of vectors, row by row while a row is in the cache.
Touches arrays only.

The digits are those of merge.gram; all of their arithmetic is exact, so sums may be taken in any
order and with fused multiply-adds.

Legend: M vectors, D = 2 M digits (high and low of each), c chunks of i elements of a row, R
records.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from mend.kernels import GramKernel, compiled, part
from mend.kernels.merges import floats, greatest

_F32, _F64, _I32, _I64, _U64 = np.float32, np.float64, np.int32, np.int64, np.uint64

_CHUNK_NUMEL = 128
"""A digit is at most 2^23, so the sum of this many products is exact in fp64."""
_CHUNKS = 4
"""Chunks of a row. Vectors often begin at multiples of 2 MiB, and then equal places of all of them
share the same few lines of a cache: with rows of 16 KiB eight vectors took three times as long."""
_ROW_NUMEL = _CHUNKS * _CHUNK_NUMEL

_BITS, _BIN_ZERO, _BIN_WRONG = 24, -128, 127
"""The same as in merge.gram."""
_INFINITE = 0x7F800000
_LOW = _F32(2.0**_BITS)
_EXACT = {"reassoc", "contract"}


@part
def _bin(x_k: Any) -> Any:
    top = greatest(x_k)
    if top >= _INFINITE:
        return _BIN_WRONG
    if top == 0:
        return _BIN_ZERO
    return math.frexp(_F64(_I32(top).view(_F32)))[1] // _BITS


@part
def _split(x_ci: Any, k: Any, digits_cDi: Any, m: Any) -> None:
    """The two digits of a row of bin k."""
    if k in (_BIN_ZERO, _BIN_WRONG):
        for c in range(_CHUNKS):
            for i in range(_CHUNK_NUMEL):
                digits_cDi[c, 2 * m, i] = digits_cDi[c, 2 * m + 1, i] = _F64(0)
        return
    half_way = _F32(math.ldexp(1.0, -_BITS // 2 * k))
    for c in range(_CHUNKS):
        for i in range(_CHUNK_NUMEL):
            rest = (x_ci[c, i] * half_way) * half_way
            high = np.rint(rest)
            digits_cDi[c, 2 * m, i] = _F64(high)
            digits_cDi[c, 2 * m + 1, i] = _F64(np.rint((rest - high) * _LOW))


def _products(digits_cDi: Any, m: Any, other: Any, sums_DD: Any) -> None:
    """Add the products of the digits of two vectors."""
    a, b, c, d = 2 * m, 2 * m + 1, 2 * other, 2 * other + 1
    for chunk in range(_CHUNKS):
        hh, hl, lh, ll = _F64(0), _F64(0), _F64(0), _F64(0)
        for i in range(_CHUNK_NUMEL):
            hh += digits_cDi[chunk, a, i] * digits_cDi[chunk, c, i]
            hl += digits_cDi[chunk, a, i] * digits_cDi[chunk, d, i]
            lh += digits_cDi[chunk, b, i] * digits_cDi[chunk, c, i]
            ll += digits_cDi[chunk, b, i] * digits_cDi[chunk, d, i]
        sums_DD[a, c] += _I64(hh)
        sums_DD[a, d] += _I64(hl)
        sums_DD[b, c] += _I64(lh)
        sums_DD[b, d] += _I64(ll)


_multiply = part(_products, fastmath=_EXACT)


@part
def _carry(sums_2DD: Any) -> None:
    """Sums are high * 2^32 + low, as 2^16 products fill 63 bits."""
    for i in range(sums_2DD.shape[1]):
        for j in range(sums_2DD.shape[1]):
            sums_2DD[0, i, j] += sums_2DD[1, i, j] >> 32
            sums_2DD[1, i, j] &= 0xFFFFFFFF


@part
def _rows(places_M: Any, start: Any, numel: Any, rooms_Mk: Any, m: Any) -> Any:
    """A row of a vector; the last one is filled up with zeros."""
    x_k = numba.carray(floats(places_M[m] + _U64(4 * start)), (_ROW_NUMEL,), _F32)
    if numel - start >= _ROW_NUMEL:
        return x_k
    for i in range(_ROW_NUMEL):
        rooms_Mk[m, i] = x_k[i] if i < numel - start else _F32(0)
    return rooms_Mk[m]


def _gram(places_M: Any, numel: Any, bins_RM: Any, sums_R2DD: Any) -> Any:
    members, count = len(places_M), 0
    digits_cDi = np.empty((_CHUNKS, 2 * members, _CHUNK_NUMEL), _F64)
    rooms_Mk, bins_M = np.empty((members, _ROW_NUMEL), _F32), np.empty(members, _I64)
    for start in range(0, numel, _ROW_NUMEL):
        alike = count > 0
        for m in range(members):
            bins_M[m] = _bin(_rows(places_M, start, numel, rooms_Mk, m))
            alike = alike and bins_M[m] == bins_RM[count - 1, m]
        if not alike:
            for m in range(members):
                bins_RM[count, m] = bins_M[m]
            count += 1
        sums_2DD = sums_R2DD[count - 1]
        for m in range(members):
            x_k = _rows(places_M, start, numel, rooms_Mk, m)
            _split(x_k.reshape((_CHUNKS, _CHUNK_NUMEL)), bins_M[m], digits_cDi, m)
        for m in range(members):
            for other in range(m, members):
                _multiply(digits_cDi, m, other, sums_2DD[1])
        _carry(sums_2DD)
    return count


def gram() -> GramKernel:
    return compiled("i8(u8[::1], i8, i8[:, ::1], i8[:, :, :, ::1])", _gram)
