"""Events that machines are given and effects that they ask for. Plain values.

A machine decides and returns effects; the runtime performs them and reports back by events. Neither
machine nor effect holds a tensor: they name (member, fragment, seq) and (fragment, version), the
runtime keeps the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mend.consensus.records import Offer, Record, Snapshot
from mend.consensus.weights import WHOLE
from mend.coordination.messages import Message
from mend.types import Address, Member, Peer

# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Heard:
    """A message arrived."""

    peer: Peer
    incarnation: int
    body: Message


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline passed (or nothing did; ticks are always harmless)."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The training thread copied a fragment; the offer `seq` is open from here on."""

    fragment: int
    seq: int
    base: int
    step: int
    tokens: int
    steps: int
    closing: bool = False
    """The script has ended: the last offer of the fragment."""


@dataclass(frozen=True, slots=True)
class StillOpen:
    """A capture step passed while the fragment's previous offer was open: nothing was captured."""

    fragment: int
    applied: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """The payload of an own offer is ready and served; a reason instead when there can be none."""

    fragment: int
    seq: int
    checksum: str
    declined: str = ""
    norm: float = 0.0
    """Greatest magnitude of this rank's part."""
    size: int = 0
    """Bytes of the payload; 0: as many as the codec makes of every vector of this length."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A pull of an offer ended; `error` is empty when all bytes are here and verified."""

    member: Member
    fragment: int
    seq: int
    error: str = ""
    size: int = 0
    """Bytes of it; 0: nothing was pulled."""


@dataclass(frozen=True, slots=True)
class SliceFetched:
    """A pull of a slice ended: of a member's payload (`seq`), or merged, of its owner's (0)."""

    fragment: int
    version: int
    attempt: int
    rack: int
    seq: int
    error: str = ""
    size: int = 0
    """Bytes of it."""


@dataclass(frozen=True, slots=True)
class SliceMerged:
    """One more of the own slices of an attempt is merged and served, or there is an error."""

    fragment: int
    version: int
    attempt: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """The sums over this rank's part are there, as bytes for the leader, or an error."""

    fragment: int
    version: int
    attempt: int
    blob: bytes
    error: str = ""


@dataclass(frozen=True, slots=True)
class Summed:
    """The partials of all ranks came to this, or to an error."""

    fragment: int
    version: int
    attempt: int
    blob: bytes
    error: str = ""


@dataclass(frozen=True, slots=True)
class Merged:
    """A merge ended in a tentative anchor of this digest, or in an error."""

    fragment: int
    version: int
    attempt: int
    digest: str
    error: str = ""
    tensors: bytes = b""
    """xxh3_64 of this rank's part of every tensor of it, where a tape is kept: which one differs,
    should a replay find another digest."""
    bad: tuple[tuple[Member, int], ...] = ()
    """With an error: the offers (member, seq) that must not be merged, though their bytes are those
    that were sent."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A pull of a fragment's state ended; its digest was compared with the log's."""

    fragment: int
    version: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Wanting:
    """The rack joins and waits for a donor's training state; not `on`: it waits no more."""

    on: bool


@dataclass(frozen=True, slots=True)
class StateTaken:
    """A donor's rank has copied its training state behind `step`, for a rack that joins, and serves
    it; or it cannot, for the reason that `refused` is."""

    to: Member
    step: int
    size: int
    digest: str
    refused: str = ""


@dataclass(frozen=True, slots=True)
class StateCopied:
    """A pull of a donor's training state ended; its digest was compared with what the donor
    said."""

    donor: Member
    step: int
    digest: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class RackStateLoaded:
    """The rank goes on with what a former life of it had registered with scope rack when it
    captured behind `step`. For the tape: no machine acts on it."""

    owner: Member
    step: int
    digest: str


@dataclass(frozen=True, slots=True)
class Spoiled:
    """The bytes of a held version are not what they were."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class Applied:
    """The training thread now trains on `version`; `ended`: the own offer this resolved, or 0."""

    fragment: int
    version: int
    ended: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class Discarded:
    """All ranks of the rack forgot an own offer that was never announced."""

    fragment: int
    seq: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """The training thread's step, and its time per step (moving average)."""

    step: int
    step_ns: int


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps up to `step` took `ns` in all, without mend's own waits and work, for `tokens`."""

    step: int
    ns: int
    tokens: int
    batch: int = 0
    """Micro-batches of which the script has asked how many to take, in the last step that did."""


@dataclass(frozen=True, slots=True)
class Started:
    """The rank has made its first step, so long after its process was started. 0: that is of no
    account, as it has been evicted and could not leave."""

    ns: int


@dataclass(frozen=True, slots=True)
class BatchSet:
    """From the step behind `step` on the rank takes so many percent of its micro-batches."""

    step: int
    batch_pct: int


@dataclass(frozen=True, slots=True)
class Validated:
    """The training thread has made a micro-benchmark behind `step`."""

    number: int
    step: int
    gemm_ns: int
    """Of one matrix product; 0: it could not be made."""
    waited_ppm: int
    """Share of the step time before the first forward of a step, in millionths; -1: not known."""


@dataclass(frozen=True, slots=True)
class Probed:
    """A pull that was made to see how fast a link is has ended."""

    number: int
    rack: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Leaving:
    """The rank trains no more. `now`: do not wait for the others to finish."""

    now: bool = False


@dataclass(frozen=True, slots=True)
class Idle:
    """Leaving, and the training thread has nothing open and trains on `versions`."""

    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cutting:
    """The rank waits in a checkpoint of this name, or has written its part; empty: no more."""

    name: str
    written: bool = False


Event = (
    Heard
    | Tick
    | Captured
    | StillOpen
    | Encoded
    | Fetched
    | SliceFetched
    | SliceMerged
    | Measured
    | Summed
    | Merged
    | Copied
    | Wanting
    | StateTaken
    | StateCopied
    | RackStateLoaded
    | Spoiled
    | Applied
    | Discarded
    | Progress
    | Timed
    | Started
    | BatchSet
    | Validated
    | Probed
    | Leaving
    | Idle
    | Cutting
)

# ------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class Send:
    """Deliver at best once; the machine repeats what matters."""

    to: Peer
    body: Message


@dataclass(frozen=True, slots=True)
class Connect:
    peer: Peer
    address: str


@dataclass(frozen=True, slots=True)
class Encode:
    """Turn the captured snapshot into delta and payload, and serve it."""

    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Pull this rank's part of an offer."""

    offer: Offer
    holders: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge the payloads of `members` (ascending) onto version - 1.

    `verify`: check the inputs' bits first. `total`: of the rack's sums; empty where none are
    needed.
    """

    fragment: int
    version: int
    attempt: int
    members: tuple[tuple[Member, int], ...]
    weights: tuple[float, ...]
    verify: bool
    total: bytes = b""
    part: int = WHOLE
    """How much of a round it is, of `weights.WHOLE`."""
    stretch: float = 1.0
    """Of its step, as `weights.stretch_of`."""
    closing: bool = False
    """Whether all that it merges are last offers."""
    sharded: bool = False
    """Of the merged slices of this attempt, not of payloads."""


@dataclass(frozen=True, slots=True)
class FetchSlice:
    """Pull slice `position` of `count`: of this rank's part of an offer (`member`, `seq`), or with
    `seq` 0 the merged one, from its owner `member`."""

    fragment: int
    version: int
    attempt: int
    position: int
    count: int
    member: Member
    seq: int
    holders: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class MergeSlice:
    """Merge slice `position` of `count` of the payloads of `members` (ascending), and serve it. One
    member's payload is this rank's own."""

    fragment: int
    version: int
    attempt: int
    position: int
    count: int
    members: tuple[tuple[Member, int], ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FreeSlices:
    """The slices of an attempt that nobody needs any more."""

    fragment: int
    version: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Measure:
    """Make the sums over this rank's part of the payloads that this merge needs."""

    fragment: int
    version: int
    attempt: int
    members: tuple[tuple[Member, int], ...]
    weights: tuple[float, ...]
    verify: bool


@dataclass(frozen=True, slots=True)
class Sum:
    """For a leader: make one total of the partials of all its ranks, in rank order."""

    fragment: int
    version: int
    attempt: int
    partials: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Pull the state of a fragment at the version and digest of the log."""

    fragment: int
    version: int
    digest: str
    holders: tuple[Address, ...]
    rounds: int = 0
    """That the fragment has merged by then, in parts of `weights.WHOLE`."""


@dataclass(frozen=True, slots=True)
class CopyState:
    """Pull this rank's part of what a donor has copied of its training state."""

    donor: Member
    step: int
    size: int
    digest: str
    holder: Address
    shared: bool = False
    """All ranks of the rack get the same bytes: the first pulls them, for all."""


@dataclass(frozen=True, slots=True)
class NoState:
    """There will be no copy of a donor's training state."""

    reason: str


@dataclass(frozen=True, slots=True)
class AskedState:
    """These racks join, and wait for a copy of this rank's training state."""

    racks: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class FreeState:
    """The rack that joins needs the copy no more."""

    to: Member


@dataclass(frozen=True, slots=True)
class Validate:
    """Make a micro-benchmark at the end of a step, after `steps` steps over which the wait before
    the forward is measured."""

    number: int
    steps: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Pull some bytes of no meaning from this rack, to see how fast the link is."""

    number: int
    rack: int
    holder: Address


@dataclass(frozen=True, slots=True)
class PublishAnchor:
    """The rank holds this decided version: serve it and show it to the training thread."""

    fragment: int
    version: int
    attempt: int
    """The tentative result that became it; 0 = it came by Copy (or is the own version 0)."""


@dataclass(frozen=True, slots=True)
class RecordCommitted:
    """A record is decided: the training thread reads its offers' fate from it."""

    record: Record
    rounds: int = 0
    """Of a commit: how many its fragment has merged before, in parts of `weights.WHOLE`."""
    part: int = 0
    """Of a commit: how much of a round it is."""


@dataclass(frozen=True, slots=True)
class Restored:
    """All that is decided up to a record, in place of the records: these will not be told."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Free:
    """A payload nobody needs any more."""

    member: Member
    fragment: int
    seq: int


@dataclass(frozen=True, slots=True)
class DropAnchor:
    """An anchor (or a tentative one: attempt > 0) nobody needs any more."""

    fragment: int
    version: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class DropOffer:
    """An own offer died; the training threads drop it at one apply point.

    `bad`: the log says that it was not fit to be merged, and why; else empty.
    """

    fragment: int
    seq: int
    bad: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """Something for the recorder and for people."""

    kind: str
    fields: dict[str, object]


@dataclass(frozen=True, slots=True)
class Fail:
    """This rack cannot go on. kind names the exception of mend.errors."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The machine has nothing more to do; its process may stop."""


Effect = (
    Send
    | Connect
    | Encode
    | Fetch
    | FetchSlice
    | Merge
    | MergeSlice
    | FreeSlices
    | Measure
    | Sum
    | Copy
    | CopyState
    | NoState
    | AskedState
    | FreeState
    | Validate
    | Probe
    | PublishAnchor
    | RecordCommitted
    | Restored
    | Free
    | DropAnchor
    | DropOffer
    | Note
    | Fail
    | Finished
)


class Machine(Protocol):
    """A pure part of the protocol: state in, effects out; time is an argument."""

    def handle(self, event: Event, now_ns: int) -> list[Effect]: ...

    def deadline_ns(self) -> int | None:
        """When a Tick is due at the latest."""
