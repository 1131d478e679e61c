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
"""Where the secrets of the last stripe, of scrambling, and of the two halves of the digest
begin."""

FIRST = np.array(
    [_PRIMES_32[2], *_PRIMES_64[:4], _PRIMES_32[1], _PRIMES_64[4], _PRIMES_32[0]], np.uint64
)
"""The lanes before the first byte."""

_KEYS = np.frombuffer(_SECRET, np.uint8)
_SCRAMBLE = np.frombuffer(_SECRET[_SCRAMBLES:], np.uint64)
_PRIME, _47 = np.uint64(_PRIMES_32[0]), np.uint64(47)
_32, _HALF = np.uint64(32), np.uint64(0xFFFFFFFF)


@intrinsic
def _take(context: Any, lanes: Any, data: Any, keys: Any, count: Any) -> Any:
    """Let the lanes take up stripes; all arguments but `count` are addresses. It has a vector of 8
    of its own: numba's loops, which do not swap neighbours in vector registers, take three times as
    long."""

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


def finish(lanes_D8: np.ndarray, size: int) -> bytes:
    """The digests of D blocks of `size` bytes, concatenated, as `xxhash.xxh3_128_digest` returns
    them."""
    low_D = _mixed(lanes_D8, _LOW, size * _PRIMES_64[0] & _MASK)
    high_D = _mixed(lanes_D8, _HIGH, ~(size * _PRIMES_64[1]) & _MASK)
    return np.stack([high_D, low_D], 1).astype(">u8").tobytes()


def _mixed(lanes_D8: np.ndarray, secret: int, start: int) -> np.ndarray:
    keyed_D8 = lanes_D8 ^ np.frombuffer(_SECRET[secret : secret + 8 * LANES], np.uint64)
    first_D4, second_D4 = keyed_D8[:, 0::2], keyed_D8[:, 1::2]
    low_D4, high_D4 = first_D4 * second_D4, _high(first_D4, second_D4)
    mixed_D: np.ndarray = (low_D4 ^ high_D4).sum(1, dtype=np.uint64) + np.uint64(start)
    mixed_D ^= mixed_D >> np.uint64(37)
    mixed_D *= np.uint64(0x165667919E3779F9)
    mixed_D ^= mixed_D >> _32
    return mixed_D


def _high(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The upper 64 of the 128 bits of products."""
    a, b, c, d = first >> _32, first & _HALF, second >> _32, second & _HALF
    middle = (b * d >> _32) + (a * d & _HALF) + (b * c & _HALF)
    high: np.ndarray = a * c + (a * d >> _32) + (b * c >> _32) + (middle >> _32)
    return high
