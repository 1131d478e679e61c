"""Messages between the doctors of the racks, and their wire format. Pure.

    Here    who I am, whom I hear, what I have measured: a whole state, repeated
    Ping    answered at once by a Pong, with the receiver's time of day

The frames are not those of a job (another magic), so a job that is spoken to by mistake refuses
them, and the other way round. Strict as `protocol.wire`: a whole message, or a WireError.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from mend.coordination import wire
from mend.errors import WireError
from mend.types import Address

MAGIC = b"mdr"
VERSION = 1
FRAME_BYTES_MAX = 1 << 20

U16 = Annotated[int, Meta(ge=0, le=0xFFFF)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Signed = Annotated[int, Meta(ge=-(2**62), le=2**62)]
TEXT_MAX = 512
Text = Annotated[str, Meta(max_length=TEXT_MAX, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]
"""Goes to a terminal: no control characters."""

_HEAD = MAGIC + bytes([VERSION])


class Word(Struct, frozen=True, array_like=True):
    """Base of everything that travels."""


class About(Word, frozen=True):
    """The facts of a doctor that stay the same while it runs."""

    versions: Annotated[tuple[tuple[Text, Text], ...], Meta(max_length=16)]
    facts: Annotated[tuple[tuple[Text, Text], ...], Meta(max_length=64)]
    """Facts that must be equal on all racks, as text."""
    wishes: Annotated[tuple[tuple[Text, Text], ...], Meta(max_length=64)]
    """Facts that should be equal."""
    plan: Text
    """Empty; it keeps the layout of this version."""
    host: Text
    boot: Text
    """Differs between machines."""
    listens: Text
    lane: Address
    serves: bool
    """It takes part in measuring bandwidth."""


class Trips(Word, frozen=True):
    """Round trips to a rack. The offset is its time of day less ours, by the quickest of them."""

    rack: U16
    count: Count
    p50_ns: Count
    p99_ns: Count
    offset_ns: Signed


class Pull(Word, frozen=True):
    """The result of a pull by one rack from another in a turn. `error`: empty where none came."""

    turn: Count
    holder: U16
    together: bool
    """Everybody pulled from everybody at that time."""
    bytes: Count
    ns: Count
    error: Text


class Turn(Word, frozen=True):
    """The racks that pull now, by order of the lowest rack. Of two turns, the one of the lower rack
    counts, and of the same rack the higher number. `last`: nobody pulls any more."""

    by: U16
    number: Count
    pairs: Annotated[tuple[tuple[U16, U16], ...], Meta(max_length=4096)]
    """(who pulls, from whom)."""
    ms: Annotated[int, Meta(ge=0, le=600_000)]
    """Duration of the measurement."""
    together: bool
    last: bool


class Here(Word, frozen=True, tag=1):
    """A doctor's whole state. `did`: (rack, newest turn it has done), as far as is known."""

    serial: Count
    about: About
    heard: Annotated[tuple[tuple[U16, Count], ...], Meta(max_length=64)]
    """(rack, nonce) of whom it hears at present."""
    left_ms: Count
    """Time that it still waits for others."""
    trips: Annotated[tuple[Trips, ...], Meta(max_length=64)]
    turn: Turn | None
    did: Annotated[tuple[tuple[U16, Count], ...], Meta(max_length=64)]
    pulls: Annotated[tuple[Pull, ...], Meta(max_length=256)]


class Ping(Word, frozen=True, tag=2):
    number: Count


class Pong(Word, frozen=True, tag=3):
    """The time of day when the ping came, and when this left."""

    number: Count
    heard_ns: Count
    said_ns: Count


class Envelope(Word, frozen=True):
    """The content of a frame. `nonce`: drawn once per process."""

    job: Annotated[str, Meta(max_length=64)]
    rack: U16
    nonce: Count
    body: Here | Ping | Pong


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    return wire.framed(_encoder.encode(envelope), _HEAD)


def clean(text: str) -> str:
    """Make a Text of it: short, and nothing that a terminal would obey."""
    return "".join(each if each.isprintable() else " " for each in text[:TEXT_MAX])


def decode(frame: bytes) -> Envelope:
    """Decode a frame. Raises WireError and nothing else, whatever the bytes."""
    body = wire.body_of(frame, _HEAD, FRAME_BYTES_MAX)
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError, OverflowError) as error:
        raise WireError(f"no word of a doctor: {error}") from error
