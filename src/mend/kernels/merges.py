"""kernels.merges: the mean of two racks of equal weight and the outer step, in one pass; and which
rows of a merged delta point against the momentum. Touches arrays only.

Every operation is one of merge.average and outer.nesterov, rounded to fp32 where theirs is. A row
of all vectors stays in the cache between the two loops over it.

Legend: n elements of a block, r its rows of ROW_NUMEL elements, m elements of one of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mend.kernels import ROW_NUMEL, AgainstKernel, HalvesKernel, compiled, part

_F32, _F64, _I32 = np.float32, np.float64, np.int32
_SIZE = _I32(0x7FFFFFFF)
"""All bits of a number but its sign: magnitudes have the order of these bits, and Inf and NaN are
above all numbers."""
_HALF = ROW_NUMEL // 2

_N = "f4[::1]"
_HALVES = f"f4({_N}, {_N}, {_N}, {_N}, f4, f4, f4, f4, f4, {_N}, {_N})"
_AGAINST = f"void({_N}, {_N}, b1[::1])"


@part
def _product(first_m: Any, second_m: Any, room_k: Any) -> Any:
    """Sum of the products, as a tree of halves of a whole row that ends with zeros. A product of
    two fp32 numbers is exact in fp64."""
    numel = len(first_m)
    both = max(numel - _HALF, 0)
    for i in range(both):
        low = _F64(first_m[i]) * _F64(second_m[i])
        room_k[i] = low + _F64(first_m[i + _HALF]) * _F64(second_m[i + _HALF])
    for i in range(both, min(numel, _HALF)):
        room_k[i] = _F64(first_m[i]) * _F64(second_m[i])
    for i in range(numel, _HALF):
        room_k[i] = _F64(0)
    width = _HALF
    while width > 1:
        width //= 2
        for i in range(width):
            room_k[i] += room_k[i + width]
    return room_k[0]


def _halves(
    first_n: Any, second_n: Any, anchor_n: Any, state_n: Any,
    decay: Any, share: Any, stretch: Any, momentum: Any, lr: Any,
    out_n: Any, state_out_n: Any,
) -> Any:  # fmt: skip
    top, half, numel = _I32(0), _F32(0.5), len(out_n)
    keeps, room_k = len(state_n) > 0, np.empty(_HALF, _F64)
    for begin in range(0, numel, ROW_NUMEL):
        end = min(begin + ROW_NUMEL, numel)
        first_m, second_m, anchor_m = first_n[begin:end], second_n[begin:end], anchor_n[begin:end]
        out_m, state_m, state_out_m = out_n[begin:end], state_n[begin:end], state_out_n[begin:end]
        rate = momentum
        if keeps and momentum != _F32(0):
            for i in range(len(out_m)):
                out_m[i] = (first_m[i] + second_m[i]) * half
            if _product(out_m, state_m, room_k) < _F64(0):
                rate = _F32(0)
        bits_m = out_m.view(_I32)
        for i in range(len(out_m)):
            delta = (first_m[i] + second_m[i]) * half
            moved = delta * stretch
            if keeps:
                state = state_m[i] * decay
                if share != _F32(0):
                    state = state + delta * share
                state_out_m[i] = state
                if momentum != _F32(0):
                    moved = moved + state * rate
            out_m[i] = anchor_m[i] - moved * lr
            top = max(top, _I32(bits_m[i] & _SIZE))
    return _I32(top).view(_F32)


def _against(delta_n: Any, state_n: Any, against_r: Any) -> None:
    room_k = np.empty(_HALF, _F64)
    for r in range(len(against_r)):
        begin, end = r * ROW_NUMEL, min((r + 1) * ROW_NUMEL, len(delta_n))
        against_r[r] = _product(delta_n[begin:end], state_n[begin:end], room_k) < _F64(0)


def halves() -> HalvesKernel:
    return compiled(_HALVES, _halves)


def against() -> AgainstKernel:
    return compiled(_AGAINST, _against)
