"""Values of any message type, from what msgspec knows of it: a type that is added later is covered.

A value is the tree that msgpack would spell: lists, numbers, texts. `wild` is the chance that a
leaf is of another type or beyond its limit; 0 gives what a decoder must take.
"""

from __future__ import annotations

import datetime
import functools
import random
import string
import typing
from typing import Any

import msgspec
from msgspec import inspect

from mend.coordination import wire
from mend.coordination.messages import Envelope, Message
from tests.fuzz.mutate import EDGES

MESSAGES: tuple[type, ...] = typing.get_args(Message)

LONG = 300
"""How many items or letters a long value has, where its limit allows them."""

_FOREIGN: tuple[Any, ...] = (
    None, True, False, 1.5, float("nan"), -1, 2**64 - 1, "", "text", "\0", b"", b"bytes", [], [[]],
    {}, {"a": 1}, msgspec.msgpack.Ext(5, b"ext"), [0] * 40, "é" * 200,
    datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
)  # fmt: skip
_HEX = "0123456789abcdef"
_LETTERS = string.ascii_letters + string.digits + " .-_:/\0\n\\\"'%{}é漢\U0001f600"


@functools.cache
def _envelope() -> inspect.StructType:
    found = inspect.type_info(Envelope)
    assert isinstance(found, inspect.StructType)
    return found


@functools.cache
def _body(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def tree_of(rng: random.Random, kind: type | None = None, wild: float = 0.0) -> list[Any]:
    """An envelope around a message of `kind` (any, if None)."""
    fields = {field.name: field.type for field in _envelope().fields}
    fields["body"] = _body(kind or rng.choice(MESSAGES))
    return [value_of(rng, each, wild) for each in fields.values()]


def frame_of(tree: Any) -> bytes:
    """As `wire.encode` would spell it."""
    return wire.framed(msgspec.msgpack.encode(tree))


def tree_in(frame: bytes) -> Any:
    return msgspec.msgpack.decode(frame[len(wire.framed(b"")) :])


def value_of(  # noqa: C901 - one flat table
    rng: random.Random, kind: inspect.Type, wild: float = 0.0, small: bool = False
) -> Any:
    """`small`: few items and letters, at every depth."""
    if wild and rng.random() < wild:
        return rng.choice(_FOREIGN)
    match kind:
        case inspect.StructType(fields=fields, tag=tag):
            rest = [value_of(rng, field.type, wild, small) for field in fields]
            return rest if tag is None else [tag, *rest]
        case inspect.NamedTupleType(fields=fields):
            return [value_of(rng, field.type, wild, small) for field in fields]
        case inspect.VarTupleType() | inspect.ListType():
            return _items(rng, kind, wild, small)
        case inspect.TupleType(item_types=kinds):
            return [value_of(rng, each, wild, small) for each in kinds]
        case inspect.UnionType(types=kinds):
            return value_of(rng, rng.choice(kinds), wild, small)
        case inspect.IntType():
            return _integer(rng, kind, wild)
        case inspect.StrType():
            return _text(rng, kind, wild, small)
        case inspect.BytesType(max_length=most):
            return rng.randbytes(_size(rng, most, wild, small))
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.NoneType():
            return None
        case inspect.DictType(key_type=key, value_type=value):
            count = _size(rng, 4, wild, small)
            pairs = [
                [value_of(rng, each, wild, small) for each in (key, value)] for _ in range(count)
            ]
            return {each: of for each, of in pairs if isinstance(each, int | str)}
        case inspect.RawType():
            return rng.choice(_FOREIGN)
        case inspect.LiteralType(values=values):
            return rng.choice(values)
        case inspect.FloatType(ge=least, lt=below):
            drawn = rng.choice((0.0, -1.0, 1e308, rng.random()))
            fits = (least is None or drawn >= least) and (below is None or drawn < below)
            return drawn if wild or fits else rng.random()
    raise NotImplementedError(f"say here what a value of {kind} looks like")


def _size(rng: random.Random, most: int | None, wild: float, small: bool) -> int:
    """Mostly few, at times many; beyond the limit only when wild."""
    size = rng.choice((0, 1, 1, 2, 3))
    if not small and rng.random() < 0.02:
        size = LONG
    if most is None:
        return size
    if not small and most <= 4096 and rng.random() < 0.003:
        return most + (wild > 0)
    return min(size, most)


def _items(
    rng: random.Random, kind: inspect.VarTupleType | inspect.ListType, wild: float, small: bool
) -> list[Any]:
    size = _size(rng, kind.max_length, wild, small)
    if size <= 8:
        return [value_of(rng, kind.item_type, wild, small) for _ in range(size)]
    few = [value_of(rng, kind.item_type, small=True) for _ in range(3)]  # many, but drawn once
    return [few[i % 3] for i in range(size)]


def _integer(rng: random.Random, kind: inspect.IntType, wild: float) -> int:
    low = -(2**63) if kind.ge is None else int(kind.ge)
    high = 2**64 - 1 if kind.le is None else int(kind.le)
    if wild and rng.random() < wild:
        return max(-(2**63), min(rng.choice((low - 1, high + 1)), 2**64 - 1))
    value = rng.choice((rng.choice((0, 0, 1, 1, 2, 3, 4)), rng.choice(EDGES), low, high))
    return min(max(value, low), high)


def _text(rng: random.Random, kind: inspect.StrType, wild: float, small: bool) -> str:
    size = _size(rng, kind.max_length, wild, small)
    match kind.pattern:
        case None:
            return "".join(rng.choices(_LETTERS, k=size))
        case r"^([0-9a-f]{32})*([0-9a-f]{2})*\Z":
            most = kind.max_length or 64
            size = rng.choice((0, min(64, most), min(32, most), min(size, most) & ~1))
            return "".join(rng.choices(_HEX, k=size))
        case "^tcp://":
            rest = ("127.0.0.1:5555", "", "rack:1", ":::", "\0", "*:*", "[::1]:1", "a b:99999999")
            return "tcp://" + rng.choice(rest)
    # A pattern that is new here: its letters without the signs of the language of patterns.
    return "".join(letter for letter in kind.pattern or "" if letter.isalnum())
