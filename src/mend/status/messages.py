"""The messages of status clients: a question to a process, and its answer. No machine of the job
reads them.

    client --Look--> leader or witness --JobStatus--> client

The frames have their own magic and version, so they are recognized before anything is decoded and
reach neither a machine nor a tape. Like every message, a `JobStatus` is a whole, current state: of
the asked process and, as far as it knows them, of the others. Its size limit does not grow with the
job; what does not fit is only counted.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta
from msgspec.msgpack import Decoder

from mend.consensus.records import U16, Count, Racks, WireStruct
from mend.coordination import wire
from mend.coordination.messages import FailSlow
from mend.errors import WireError

T = TypeVar("T")

VERSION = 3
HEAD = b"mno" + bytes([VERSION])
"""First bytes of the frames to and from status clients."""

LOOK_BYTES_MAX = 256
VIEW_BYTES_MAX = 256 << 10
SHOWN_MAX = 64
"""Limit of the ranks, rounds in flight and versions in a JobStatus."""

TEXT_BYTES_MAX = 240

_UNPRINTED = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
"""Characters that move the cursor or change the direction of a line."""

Short = Annotated[str, Meta(max_length=TEXT_BYTES_MAX, pattern=rf"^[^{_UNPRINTED}]*\Z")]
JobName = Annotated[str, Meta(max_length=64, pattern=rf"^[^{_UNPRINTED}]*\Z")]
Known = Annotated[int, Meta(ge=-1, le=2**62)]
"""-1: the asked process does not know it."""


class Look(WireStruct, frozen=True, tag=1):
    """A client's request. `job`: the requested job; empty: any."""

    job: JobName


class RankSeen(WireStruct, frozen=True):
    """A rank of the asked rack, from its last report to its leader."""

    rank: U16
    step: Count
    step_ns: Count
    silent_ms: Count


class RackSeen(WireStruct, frozen=True):
    """A rack, as the asked process knows it."""

    rack: U16
    address: Short
    """Address of its leader; empty: unknown."""
    live: bool
    newcomer: bool
    """Whether it has no vote yet, because it still copies decided versions."""
    leaving: bool
    step: Known
    step_ns: Count
    """Time per step without mend's own waits, slowest rank, moving average; 0: unknown."""
    behind: Known
    """Decided versions that it does not hold yet, over all fragments."""
    silent_ms: Known
    life: Count = 0
    """`types.life_of` the member: distinguishes incarnations without letting others forge their
    messages."""


class RoundSeen(WireStruct, frozen=True):
    """A round in flight: the one that makes `version` of `fragment`."""

    fragment: U16
    version: Count
    phase: Literal["open", "merging", "offered"]
    """open: offers arrive; merging: its members are fixed, results are awaited; offered: there is
    an offer, and no rack that trains on the version before has made one."""
    racks: Racks
    """Its members, or the racks whose offers have arrived."""
    for_ms: Known
    why: Short
    """Why it does not advance; empty: no known reason."""


class RefusedRack(WireStruct, frozen=True):
    """A rack that may not begin with the others, and why, in a sentence."""

    rack: U16
    why: Short


class TrainingSeen(WireStruct, frozen=True):
    """The state of a rack's own training, as its leader knows it. `recent`: of the last seconds."""

    ranks: U16
    shown: Annotated[tuple[RankSeen, ...], Meta(max_length=SHOWN_MAX)]
    step: Count
    tokens: Count
    """Tokens of the leader's rank alone."""
    step_age_ms: Count
    """Time since the last step ended."""
    stall_us: Count
    bytes_sent: Count
    bytes_received: Count
    recent_steps: Count
    recent_tokens: Count
    recent_step_ns: Count
    """Duration of those steps."""
    recent_ns: Count
    """Time in which the recent stall and bytes were counted."""
    recent_stall_us: Count
    recent_sent: Count
    recent_received: Count
    missed: Count
    """Number of rounds that missed the work of this rack that was meant for them."""
    closed_by: Short
    """Why the newest committed round did not wait longer."""
    host_bytes: Count
    recorded: Annotated[tuple[tuple[Short, float], ...], Meta(max_length=8)]
    """The newest values that the script gave to `record`."""
    participation: Short = ""
    """How many of the live racks its recent rounds merged, as text."""


class DataSeen(WireStruct, frozen=True):
    """Rows of the data ledger, as `DataRows` has them. `epoch`: how much of the present one is
    done, as text."""

    done: Count
    open: Count
    left: Count
    given_again: Count
    epoch: Short = "one epoch"


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
    """Whether the log has ended because all racks have left."""
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
    """Why nothing commits, for reasons that concern more than one round."""
    training: TrainingSeen | None
    """None: the witness."""
    retired: Racks = ()
    """Racks that a person has retired through the asked process."""
    slow: Annotated[tuple[FailSlow, ...], Meta(max_length=128)] = ()
    """Verdicts in force, from the coordinator."""
    evicted: Racks = ()
    """Racks that were evicted because they were slow, and have not returned."""
    evicted_lives: Annotated[tuple[Count, ...], Meta(max_length=128)] = ()
    """`life` of the evicted racks, as in RackSeen."""
    refused: Annotated[tuple[RefusedRack, ...], Meta(max_length=16)] = ()
    """Racks that were refused and are still absent; `why` names them, too."""
    wall_ns: Count = 0
    """Time of day of the asked process, at most a tenth of a second ago."""
    data: DataSeen | None = None
    """None: the job has no data ledger."""


_encoder = msgspec.msgpack.Encoder()
_views = Decoder(JobStatus)


def encode_look(look: Look) -> bytes:
    return wire.framed(_encoder.encode(look), HEAD)


def encode_view(view: JobStatus) -> bytes:
    """Encode a status. Raises WireError if the frame exceeds the limit."""
    frame = wire.framed(_encoder.encode(view), HEAD)
    if len(frame) > VIEW_BYTES_MAX:
        raise WireError(f"a status of {len(frame)} bytes exceeds the limit of {VIEW_BYTES_MAX}")
    return frame


def decode_view(frame: bytes) -> JobStatus:
    """Decode a status. Raises WireError and nothing else, whatever the bytes."""
    body = wire.body_of(frame, HEAD, VIEW_BYTES_MAX)
    return decoded(_views, body, "a message of status clients")


def decoded(decoder: Decoder[T], body: bytes | memoryview, kind: str) -> T:
    """Decode a body; `kind` names what it should be. Raises WireError and nothing else."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError, OverflowError) as error:
        raise WireError(f"not {kind}: {error}") from error


def short(text: str) -> str:
    """`text`, cut to the limit, valid as UTF-8 and printable on one line."""
    spelt = re.sub(f"[{_UNPRINTED}]", " ", text).encode(errors="replace")
    if len(spelt) <= TEXT_BYTES_MAX:
        return spelt.decode()
    return spelt[: TEXT_BYTES_MAX - 3].decode(errors="ignore") + "..."
