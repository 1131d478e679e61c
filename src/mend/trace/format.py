"""The byte format of a tape: the events that machines were given, and their effects.

A file is a sequence of chunks, each with a head that has its length and checksums. All chunks are
one zlib stream, so that a heartbeat that repeats the last one costs a few bytes. An inflated chunk
is a sequence of records, each preceded by its length. The first record of a file is the `Header`.

    file    MAGIC, version | chunk | chunk | ...
    chunk   number, deflated bytes, raw bytes, xxh3 of the deflated, xxh32 of this head | deflated
    record  bytes | msgpack: a Header, then entries and gaps, of a later file after a Base

A tape that was closed in order ends with an empty chunk whose number has the bit LAST.

Events and effects are written under the names of their classes, with the names of their fields. A
new field needs no change here; a renamed class or field needs a new VERSION.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from struct import Struct as Layout
from struct import error as StructError
from typing import Any, NamedTuple

import msgspec
import xxhash
from msgspec import Struct

from mend.coordination.events import CommonEffect, Effect, Event
from mend.coordination.machines import ProcessSpec
from mend.errors import TapeError

MAGIC = b"mendtape"
VERSION = 10
LEVEL = 6
"""The zlib level: it costs a few percent of a core at a thousand events a second."""

CHUNK_RAW_BYTES = 1 << 20
"""A writer ends a chunk when it holds this much."""

CHUNK_BYTES_MAX = 32 << 20
"""Limit of one chunk for a reader, deflated or inflated."""

RECORD_BYTES_MAX = 24 << 20
"""Limit of a record; a longer one is not written. The largest frame has a third of it."""

LAST = 1 << 31

_FILE = Layout("!8sH")
_HEAD = Layout("!IIIQ")
_CHECK = Layout("!I")
_LENGTH = Layout("!I")
FILE_BYTES = _FILE.size
HEAD_BYTES = _HEAD.size + _CHECK.size


class Header(Struct, frozen=True, kw_only=True):
    """The process that wrote a tape. Equal in every file of a tape except for `segment`."""

    format: int = VERSION
    job: str
    rack: int
    rank: int
    parts: ProcessSpec
    plan: str = ""
    """Hash of what all racks must share; empty for a witness."""
    argv: tuple[str, ...] = ()
    config: dict[str, Any] = {}
    versions: dict[str, str] = {}
    payload_bytes: tuple[int, ...] = ()
    """Payload bytes of this rank's part of an offer, per fragment; empty for a witness."""
    moments: int = 0
    """Number of fragments of moments, which are the last ones."""
    wall_ns: int = 0
    """Wall time at `mono_ns` of the monotonic clock. All times on the tape are of the monotonic
    clock."""
    mono_ns: int = 0
    segment: int = 0


class _Given(Struct, frozen=True, array_like=True, tag=1):
    machine: str
    now_ns: int
    event_name: str
    event: msgspec.Raw
    effects: tuple[tuple[str, msgspec.Raw], ...]
    error: str


class Gap(Struct, frozen=True, array_like=True, tag=2):
    """Entries that are missing here: the disk was too slow, or one was too long."""

    count: int
    reason: str


class Base(Struct, frozen=True, array_like=True, tag=4):
    """The state of the machines when this file began, as `trace.state` writes it. A replay can
    begin here when the earlier files are gone."""

    state: bytes


class _Bound(Struct, frozen=True, array_like=True, tag=3):
    header: Header


class Answer(NamedTuple):
    """One effect as it is on the tape. Equal bytes, equal effects."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Entry:
    """One event that one machine handled. `number` counts from 1; `error`: what `handle` raised."""

    number: int
    machine: str
    now_ns: int
    event: Event
    answers: tuple[Answer, ...]
    error: str = ""

    @cached_property
    def effects(self) -> tuple[Effect, ...]:
        """The decoded effects. Raises TapeError for one that is unknown to this version of mend."""
        return tuple(effect_of(answer) for answer in self.answers)


_encoder = msgspec.msgpack.Encoder(order="deterministic", enc_hook=str)
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_Bound | _Given | Gap | Base)
Decoders = dict[str, msgspec.msgpack.Decoder[Any]]
"""Name of a class -> its decoder."""

_EVENTS: Decoders = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in Event.__subclasses__()
}
_EFFECTS: Decoders = {
    kind.__name__: msgspec.msgpack.Decoder(kind)
    for kind in (*Effect.__subclasses__(), *CommonEffect.__subclasses__())
    if kind is not CommonEffect
}
_BAD = (msgspec.DecodeError, ValueError, RecursionError, OverflowError, StructError, KeyError)


# ------------------------------------------------------------------ records


def record_of(part: Header | Gap | Base) -> bytes:
    return _encoder.encode(_Bound(part) if isinstance(part, Header) else part)


def record_of_entry(
    machine: str, now_ns: int, event: Event, effects: Sequence[Effect], error: str = ""
) -> bytes:
    answered = [(type(effect).__name__, effect) for effect in effects]
    return _encoder.encode([1, machine, now_ns, type(event).__name__, event, answered, error])


def answer_of(effect: Effect) -> Answer:
    """Encode an effect as on the tape."""
    return Answer(type(effect).__name__, _encoder.encode(effect))


def effect_of(answer: Answer) -> Effect:
    """Decode an effect. Raises TapeError."""
    effect: Effect = _typed(_EFFECTS, answer.name, answer.data)
    return effect


def read_record(record: bytes, number: int) -> Header | Entry | Gap | Base:
    """Decode a record. `number`: the number of the entry. Raises TapeError, never anything else."""
    try:
        decoded: _Bound | _Given | Gap | Base = _decoder.decode(record)
    except _BAD as error:
        raise TapeError(f"record {number} is not of this format: {error}") from error
    if isinstance(decoded, _Bound):
        return decoded.header
    if isinstance(decoded, Gap | Base):
        return decoded
    try:
        event: Event = _typed(_EVENTS, decoded.event_name, decoded.event)
    except TapeError as error:
        raise TapeError(f"event {number} of machine {decoded.machine}: {error}") from error
    answers = tuple(Answer(name, bytes(raw)) for name, raw in decoded.effects)
    return Entry(number, decoded.machine, decoded.now_ns, event, answers, decoded.error)


def _typed(decoders: Decoders, name: str, data: bytes | msgspec.Raw) -> Any:
    if name not in decoders:
        raise TapeError(
            f"{name!r} is unknown to this version of mend; read the tape with the one that wrote it"
        )
    try:
        return decoders[name].decode(data)
    except _BAD as error:
        raise TapeError(
            f"{name} does not fit this version of mend ({error}); read the tape with the one that "
            "wrote it"
        ) from error


# ------------------------------------------------------------------ chunks


class Head(NamedTuple):
    number: int
    deflated: int
    raw: int
    checksum: int
    last: bool


class Packer:
    """Packs records into the chunks of one file."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(LEVEL)
        self._number = 0

    def chunk(self, records: Sequence[bytes]) -> bytes:
        """Pack records into one chunk. The caller keeps their total below CHUNK_BYTES_MAX."""
        raw = b"".join(part for record in records for part in (_LENGTH.pack(len(record)), record))
        deflated = self._deflate.compress(raw) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        head = self._head(self._number, len(raw), deflated)
        self._number += 1
        return head + deflated

    def end(self) -> bytes:
        """The empty chunk that marks a complete tape."""
        return self._head(self._number | LAST, 0, b"")

    def _head(self, number: int, raw_bytes: int, deflated: bytes) -> bytes:
        checksum = xxhash.xxh3_64_intdigest(deflated)
        head = _HEAD.pack(number, len(deflated), raw_bytes, checksum)
        return head + _CHECK.pack(xxhash.xxh32_intdigest(head))


class Unpacker:
    """Unpacks the chunks of one file into records, in order."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj()

    def records(self, head: Head, deflated: bytes) -> Iterator[bytes]:
        """Inflates at most the bytes in the head, which `read_head` limits. Raises TapeError."""
        try:
            raw = self._inflate.decompress(deflated, head.raw + 1)
        except zlib.error as error:
            raise TapeError(f"chunk {head.number} does not inflate: {error}") from error
        if len(raw) != head.raw or self._inflate.unconsumed_tail:
            raise TapeError(f"chunk {head.number} inflates to other than its {head.raw} bytes")
        place = 0
        while place < len(raw):
            end = place + _LENGTH.size
            stop = end + int.from_bytes(raw[place:end], "big")
            if stop > len(raw):
                raise TapeError(f"a record of chunk {head.number} goes beyond its end")
            yield raw[end:stop]
            place = stop


def file_begin() -> bytes:
    return _FILE.pack(MAGIC, VERSION)


def check_begin(begin: bytes) -> None:
    """Raise TapeError if the file is not a tape, or has another format."""
    if len(begin) < FILE_BYTES or begin[: len(MAGIC)] != MAGIC:
        raise TapeError("it does not begin like a tape of mend")
    version = _FILE.unpack(begin)[1]
    if version != VERSION:
        raise TapeError(
            f"it has format {version}, this mend reads format {VERSION}; read it with the mend "
            "that wrote it"
        )


def read_head(data: bytes, number: int) -> Head:
    """Decode a head. Raises TapeError if it is not that of chunk `number`."""
    (check,) = _CHECK.unpack(data[_HEAD.size :])
    if check != xxhash.xxh32_intdigest(data[: _HEAD.size]):
        raise TapeError(f"the head of chunk {number} fails its checksum")
    marked, deflated, raw, checksum = _HEAD.unpack(data[: _HEAD.size])
    head = Head(marked & ~LAST, deflated, raw, checksum, bool(marked & LAST))
    if head.number != number:
        raise TapeError(f"chunk {head.number} is where chunk {number} should be")
    if max(head.deflated, head.raw) > CHUNK_BYTES_MAX:
        raise TapeError(f"chunk {number} is longer than {CHUNK_BYTES_MAX} bytes")
    return head


def check_chunk(head: Head, deflated: bytes) -> None:
    """Raise TapeError if the bytes are not those that were written."""
    if xxhash.xxh3_64_intdigest(deflated) != head.checksum:
        raise TapeError(f"chunk {head.number} fails its checksum")
