"""Encodes and decodes lines of an events file: JSON with the kind, the time, then the fields."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, NamedTuple, Union

import msgspec
from msgspec import Meta, Struct

from mend.errors import EventError
from mend.events import kinds
from mend.events.base import LoggedEvent, kind_of

KINDS: dict[str, type[LoggedEvent]] = {
    kind_of(made): made
    for made in vars(kinds).values()
    if isinstance(made, type)
    and issubclass(made, LoggedEvent)
    and made.__module__ == kinds.__name__
    and made is not kinds.RackMitigated
}
"""Kind -> its struct, in the order of the module."""

if TYPE_CHECKING:
    AnyEvent = LoggedEvent
else:
    AnyEvent = Union[tuple(KINDS.values())]  # noqa: UP007 - made at run time
    """For a field that is to be decoded: an event of any kind."""


class TimedEvent(NamedTuple):
    """`time_ns`: wall time."""

    time_ns: int
    event: LoggedEvent


class _Head(Struct):
    kind: str
    time_ns: Annotated[int, Meta(ge=0, lt=1 << 62)]


_encoder = msgspec.json.Encoder()
_heads = msgspec.json.Decoder(_Head)
_decoders = {kind: msgspec.json.Decoder(made) for kind, made in KINDS.items()}
_BAD = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)


def encode_line(timed: TimedEvent) -> bytes:
    """The line with its newline. Texts may contain anything, such as paths that are not UTF-8."""
    event = timed.event
    try:
        body = _encoder.encode(event)
    except (UnicodeEncodeError, OverflowError):
        body = json.dumps(msgspec.to_builtins(event), separators=(",", ":")).encode()
    head = b'{"kind":"%s"' % kind_of(event).encode()
    return b'%s,"time_ns":%d%s\n' % (head, timed.time_ns, body[len(head) :])


def decode_line(line: bytes) -> TimedEvent:
    """Decode a line. Raises EventError if it is not an event, is of an unknown kind, or has other
    fields than its kind."""
    try:
        head = _heads.decode(line)
    except _BAD as error:
        raise EventError(f"not an event: {error}") from error
    if head.kind not in _decoders:
        raise EventError(f"the kind {head.kind[:80]!r} is not known")
    try:
        return TimedEvent(head.time_ns, _decoders[head.kind].decode(line))
    except _BAD as error:
        raise EventError(f"{head.kind}: {error}") from error
