"""Messages for those who follow the merged model from outside: a question, and the decided versions
since the last answer. No machine of the job reads them.

    follower --Follow--> leader or witness --Followed--> follower

They share the magic and the version of the status messages. Their view of the log has no
incarnation of a member, with which messages of racks could be forged.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from mend.consensus.records import U16, Count, Digests, Hex, Text, Versions, Where, WireStruct
from mend.coordination import wire
from mend.errors import WireError
from mend.status.messages import HEAD, LOOK_BYTES_MAX, JobName, Look
from mend.types import Address

ANSWER_BYTES_MAX = wire.FRAME_BYTES_MAX
LAYOUT_BYTES_MAX = 64 << 20

Shape = Annotated[tuple[Count, ...], Meta(max_length=64)]


class Follow(WireStruct, frozen=True, tag=3):
    """`lineage`, `index`: how far the follower has read the log; empty and 0: not at all."""

    job: JobName
    lineage: Hex = ""
    index: Count = 0


class CommitSeen(WireStruct, frozen=True):
    """A decided version of one fragment."""

    fragment: U16
    version: Count
    digests: Digests
    """Per rank of a rack."""
    step: Count
    """The newest step that a member had captured."""
    tokens: Count
    """Of the members' work in it."""


class RackLanes(WireStruct, frozen=True):
    """A rack that has a seat: where its leader answers, and where its ranks serve."""

    rack: U16
    address: Where
    lanes: Annotated[tuple[Address, ...], Meta(max_length=1024)]


class Followed(WireStruct, frozen=True, tag=4):
    """The decided log of a job, as one of its processes knows it."""

    job: JobName
    mend: Text
    rack: U16
    lineage: Hex
    """Empty: the job has not begun."""
    knows: bool
    """Whether this process knows the lineage of the question: what it says is that one, or
    younger."""
    index: Count
    """Records that `commits` reach to."""
    decided: Count
    over: bool
    racks: Annotated[tuple[RackLanes, ...], Meta(max_length=64)]
    step: Count
    """The newest captured step that is merged."""
    commits: Annotated[tuple[CommitSeen, ...], Meta(max_length=4096)] = ()
    """After the index that was asked for."""
    versions: Versions = ()
    """Of every fragment at `index`; empty: `commits` has all that is new to the follower."""
    digests: Annotated[tuple[Digests, ...], Meta(max_length=1024)] = ()
    """Of these versions, per fragment and rank."""


class Piece(WireStruct, frozen=True):
    """The elements of one tensor in a rank's part of a fragment: [start, stop) of the box at `at`
    of shape `box`, row-major."""

    name: Text
    dtype: Text
    shape: Shape
    """Of the whole tensor."""
    box: Shape
    at: Shape
    start: Count
    stop: Count


class Part(WireStruct, frozen=True):
    """What a rank owns of a fragment: its pieces end to end. `moving`: of running statistics, which
    are zeros before their first average."""

    fragment: U16
    pieces: tuple[Piece, ...]
    moving: bool = False


class Parts(WireStruct, frozen=True):
    """Of one rank: all fragments that belong to the model."""

    rank: U16
    ranks: U16
    parts: tuple[Part, ...]


_encoder = msgspec.msgpack.Encoder()
_asked = msgspec.msgpack.Decoder(Look | Follow)
_followed = msgspec.msgpack.Decoder(Followed)
_parts = msgspec.msgpack.Decoder(Parts)
_ERRORS = (msgspec.DecodeError, ValueError, RecursionError, OverflowError)


def encode_follow(follow: Follow) -> bytes:
    return wire.framed(_encoder.encode(follow), HEAD)


def encode_followed(followed: Followed) -> bytes:
    """Raises WireError for a frame over the limit."""
    frame = wire.framed(_encoder.encode(followed), HEAD)
    if len(frame) > ANSWER_BYTES_MAX:
        raise WireError(f"{len(frame)} bytes for a follower; the limit is {ANSWER_BYTES_MAX}")
    return frame


def decode_asked(frame: bytes) -> Look | Follow:
    """What a client asks. Raises WireError and nothing else, whatever the bytes."""
    body = wire.body_of(frame, HEAD, LOOK_BYTES_MAX)
    try:
        found: Look | Follow = _asked.decode(body)
    except _ERRORS as error:
        raise WireError(f"not a word of observers: {error}") from error
    return found


def decode_followed(frame: bytes) -> Followed:
    """Raises WireError and nothing else, whatever the bytes."""
    body = wire.body_of(frame, HEAD, ANSWER_BYTES_MAX)
    try:
        return _followed.decode(body)
    except _ERRORS as error:
        raise WireError(f"no answer for a follower: {error}") from error


def encode_parts(parts: Parts) -> bytes:
    return _encoder.encode(parts)


def decode_parts(data: bytes | memoryview) -> Parts:
    """Raises WireError and nothing else, whatever the bytes."""
    try:
        return _parts.decode(data)
    except _ERRORS as error:
        raise WireError(f"no layout of a rank: {error}") from error
