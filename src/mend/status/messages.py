"""Status messages: what a client asks a process, and the answer. No machine of the job reads them.

    client --Look--> leader or witness --JobStatus--> client

Frames of their own, with a magic and a version of their own: they are told apart before anything is
decoded, so that they reach no machine and no tape. A `JobStatus` is a whole, current state, as
every message is: of the asked process and, as far as it knows them, of the others. It has a limit
that does not grow with the job; what does not fit is counted.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from mend.consensus.records import U16, Count, Racks, WireStruct
from mend.coordination import wire
from mend.coordination.messages import FailSlow
from mend.errors import WireError

VERSION = 3
HEAD = b"mno" + bytes([VERSION])
"""First bytes of the frames to and from status clients."""

LOOK_BYTES_MAX = 256
VIEW_BYTES_MAX = 256 << 10
SHOWN_MAX = 64
"""Most ranks, rounds in flight and versions in a JobStatus."""

TEXT_BYTES_MAX = 240

_UNPRINTED = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
"""Characters that move the cursor or change the direction of a line."""

Short = Annotated[str, Meta(max_length=TEXT_BYTES_MAX, pattern=rf"^[^{_UNPRINTED}]*\Z")]
JobName = Annotated[str, Meta(max_length=64, pattern=rf"^[^{_UNPRINTED}]*\Z")]
Known = Annotated[int, Meta(ge=-1, le=2**62)]
"""-1: the asked process does not know."""


class Look(WireStruct, frozen=True, tag=1):
    """`job`: the one that is asked for; empty: whichever it is."""

    job: JobName


class RankSeen(WireStruct, frozen=True):
    """A rank of the asked rack, as it last told its leader."""

    rank: U16
    step: Count
    step_ns: Count
    silent_ms: Count


class RackSeen(WireStruct, frozen=True):
    """A rack, as the asked process knows it."""

    rack: U16
    address: Short
    """Address of its leader; empty: not known yet."""
    live: bool
    newcomer: bool
    """It has no vote yet: it still copies what is decided."""
    leaving: bool
    step: Known
    step_ns: Count
    """Per step without mend's own waits, slowest rank, moving average; 0: not known."""
    behind: Known
    """Decided versions that it does not hold yet, over all fragments."""
    silent_ms: Known
    life: Count = 0
    """`types.life_of` it: tells lives apart without letting others forge their messages."""


class RoundSeen(WireStruct, frozen=True):
    """A round in flight: the one that makes `version` of `fragment`."""

    fragment: U16
    version: Count
    phase: Literal["open", "merging", "offered"]
    """open: offers arrive; merging: its members are fixed, results are awaited; offered: there is
    an offer, and no rack that trains on the version before has made one."""
    racks: Racks
    """Members, or whose offers are there."""
    for_ms: Known
    why: Short
    """Why it does not go on; empty: no reason known."""


class RefusedRack(WireStruct, frozen=True):
    """A rack that may not begin with the others, and why, in a sentence."""

    rack: U16
    why: Short


class Doings(WireStruct, frozen=True):
    """The state of a rack's own training, as its leader knows it. `recent`: of the last seconds."""

    ranks: U16
    shown: Annotated[tuple[RankSeen, ...], Meta(max_length=SHOWN_MAX)]
    step: Count
    tokens: Count
    """Tokens of the leader's rank alone."""
    step_age_ms: Count
    """Since the last step ended."""
    stall_us: Count
    bytes_sent: Count
    bytes_received: Count
    recent_steps: Count
    recent_tokens: Count
    recent_step_ns: Count
    """Time in which those steps were made."""
    recent_ns: Count
    """Time in which the recent stall and bytes were counted."""
    recent_stall_us: Count
    recent_sent: Count
    recent_received: Count
    missed: Count
    """How often its work was not in the round that it was meant for."""
    closed_by: Short
    """Why the newest committed round did not wait longer."""
    host_bytes: Count
    recorded: Annotated[tuple[tuple[Short, float], ...], Meta(max_length=8)]
    """The newest values that the script gave to `record`."""
    turnout: Short = ""
    """How many of the live racks its recent rounds merged, in words."""


class JobStatus(WireStruct, frozen=True, tag=2):
    """The state of a job, as one of its processes knows it."""

    job: JobName
    mend: Short
    rack: U16
    life: Count
    state: Literal["starting", "running", "leaving", "ended"]
    """ended: this process stops now."""
    detail: Short
    """Reason for its wait at the start, or for its end."""
    over: bool
    """The log says that all racks have left."""
    coordinator: U16
    """The rack that it follows."""
    coordinates: bool
    ballot: Count
    decided: Count
    """Records of the log."""
    commits: Count
    """Committed rounds, over all fragments."""
    configured: U16
    fragments: U16
    period_steps: Count
    overlap_steps: Count
    merge_min_racks: Count
    lockstep: bool
    versions: Annotated[tuple[Count, ...], Meta(max_length=SHOWN_MAX)]
    """Decided, per fragment."""
    racks: Annotated[tuple[RackSeen, ...], Meta(max_length=SHOWN_MAX)]
    missing: Racks
    """Racks that the start still waits for."""
    in_flight: Count
    rounds: Annotated[tuple[RoundSeen, ...], Meta(max_length=SHOWN_MAX)]
    why: Annotated[tuple[Short, ...], Meta(max_length=16)]
    """Why nothing commits, where that is not the matter of one round."""
    doings: Doings | None
    """None: the witness."""
    retired: Racks = ()
    """Racks of which a person has said, to the asked process, that they will not come back."""
    slow: Annotated[tuple[FailSlow, ...], Meta(max_length=128)] = ()
    """Verdicts in force, as the coordinator has said."""
    evicted: Racks = ()
    """Racks that were put out of the job as they were slow, and have not come back yet."""
    evicted_lives: Annotated[tuple[Count, ...], Meta(max_length=128)] = ()
    """Lives of the evicted racks, as in RackSeen."""
    refused: Annotated[tuple[RefusedRack, ...], Meta(max_length=16)] = ()
    """Racks that were refused and are still absent; `why` names them, too."""
    wall_ns: Count = 0
    """Time of day of the asked process, at most a tenth of a second ago."""


_encoder = msgspec.msgpack.Encoder()
_looks, _views = msgspec.msgpack.Decoder(Look), msgspec.msgpack.Decoder(JobStatus)

T = TypeVar("T")


def encode_look(look: Look) -> bytes:
    return wire.framed(_encoder.encode(look), HEAD)


def encode_view(view: JobStatus) -> bytes:
    """Encode a status. Raises WireError for a frame over the limit."""
    frame = wire.framed(_encoder.encode(view), HEAD)
    if len(frame) > VIEW_BYTES_MAX:
        raise WireError(f"a view of {len(frame)} bytes exceeds the limit of {VIEW_BYTES_MAX}")
    return frame


def decode_look(frame: bytes) -> Look:
    """Decode a look. Raises WireError and nothing else, whatever the bytes."""
    return _decoded(_looks, frame, LOOK_BYTES_MAX)


def decode_view(frame: bytes) -> JobStatus:
    """Decode a status. Raises WireError and nothing else, whatever the bytes."""
    return _decoded(_views, frame, VIEW_BYTES_MAX)


def _decoded(decoder: msgspec.msgpack.Decoder[T], frame: bytes, bytes_max: int) -> T:
    body = wire.body_of(frame, HEAD, bytes_max)
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError, OverflowError) as error:
        raise WireError(f"not a word of observers: {error}") from error


def short(text: str) -> str:
    """`text` as far as it fits, as UTF-8 can spell it, and as it can be printed in a line."""
    spelt = re.sub(f"[{_UNPRINTED}]", " ", text).encode(errors="replace")
    if len(spelt) <= TEXT_BYTES_MAX:
        return spelt.decode()
    return spelt[: TEXT_BYTES_MAX - 3].decode(errors="ignore") + "..."
