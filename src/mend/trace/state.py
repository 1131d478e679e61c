"""Encodes and decodes the state of a process's machines, from which a replay can begin.

Machines consist of plain values: numbers, text, containers, enums, and objects of the rooms that
decide. Each is written with its class, so a new field needs no change here. Shared objects and
containers stay shared. Decoding creates objects of `ROOMS` only, sets their fields, and calls none
of their methods.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from typing import Any

import msgspec

from mend.coordination.events import Machine
from mend.errors import TapeError

ROOMS = re.compile(r"mend\.(?:(?:consensus|coordination|detector)\.[a-z_]+|types)")
"""Modules whose classes may be in a state."""

INT_MAX = 1 << 63
"""Integers beyond it, of either sign, are written as text."""

_PLAIN = frozenset((type(None), bool, float, str, bytes))
_CONTAINERS: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "f"}
_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()
_names: dict[type, str] = {}
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def encode_state(machines: Mapping[str, Machine]) -> bytes:
    """Encode all machines of a process, by name. Equal states give equal bytes. Raises TypeError
    for a value of another kind."""
    return _encoder.encode(_Writer().write(dict(machines)))


def decode_state(data: bytes) -> dict[str, Machine]:
    """Restore the machines. Raises TapeError, never another exception."""
    try:
        machines = _Reader().read(_decoder.decode(data))
    except TapeError:
        raise
    except Exception as error:  # the bytes are untrusted and may raise anything
        raise TapeError(f"the state of its machines does not fit this mend: {error!r}") from error
    if not isinstance(machines, dict) or not all(
        hasattr(each, "handle") for each in machines.values()
    ):
        raise TapeError(f"the state of its machines is a {type(machines).__name__}")
    return machines


class _Writer:
    """Writes values as lists that begin with a code of their kind. `seen`: id -> number of a value
    that may be shared."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def write(self, value: object) -> object:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, msgspec.Struct):
            return ["m", _name(kind), _encoder.encode(value)]
        if type(value) is int:
            return value if -INT_MAX <= value < INT_MAX else ["i", str(value)]
        if kind is tuple or kind is frozenset:
            return self._items(value, _CONTAINERS[kind])
        if isinstance(value, Enum):
            return ["e", _name(kind), value.name]
        if isinstance(value, tuple):
            return ["n", _name(kind), *map(self.write, value)]
        return self._shared(value)

    def _shared(self, value: object) -> object:
        """A mutable value, which stays shared if it was shared."""
        if (number := self._seen.get(id(value))) is not None:
            return ["r", number]
        self._seen[id(value)] = len(self._seen)
        kind = type(value)
        if kind in _CONTAINERS:
            return self._items(value, _CONTAINERS[kind])
        if isinstance(value, deque):
            return ["q", value.maxlen, *self._each(value)]
        if isinstance(value, dict):
            pairs = zip(self._each(value.keys()), self._each(value.values()), strict=True)
            return ["d", *itertools.chain.from_iterable(pairs)]
        fields = ((name, self.write(each)) for name, each in _fields(value))
        return ["o", _name(kind), *(each for pair in fields for each in pair)]

    def _items(self, value: Any, mark: str) -> list[object]:
        items = self._each(value)
        return [mark, *(sorted(items, key=_encoder.encode) if mark in "sf" else items)]

    def _each(self, values: Collection[Any]) -> list[object]:
        """Plain values need no conversion; a log has thousands of them."""
        kinds = set(map(type, values))
        if kinds <= _PLAIN or (kinds == {int} and -INT_MAX <= min(values) <= max(values) < INT_MAX):
            return list(values)
        return [self.write(each) for each in values]


class _Reader:
    """`made`: the values that may be shared, in the order of their creation."""

    def __init__(self) -> None:
        self._made: list[object] = []
        self._by_mark: dict[str, Callable[[list[Any]], object]] = {
            "i": lambda of: int(of[0]),
            "e": lambda of: _enum(*of),
            "m": lambda of: _struct(*of),
            "n": lambda of: tuple.__new__(_class(of[0]), map(self.read, of[1:])),
            "t": lambda of: tuple(map(self.read, of)),
            "f": lambda of: frozenset(map(self.read, of)),
            "r": lambda of: self._made[of[0]],
            "l": lambda of: self._fill([], lambda to: to.extend(map(self.read, of))),
            "s": lambda of: self._fill(set(), lambda to: to.update(map(self.read, of))),
            "q": lambda of: self._fill(
                deque(maxlen=of[0]), lambda to: to.extend(map(self.read, of[1:]))
            ),
            "d": lambda of: self._fill(
                {}, lambda to: to.update((self.read(k), self.read(v)) for k, v in _pairs(of))
            ),
            "o": self._object,
        }

    def read(self, written: Any) -> Any:
        if not isinstance(written, list):
            return written
        return self._by_mark[written[0]](written[1:])

    def _fill(self, empty: Any, fill: Callable[[Any], object]) -> object:
        self._made.append(empty)
        fill(empty)
        return empty

    def _object(self, of: list[Any]) -> object:
        made: object = object.__new__(_class(of[0]))
        self._made.append(made)
        for name, value in _pairs(of[1:]):
            object.__setattr__(made, name, self.read(value))
        return made


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(items[::2], items[1::2], strict=True)


def _fields(value: object) -> Iterator[tuple[str, object]]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in (*slots, *getattr(value, "__dict__", ())):
        if hasattr(value, name):
            yield name, getattr(value, name)


def _name(kind: type) -> str:
    if kind in _names:
        return _names[kind]
    if not ROOMS.fullmatch(kind.__module__):
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not part of a machine's state")
    _names[kind] = f"{kind.__module__}:{kind.__qualname__}"
    return _names[kind]


@functools.cache
def _class(name: str) -> type:
    module, _, kind = name.partition(":")
    if not ROOMS.fullmatch(module):
        raise TapeError(f"{name!r} is not part of a machine's state")
    value = getattr(importlib.import_module(module), kind)
    if not isinstance(value, type) or value.__module__ != module:
        raise TapeError(f"{name!r} is not a class of this version of mend")
    return value


def _enum(name: str, member: str) -> Enum:
    kind = _class(name)
    if not issubclass(kind, Enum):
        raise TapeError(f"{name!r} is not an enumeration of this version of mend")
    return kind[member]


def _struct(name: str, data: bytes) -> object:
    kind = _class(name)
    if not issubclass(kind, msgspec.Struct):
        raise TapeError(f"{name!r} is not a record of this version of mend")
    if kind not in _decoders:
        _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return _decoders[kind].decode(data)
