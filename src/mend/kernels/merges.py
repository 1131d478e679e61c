"""kernels.merges: many payloads -> one anchor in one pass: decode, weighted mean, outer step and
digest, row by row while a row is in the cache. Touches arrays only.

Every operation is one of merge.average and outer.nesterov, and is rounded where theirs is: to fp64
for the mean, otherwise to fp32.

Legend: N elements of a part of a vector, M payloads, R stretches of equal weights, k elements of a
row, n elements of the row at hand, D blocks of a digest.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mend.kernels import ROW_NUMEL, MergeKernel, SignsKernel, compiled, part
from mend.kernels.blocks import PARTS, SIZE
from mend.kernels.hashes import FIRST, LANES, ROW_BYTES, feed
from mend.kernels.self_checks import check_merge

_F32, _F64, _I32, _I64, _U64 = np.float32, np.float64, np.int32, np.int64, np.uint64

_BLOCK_NUMEL = 1 << 20
"""Elements of a block of the digest."""

_MERGE = (
    "f4(u8[::1], i8, i8[::1], f8[:, ::1], f4[::1], f4[::1], f4, f4, f4, f4, f4, f4, f4[::1], "
    "f4[::1], u8[:, :, ::1])"
)

_SIGNS = "UniTuple(i8, 2)(u8, i8, f4[::1])"


def _pointer(element: Any, kind: Any) -> Any:
    """The intrinsic that makes an address a pointer to elements of this type."""

    @intrinsic
    def pointer(context: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], kind.as_pointer())

        return types.CPointer(element)(types.uintp), emit

    return pointer


floats = _pointer(types.float32, ir.FloatType())
_bytes = _pointer(types.uint8, ir.IntType(8))


@part
def _float32(address: Any, start: Any, room_k: Any) -> Any:
    """The row of a payload of float32 that begins with this element, without a copy."""
    return numba.carray(floats(address + _U64(4 * start)), (ROW_NUMEL,), _F32)


_decode, _BLOCK, _BLOCK_BYTES = PARTS["int8"].decode, PARTS["int8"].block, PARTS["int8"].block_bytes
"""These are of the codec for which `_decoded` is compiled; `merge` puts others in their place."""


def _decoded(address: Any, start: Any, room_k: Any) -> Any:
    """The row of a payload of another codec, decoded into `room_k`."""
    blocks = ROW_NUMEL // _BLOCK
    at = address + _U64(start // _BLOCK * _BLOCK_BYTES)
    rows_bc = numba.carray(_bytes(at), (blocks, _BLOCK_BYTES), np.uint8)
    _decode(rows_bc, room_k.reshape((blocks, _BLOCK)))
    return room_k


@part
def _add(x_n: Any, first: Any, weight: Any, sum_n: Any) -> None:
    """Add a payload with its weight. `first`: whether it is the first one."""
    if first:
        for i in range(len(sum_n)):
            sum_n[i] = _F64(x_n[i]) * weight
    else:
        for i in range(len(sum_n)):
            sum_n[i] += _F64(x_n[i]) * weight


@part
def _add_two(x_n: Any, y_n: Any, first: Any, weight: Any, other: Any, sum_n: Any) -> None:
    """`_add` of two payloads, the second one after the first."""
    if first:
        for i in range(len(sum_n)):
            sum_n[i] = _F64(x_n[i]) * weight + _F64(y_n[i]) * other
    else:
        for i in range(len(sum_n)):
            sum_n[i] = (sum_n[i] + _F64(x_n[i]) * weight) + _F64(y_n[i]) * other


_row = _float32
"""It is of the codec for which `_mean` is compiled, like `_decode`."""


@part
def _mean(
    places_M: Any, start: Any, ends_R: Any, r: Any, weights_RM: Any, room_2k: Any, sum_k: Any
) -> None:
    """The weighted sum of a row of all payloads, in fp64. `r`: the stretch of its first element.

    numba cannot prove that an index is positive in a loop that does not begin at 0, and then uses
    no vector registers; so the elements of a loop are cut out first."""
    members = len(places_M)
    for m in range(0, members, 2):
        two = m + 1 < members
        x_k = _row(places_M[m], start, room_2k[0])
        y_k = _row(places_M[m + 1], start, room_2k[1]) if two else x_k
        begin, stretch = 0, r
        while begin < ROW_NUMEL:
            end, w_M = min(ROW_NUMEL, ends_R[stretch] - start), weights_RM[stretch]
            x_n, sum_n = x_k[begin:end], sum_k[begin:end]
            if two:
                _add_two(x_n, y_k[begin:end], m == 0, w_M[m], w_M[m + 1], sum_n)
            else:
                _add(x_n, m == 0, w_M[m], sum_n)
            begin, stretch = end, stretch + 1


@part
def _replace(sum_n: Any, out_n: Any) -> None:
    """The outer step of fragments whose offers are values."""
    for i in range(len(out_n)):
        out_n[i] = _F32(sum_n[i])


@part
def _step(
    sum_n: Any, anchor_n: Any, state_n: Any, decay: Any, share: Any, stretch: Any, momentum: Any,
    lr: Any, out_n: Any, state_out_n: Any,
) -> None:  # fmt: skip
    """The outer step of a row: without momentum's vector, `state_n` has no element."""
    if len(state_n) == 0:
        for i in range(len(out_n)):
            out_n[i] = anchor_n[i] - (_F32(sum_n[i]) * stretch) * lr
        return
    for i in range(len(out_n)):
        delta = _F32(sum_n[i])
        moved, state = delta * stretch, state_n[i] * decay
        if share != _F32(0):
            state = state + delta * share
        state_out_n[i] = state
        if momentum != _F32(0):
            moved = moved + state * momentum
        out_n[i] = anchor_n[i] - moved * lr


@part
def greatest(x_n: Any) -> Any:
    """The bits of the greatest magnitude."""
    top, bits_n = _I32(0), x_n.view(_I32)
    for i in range(len(bits_n)):
        top = max(top, _I32(bits_n[i] & SIZE))
    return _I32(top)


@part
def _begin(lanes_2D8: Any) -> None:
    """The digests before the first byte."""
    for v in range(2):
        for block in range(lanes_2D8.shape[1]):
            for i in range(LANES):
                lanes_2D8[v, block, i] = FIRST[i]


@part
def _hash(x_N: Any, start: Any, lanes_D8: Any) -> None:
    """Take up a row of the vector, if it lies in a whole block of the digest."""
    block = start // _BLOCK_NUMEL
    if block < len(lanes_D8):
        address = x_N.ctypes.data + _U64(4 * start)
        ends = (start + ROW_NUMEL) % _BLOCK_NUMEL == 0
        feed(lanes_D8[block], address, 4 * ROW_NUMEL // ROW_BYTES, ends)


def _merge(
    places_M: Any, begin: Any, ends_R: Any, weights_RM: Any, anchor_N: Any, state_N: Any,
    decay: Any, share: Any, stretch: Any, momentum: Any, lr: Any, limit: Any,
    out_N: Any, state_out_N: Any, lanes_2D8: Any,
) -> Any:  # fmt: skip
    top, most, r = _I32(0), _F32(limit).view(_I32), 0
    sum_k, room_2k = np.empty(ROW_NUMEL, _F64), np.empty((2, ROW_NUMEL), _F32)
    keeps, replaces = len(state_N) > 0, len(anchor_N) == 0
    _begin(lanes_2D8)
    for start in range(0, len(out_N), ROW_NUMEL):
        stop = start + ROW_NUMEL
        while ends_R[r] <= begin + start:
            r += 1
        _mean(places_M, begin + start, ends_R, r, weights_RM, room_2k, sum_k)
        out_k = out_N[start:stop]
        if replaces:
            _replace(sum_k, out_k)
        else:
            state_k, state_out_k = state_N[:0], state_out_N[:0]
            if keeps:
                state_k, state_out_k = state_N[start:stop], state_out_N[start:stop]
            anchor_k = anchor_N[start:stop]
            _step(sum_k, anchor_k, state_k, decay, share, stretch, momentum, lr, out_k, state_out_k)
        top = max(top, greatest(out_k))
        if top >= most:
            break
        _hash(out_N, start, lanes_2D8[0])
        if keeps:
            _hash(state_out_N, start, lanes_2D8[1])
    return _I32(top).view(_F32)


def _signs(place: Any, begin: Any, state_N: Any) -> Any:
    """Count the elements of equal and of opposite signs."""
    along, against, room_k = _I64(0), _I64(0), np.empty(ROW_NUMEL, _F32)
    for start in range(0, len(state_N), ROW_NUMEL):
        x_k, state_k = _row(place, begin + start, room_k), state_N[start : start + ROW_NUMEL]
        same, other = _I32(0), _I32(0)
        for i in range(len(state_k)):
            up, down = x_k[i] > _F32(0), x_k[i] < _F32(0)
            rises, falls = state_k[i] > _F32(0), state_k[i] < _F32(0)
            same += _I32((up & rises) | (down & falls))
            other += _I32((up & falls) | (down & rises))
        along, against = along + same, against + other
    return along, against


def _decoders(codec: str) -> dict[str, Any]:
    """The globals of this module, with the row of this codec."""
    here = dict(globals())
    if codec != "float32":
        decode, block, block_bytes = PARTS[codec][1:]
        here |= {"_decode": decode, "_BLOCK": block, "_BLOCK_BYTES": block_bytes}
        here["_row"] = part(FunctionType(_decoded.__code__, here, f"_{codec}_row"))
    return here


def signs(codec: str) -> SignsKernel:
    """The kernel for payloads of float32, or of a codec of `PARTS`."""
    return compiled(_SIGNS, FunctionType(_signs.__code__, _decoders(codec), f"_{codec}_signs"))


def merge(codec: str) -> MergeKernel:
    """The kernel for payloads of float32, or of a codec of `PARTS`."""
    here = _decoders(codec)
    mean: Any = _mean
    here["_mean"] = part(FunctionType(mean.py_func.__code__, here, f"_{codec}_mean"))
    made = compiled(_MERGE, FunctionType(_merge.__code__, here, f"_{codec}_merge"))
    return check_merge(made, codec)
