"""kernels.hashes: xxh3_128 of long blocks, row by row while a row is in the cache. Touches arrays
only.

Source: the XXH3 specification (xxHash, doc/xxhash_spec.md), for inputs above 240 bytes, the
default secret and seed 0. A block is a multiple of ROW_BYTES. Until its last row, 8 lanes of 64
bits take up stripes of 64 bytes; `finish` mixes them to the digest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mend.kernels import part

LANES = 8
ROW_BYTES = 1024
"""After so many bytes the lanes are scrambled."""

_STRIPES = ROW_BYTES // 64
_MASK = (1 << 64) - 1
_PRIMES_32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIMES_64 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)  # fmt: skip
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_LAST, _SCRAMBLES, _LOW, _HIGH = 121, 128, 11, 117
"""Where the secret of the last stripe, of scrambling, and of both halves of the digest begins."""

FIRST = np.array(
    [_PRIMES_32[2], *_PRIMES_64[:4], _PRIMES_32[1], _PRIMES_64[4], _PRIMES_32[0]], np.uint64
)
"""The lanes before the first byte."""

_KEYS = np.frombuffer(_SECRET, np.uint8)
_SCRAMBLE = np.frombuffer(_SECRET[_SCRAMBLES:], np.uint64)
_PRIME, _47, _6 = np.uint64(_PRIMES_32[0]), np.uint64(47), np.uint64(6)


@intrinsic
def _take(context: Any, lanes: Any, data: Any, keys: Any, count: Any) -> Any:
    """Let the lanes take up stripes; all but `count` are addresses. A vector of 8 by hand: numba's
    loops, which do not swap neighbours in vector registers, take three times as long."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place, data, keys, count = arguments
        word, vector = ir.IntType(64), ir.VectorType(ir.IntType(64), LANES)
        at = vector.as_pointer()

        def all_of(number: int) -> Any:
            return ir.Constant(vector, [number] * LANES)

        lanes_p = builder.inttoptr(place, at)
        before, entry = builder.load(lanes_p, align=8), builder.block
        loop, end = builder.append_basic_block("stripe"), builder.append_basic_block("end")
        builder.branch(loop)
        builder.position_at_end(loop)
        number, sums = builder.phi(word), builder.phi(vector)
        stripe = builder.add(data, builder.shl(number, ir.Constant(word, 6)))
        key = builder.add(keys, builder.shl(number, ir.Constant(word, 3)))
        value = builder.load(builder.inttoptr(stripe, at), align=1)
        mixed = builder.xor(value, builder.load(builder.inttoptr(key, at), align=1))
        low, high = builder.and_(mixed, all_of(0xFFFFFFFF)), builder.lshr(mixed, all_of(32))
        neighbours = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [1, 0, 3, 2, 5, 4, 7, 6])
        swapped = builder.shuffle_vector(value, value, neighbours)
        after = builder.add(builder.add(sums, swapped), builder.mul(low, high))
        following = builder.add(number, ir.Constant(word, 1))
        for phi, first, then in ((number, ir.Constant(word, 0), following), (sums, before, after)):
            phi.add_incoming(first, entry)
            phi.add_incoming(then, loop)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, end)
        builder.position_at_end(end)
        builder.store(after, lanes_p, align=8)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.uintp, types.intp), emit


@part
def feed(lanes_8: Any, address: Any, rows: Any, ends: Any) -> None:
    """Take up `rows` rows of ROW_BYTES from `address` on. `ends`: the last one ends its block."""
    lanes, keys = lanes_8.ctypes.data, _KEYS.ctypes.data
    for row in range(rows):
        at = address + np.uint64(row * ROW_BYTES)
        if ends and row == rows - 1:
            _take(lanes, at, keys, _STRIPES - 1)
            _take(lanes, at + np.uint64((_STRIPES - 1) * 64), keys + np.uint64(_LAST), 1)
        else:
            _take(lanes, at, keys, _STRIPES)
            for i in range(LANES):
                lane = lanes_8[i]
                lanes_8[i] = (lane ^ (lane >> _47) ^ _SCRAMBLE[i]) * _PRIME


def finish(lanes_8: np.ndarray, size: int) -> bytes:
    """The digest of a block of `size` bytes, as `xxhash.xxh3_128_digest` gives it."""
    lanes = [int(lane) for lane in lanes_8]
    low = _mixed(lanes, _LOW, size * _PRIMES_64[0] & _MASK)
    high = _mixed(lanes, _HIGH, ~(size * _PRIMES_64[1]) & _MASK)
    return high.to_bytes(8, "big") + low.to_bytes(8, "big")


def _mixed(lanes: list[int], secret: int, start: int) -> int:
    for i in range(0, LANES, 2):
        keys = (_SECRET[secret + 8 * k : secret + 8 * k + 8] for k in (i, i + 1))
        first, second = (int.from_bytes(key, "little") for key in keys)
        product = (lanes[i] ^ first) * (lanes[i + 1] ^ second)
        start += (product & _MASK) ^ (product >> 64)
    start &= _MASK
    start ^= start >> 37
    start = start * 0x165667919E3779F9 & _MASK
    return start ^ start >> 32
