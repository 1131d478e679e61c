"""The messages of followers of the merged model: a question, and the decided versions since the
last answer. No machine of the job reads them.

    follower --Follow--> leader or witness --Followed--> follower

They share magic and version with the status messages. They contain no incarnation of a member,
because with one the messages of a rack could be forged.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.msgpack import Decoder

from mend.consensus.records import U16, Count, Digests, Hex, Text, Versions, Where, WireStruct
from mend.coordination import wire
from mend.errors import WireError
from mend.status.messages import HEAD, LOOK_BYTES_MAX, JobName, Look, decoded
from mend.types import Address

ANSWER_BYTES_MAX = wire.FRAME_BYTES_MAX
LAYOUT_BYTES_MAX = 64 << 20

Shape = Annotated[tuple[Count, ...], Meta(max_length=64)]


class Follow(WireStruct, frozen=True, tag=3):
    """`lineage`, `index`: how far the follower has read the log; empty and 0: nothing yet."""

    job: JobName
    lineage: Hex = ""
    index: Count = 0


class CommitSeen(WireStruct, frozen=True):
    """A decided version of one fragment."""

    fragment: U16
    version: Count
    digests: Digests
    """By rank of a rack."""
    step: Count
    """The newest step at which a member captured."""
    tokens: Count
    """Tokens of the members' work in it."""


class RackLanes(WireStruct, frozen=True):
    """A rack with a seat: the address of its leader, and the lanes of its ranks."""

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
    """Whether this process knows the lineage of the question. If so, its own is that one or a newer
    one."""
    index: Count
    """The record up to which `commits` or `versions` go."""
    decided: Count
    over: bool
    racks: Annotated[tuple[RackLanes, ...], Meta(max_length=64)]
    step: Count
    """The newest captured step whose work is merged."""
    commits: Annotated[tuple[CommitSeen, ...], Meta(max_length=4096)] = ()
    """The commits after the index of the question."""
    versions: Versions = ()
    """Versions of all fragments at `index`; empty: `commits` has everything that is new."""
    digests: Annotated[tuple[Digests, ...], Meta(max_length=1024)] = ()
    """Digests of these versions, by fragment and rank."""


class Piece(WireStruct, frozen=True):
    """The elements of one tensor in a rank's part of a fragment: elements [start, stop), row-major,
    of the box of shape `box` at `at`."""

    name: Text
    dtype: Text
    shape: Shape
    """Shape of the whole tensor."""
    box: Shape
    at: Shape
    start: Count
    stop: Count


class Part(WireStruct, frozen=True):
    """The part of a fragment that a rank owns: its pieces, end to end. `moving`: whether they are
    running statistics, which are zero before their first average."""

    fragment: U16
    pieces: tuple[Piece, ...]
    moving: bool = False


class Parts(WireStruct, frozen=True):
    """The parts of one rank, for all fragments that belong to the model."""

    rank: U16
    ranks: U16
    parts: tuple[Part, ...]


_encoder = msgspec.msgpack.Encoder()
_asked: Decoder[Look | Follow] = Decoder(Look | Follow)
_followed = Decoder(Followed)
_parts = Decoder(Parts)


def encode_follow(follow: Follow) -> bytes:
    return wire.framed(_encoder.encode(follow), HEAD)


def encode_followed(followed: Followed) -> bytes:
    """Encode an answer. Raises WireError if the frame exceeds the limit."""
    frame = wire.framed(_encoder.encode(followed), HEAD)
    if len(frame) > ANSWER_BYTES_MAX:
        raise WireError(f"{len(frame)} bytes for a follower; the limit is {ANSWER_BYTES_MAX}")
    return frame


def decode_asked(frame: bytes) -> Look | Follow:
    """Decode the question of a client. Raises WireError and nothing else, whatever the bytes."""
    body = wire.body_of(frame, HEAD, LOOK_BYTES_MAX)
    return decoded(_asked, body, "a message of status clients")


def decode_followed(frame: bytes) -> Followed:
    """Raises WireError and nothing else, whatever the bytes."""
    body = wire.body_of(frame, HEAD, ANSWER_BYTES_MAX)
    return decoded(_followed, body, "an answer for a follower")


def encode_parts(parts: Parts) -> bytes:
    return _encoder.encode(parts)


def decode_parts(data: bytes | memoryview) -> Parts:
    """Raises WireError and nothing else, whatever the bytes."""
    return decoded(_parts, data, "a layout of a rank")
