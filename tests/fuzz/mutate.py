"""Bytes and trees that are nearly right. Every choice is drawn from the generator that is given."""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable
from typing import Any

EDGES = sorted(
    {0, 1, 2, 3, 23, 255, 256, 1023, 1024, 65_534, 65_535, 65_536, 10**9}
    | {2**bits + step for bits in (7, 15, 31, 32, 53, 62, 63) for step in (-1, 0, 1)}
    | {2**64 - 1, -1, -2, -128, -129, -(2**31), -(2**63)}
)
"""Integers where types, limits and signs change; all of them fit msgpack."""

TOKENS = (
    b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
    b"\xdc\xff\xff",
    b"\xdf\xff\xff\xff\xff",  # a map
    b"\xdb\xff\xff\xff\xff",  # a text
    b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xc9\xff\xff\xff\xff\x05",  # an extension
    b"\xd6\xff\x00\x00\x00\x00",  # a time
    b"\xc7\x0c\xff" + b"\xff" * 12,  # a time outside of all calendars
    b"\xc0", b"\xc1", b"\xc2", b"\xc3", b"\x80", b"\x90", b"\xa0", b"\xff",
    b"\xcf" + b"\xff" * 8,  # 2^64 - 1
    b"\xd3\x80" + b"\0" * 7,  # -2^63
    b"\xcb\x7f\xf8" + b"\0" * 6,  # NaN
    b"\xcb\x7f\xf0" + b"\0" * 6,  # infinity
    b"\xa3\xff\xfe\xfd", b"\xa2\xc3\x28", b"\xa3\xed\xa0\x80",  # texts that are no UTF-8
    b"\xa1\0", b"\x91" * 64, b"\x91" * 5000, b"\x81\xa1a" * 200,
)  # fmt: skip
"""Spellings of msgpack that lie about what follows, or that no field takes."""

_LENGTHS = frozenset([*range(0x80, 0xC0), *range(0xC4, 0xCA), *range(0xD9, 0xE0)])
"""First bytes of what has a length."""

Bytes = Callable[[random.Random, bytearray, bytes], None]


def _flip(rng: random.Random, data: bytearray, other: bytes) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, data: bytearray, other: bytes) -> None:
    data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _insert(rng: random.Random, data: bytearray, other: bytes) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.choice((1, 1, 2, 4, 9)))


def _delete(rng: random.Random, data: bytearray, other: bytes) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice((1, 1, 2, 4, 16))]


def _truncate(rng: random.Random, data: bytearray, other: bytes) -> None:
    del data[rng.randrange(len(data)) :]


def _splice(rng: random.Random, data: bytearray, other: bytes) -> None:
    """The beginning of one and the end of another."""
    del data[rng.randrange(len(data)) :]
    data += other[rng.randrange(len(other) + 1) :]


def _graft(rng: random.Random, data: bytearray, other: bytes) -> None:
    """A piece of another in the middle."""
    start, at = rng.randrange(len(other) + 1), rng.randrange(len(data))
    data[at : at + rng.randrange(17)] = other[start : start + rng.randrange(65)]


def _repeat(rng: random.Random, data: bytearray, other: bytes) -> None:
    start = rng.randrange(len(data))
    piece = data[start : start + rng.randrange(1, 65)]
    data[start:start] = piece * rng.choice((1, 2, 50))


def _length(rng: random.Random, data: bytearray, other: bytes) -> None:
    """What says how much follows says something else."""
    found = [at for at, byte in enumerate(data[:4096]) if byte in _LENGTHS]
    if found:
        at = rng.choice(found)
        data[at : at + 1] = rng.choice((bytes([(data[at] + 1) & 0xFF]), *TOKENS[:6]))


def _token(rng: random.Random, data: bytearray, other: bytes) -> None:
    at = rng.randrange(len(data))
    data[at : at + rng.choice((0, 1, 1, 2))] = rng.choice(TOKENS)


def _number(rng: random.Random, data: bytearray, other: bytes) -> None:
    """An integer of 2, 4 or 8 bytes at some edge, in the order of the network."""
    size = rng.choice((2, 4, 8))
    at = rng.randrange(len(data))
    value = rng.choice(EDGES) & ((1 << 8 * size) - 1)
    data[at : at + size] = value.to_bytes(size, "big")


MOVES: tuple[Bytes, ...] = (
    _flip, _flip, _set, _insert, _delete, _truncate, _splice, _graft, _repeat, _length, _token,
    _number,
)  # fmt: skip


def mutated(rng: random.Random, data: bytes, other: bytes, keep: int = 0) -> bytes:
    """One to four changes behind the first `keep` bytes, with pieces of `other`."""
    body, foreign = bytearray(data[keep:]), other[keep:] or b"\0"
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not body:
            body += b"\0"
        rng.choice(MOVES)(rng, body, foreign)
    return data[:keep] + bytes(body)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """As long as before, with one to four places changed."""
    body = bytearray(data) or bytearray(1)
    for _ in range(rng.choice((1, 1, 2, 4))):
        rng.choice((_flip, _set))(rng, body, data)
    if len(body) >= 8 and rng.random() < 0.2:
        at = rng.randrange(len(body) - 7)
        body[at : at + 8] = (rng.choice(EDGES) & (2**64 - 1)).to_bytes(8, "big")
    return bytes(body)


_LENGTH = struct.Struct("!I")


def joined(parts: list[bytes]) -> bytes:
    """One input of several, each behind its length."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def parts_of(data: bytes) -> list[bytes]:
    """What `joined` was given."""
    parts, at = [], 0
    while at < len(data):
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + size
        parts.append(data[at - size : at])
    return parts


def tree_mutated(rng: random.Random, tree: Any) -> Any:
    """Lists in lists with one to four leaves or branches changed, each to something of its type."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 2, 4))):
        branches = [tree] if isinstance(tree, list) else []
        for branch in branches:  # grows while it is read: all lists, from the root down
            branches += [each for each in branch if isinstance(each, list)]
        branch = rng.choice(branches)
        if not branch:
            continue
        at = rng.randrange(len(branch))
        branch[at] = _other(rng, branch[at], rng.choice(branches))
    return tree


def _other(rng: random.Random, value: Any, elsewhere: list[Any]) -> Any:
    alike = [each for each in elsewhere if type(each) is type(value)]
    if alike and rng.random() < 0.3:
        return copy.deepcopy(rng.choice(alike))
    match value:
        case bool():
            return not value
        case int():
            near = (value + 1, value - 1, 0, 1, 2, rng.choice(EDGES))
            return min(max(rng.choice(near), -(2**63)), 2**64 - 1)
        case str():
            return rng.choice((value[:-1], value + value, "", value[::-1], value.upper()))
        case bytes():
            return mutated(rng, value or b"\0", value)
        case list():
            again = [copy.deepcopy(value[0])] if value else []
            pieces = (value[:-1], value[::-1], value + again, [], rng.sample(value, len(value)))
            return rng.choice(pieces)
    return value
