"""kernels.offers: everything that makes an offer, row by row while a row is in the cache. Touches
arrays only.

Legend: r rows, k = ROW_NUMEL elements of a row, c bytes of its payload.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np

from mend.kernels import ROW_NUMEL, DeltaKernel, OfferKernel, SquaresKernel, compiled, part
from mend.kernels.blocks import PARTS, SIZE
from mend.kernels.self_checks import check_offer

_F32, _I32 = np.float32, np.int32
_HALF = ROW_NUMEL // 2

_ROWS = "f4[:, ::1]"
_DELTA = f"f4({_ROWS}, {_ROWS}, {_ROWS}, {_ROWS}, f4)"
_SQUARES = f"void({_ROWS}, f4[::1])"
_OFFER = f"f4({_ROWS}, {_ROWS}, {_ROWS}, {_ROWS}, f4, u1[:, ::1], {_ROWS}, b1, {_ROWS})"


@part
def _fill(delta_rk: Any, residual_rk: Any, anchor_rk: Any, x_rk: Any, r: Any) -> Any:
    """Write one row of the delta and of x. Returns the bits of the greatest magnitude in x."""
    if len(anchor_rk):
        for i in range(ROW_NUMEL):
            delta_rk[r, i] = anchor_rk[r, i] - delta_rk[r, i]
    if len(residual_rk):
        for i in range(ROW_NUMEL):
            x_rk[r, i] = delta_rk[r, i] + residual_rk[r, i]
    top, bits_rk = _I32(0), x_rk.view(_I32)
    for i in range(ROW_NUMEL):
        top = max(top, _I32(bits_rk[r, i] & SIZE))
    return _I32(top)


@part
def _squares(x_rk: Any, r: Any, room_k: Any) -> Any:
    """The sum of the squares of a row, as a tree of halves."""
    for i in range(_HALF):
        low, high = x_rk[r, i], x_rk[r, i + _HALF]
        room_k[i] = low * low + high * high
    width = _HALF
    while width > 1:
        width //= 2
        for i in range(width):
            room_k[i] += room_k[i + width]
    return room_k[0]


def _delta(delta_rk: Any, residual_rk: Any, anchor_rk: Any, x_rk: Any, limit: Any) -> Any:
    greatest, most = _I32(0), _F32(limit).view(_I32)
    for r in range(len(x_rk)):
        greatest = max(greatest, _fill(delta_rk, residual_rk, anchor_rk, x_rk, r))
        if greatest >= most:
            break
    return _I32(greatest).view(_F32)


def _squares_of_rows(x_rk: Any, squares_r: Any) -> None:
    room_k = np.empty(_HALF, _F32)
    for r in range(len(x_rk)):
        squares_r[r] = _squares(x_rk, r, room_k)


_encode, _decode, _, _BLOCK_BYTES = PARTS["int8"]
"""These are of the codec for which `_offer` is compiled; `offer` puts others in their place."""


def _offer(
    delta_rk: Any, residual_rk: Any, anchor_rk: Any, x_rk: Any, limit: Any,
    payload_rc: Any, left_rk: Any, in_weights: Any, squares_r2: Any,
) -> Any:  # fmt: skip
    greatest, most = _I32(0), _F32(limit).view(_I32)
    sent_1k, room_k = np.empty((1, ROW_NUMEL), _F32), np.empty(_HALF, _F32)
    block_bytes = _BLOCK_BYTES
    blocks = payload_rc.shape[1] // block_bytes
    sent_bk = sent_1k.reshape((blocks, ROW_NUMEL // blocks))
    for r in range(len(x_rk)):
        greatest = max(greatest, _fill(delta_rk, residual_rk, anchor_rk, x_rk, r))
        if greatest >= most:
            break
        row_bc = payload_rc[r].reshape((blocks, block_bytes))
        _encode(x_rk[r].reshape(sent_bk.shape), row_bc)
        _decode(row_bc, sent_bk)
        squares_r2[r, 1] = _squares(x_rk, r, room_k)
        # `left` may be x, so it is written after x has been read.
        for i in range(ROW_NUMEL):
            sent = sent_1k[0, i]
            sent_1k[0, i] = x_rk[r, i] - sent
            if in_weights:
                left_rk[r, i] = sent
        squares_r2[r, 0] = _squares(sent_1k, 0, room_k)
        if not in_weights:
            for i in range(ROW_NUMEL):
                left_rk[r, i] = sent_1k[0, i]
    return _I32(greatest).view(_F32)


def delta() -> DeltaKernel:
    """The delta and its check, for codecs that are not compiled."""
    return compiled(_DELTA, _delta)


def squares() -> SquaresKernel:
    """The sums of squares, for codecs that are not compiled."""
    return compiled(_SQUARES, _squares_of_rows)


def offer(codec: str) -> OfferKernel:
    """The whole offer, with this codec."""
    encode, decode, _, block_bytes = PARTS[codec]
    here = globals() | {"_encode": encode, "_decode": decode, "_BLOCK_BYTES": block_bytes}
    made = compiled(_OFFER, FunctionType(_offer.__code__, here, f"_{codec}_offer"))
    return check_offer(made, codec)
