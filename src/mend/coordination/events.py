"""Events that machines are given and effects that they ask for. Plain values.

A machine decides and returns effects; the runtime performs them and reports back by events. Neither
machine nor effect holds a tensor: they name (member, fragment, seq) and (fragment, version), the
runtime keeps the bytes.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from mend.consensus.records import Offer, Record, Snapshot
from mend.consensus.weights import WHOLE
from mend.coordination.messages import Message, OfAttempt, Pulled
from mend.events.lines import AnyEvent
from mend.types import Address, Member, Peer


class Event(Struct, frozen=True):
    """Base of everything that happens to a machine. A tape names events by their classes."""


class Effect(Struct, frozen=True):
    """Base of everything that a machine asks its process to do."""


# ------------------------------------------------------------------ events


class Heard(Event, frozen=True):
    """A message arrived."""

    peer: Peer
    incarnation: int
    body: Message


class Tick(Event, frozen=True):
    """The deadline passed (or nothing did; ticks are always harmless)."""


class Captured(Event, frozen=True):
    """The training thread copied a fragment; the offer `seq` is open from here on."""

    fragment: int
    seq: int
    base: int
    step: int
    tokens: int
    steps: int
    closing: bool = False
    """The script has ended: the last offer of the fragment."""


class StillOpen(Event, frozen=True):
    """A capture step passed while the fragment's previous offer was open: nothing was captured."""

    fragment: int
    applied: int


class Encoded(Event, frozen=True):
    """The payload of an own offer is ready and served; a reason instead when there can be none."""

    fragment: int
    seq: int
    checksum: str
    declined: str = ""
    norm: float = 0.0
    """Greatest magnitude of this rank's part."""
    size: int = 0
    """Bytes of the payload; 0: as many as the codec makes of every vector of this length."""


class Fetched(Event, frozen=True):
    """A pull of an offer ended; `error` is empty when all bytes are here and verified."""

    member: Member
    fragment: int
    seq: int
    error: str = ""
    size: int = 0
    """Bytes that came since the pull was asked for; 0: none."""


class SliceFetched(OfAttempt, Event, frozen=True):
    """A pull of a slice ended: of a member's payload (`seq`), or merged, of its owner's (0)."""

    rack: int
    seq: int
    error: str = ""
    size: int = 0
    """Bytes of it."""


class SliceMerged(OfAttempt, Event, frozen=True):
    """One more of the own slices of an attempt is merged and served, or there is an error."""

    error: str = ""


class Measured(OfAttempt, Event, frozen=True):
    """The sums over this rank's part are there, as bytes for the leader, or an error."""

    blob: bytes
    error: str = ""


class Summed(OfAttempt, Event, frozen=True):
    """The partials of all ranks came to this, or to an error."""

    blob: bytes
    error: str = ""


class Merged(OfAttempt, Event, frozen=True):
    """A merge ended in a tentative anchor of this digest, or in an error."""

    digest: str
    error: str = ""
    tensors: bytes = b""
    """xxh3_64 of this rank's part of every tensor of it, where a tape is kept: which one differs,
    should a replay find another digest."""
    bad: tuple[tuple[Member, int], ...] = ()
    """With an error: the offers (member, seq) that must not be merged, though their bytes are those
    that were sent."""


class Copied(Event, frozen=True):
    """A pull of a fragment's state ended; its digest was compared with the log's."""

    fragment: int
    version: int
    error: str = ""


class Wanting(Event, frozen=True):
    """The rack joins and waits for a donor's training state; not `on`: it waits no more."""

    on: bool


class StateTaken(Event, frozen=True):
    """A donor's rank has copied its training state after `step`, for a rack that joins, and serves
    it; or it cannot, for the reason `refused`."""

    to: Member
    step: int
    size: int
    digest: str
    refused: str = ""


class StateCopied(Event, frozen=True):
    """A pull of a donor's training state ended; its digest was compared with the donor's."""

    donor: Member
    step: int
    digest: str
    error: str = ""


class RackStateLoaded(Event, frozen=True):
    """The rank goes on with what a former life of it had registered with scope rack when it
    captured after `step`. For the tape: no machine acts on it."""

    owner: Member
    step: int
    digest: str


class Moved(Event, frozen=True):
    """How far the pulls of this rank are, by the rack whose bytes they are."""

    pulls: tuple[Pulled, ...]


class Spoiled(Event, frozen=True):
    """The bytes of a held version are damaged."""

    fragment: int
    version: int


class Applied(Event, frozen=True):
    """The training thread now trains on `version`; `ended`: the own offer this resolved, or 0."""

    fragment: int
    version: int
    ended: int
    step: int = 0


class Discarded(Event, frozen=True):
    """All ranks of the rack forgot an own offer that was never announced."""

    fragment: int
    seq: int
    step: int = 0


class Progress(Event, frozen=True):
    """The training thread's step, and its time per step (moving average)."""

    step: int
    step_ns: int


class Timed(Event, frozen=True):
    """Steps up to `step` took `ns` in all, without mend's own waits and work, for `tokens`."""

    step: int
    ns: int
    tokens: int
    batch: int = 0
    """Micro-batches of which the script has asked how many to take, in the last step that did."""


class Started(Event, frozen=True):
    """The rank has made its first step, `ns` after its process was started. 0: not to be counted,
    as the rank was evicted and could not leave."""

    ns: int


class BatchSet(Event, frozen=True):
    """After `step` the rank takes so many percent of its micro-batches."""

    step: int
    batch_pct: int


class Validated(Event, frozen=True):
    """The training thread has made a micro-benchmark after `step`."""

    number: int
    step: int
    gemm_ns: int
    """Time of one matrix product; 0: it could not be made."""
    waited_ppm: int
    """Share of the step time before the first forward of a step, in millionths; -1: not known."""


class Probed(Event, frozen=True):
    """A pull that was made to see how fast a link is has ended."""

    number: int
    rack: int
    error: str = ""


class Leaving(Event, frozen=True):
    """The rank trains no more. `now`: do not wait for the others to finish."""

    now: bool = False


class Idle(Event, frozen=True):
    """Leaving, and the training thread has nothing open and trains on `versions`."""

    versions: tuple[int, ...]


class Cutting(Event, frozen=True):
    """The rank waits in a checkpoint of this name, or has written its part; empty: it waits no
    more."""

    name: str
    written: bool = False


# ------------------------------------------------------------------ effects


class Send(Effect, frozen=True):
    """Deliver at best once; the machine repeats what matters."""

    to: Peer
    body: Message


class Connect(Effect, frozen=True):
    peer: Peer
    address: str


class Encode(Effect, frozen=True):
    """Turn the captured snapshot into delta and payload, and serve it."""

    fragment: int
    seq: int


class Fetch(Effect, frozen=True):
    """Pull this rank's part of an offer."""

    offer: Offer
    holders: tuple[Address, ...]


class Merge(OfAttempt, Effect, frozen=True):
    """Merge the payloads of `members` (ascending) onto version - 1.

    `verify`: check the inputs' bits first. `total`: of the rack's sums; empty where none are
    needed.
    """

    members: tuple[tuple[Member, int], ...]
    weights: tuple[float, ...]
    verify: bool
    total: bytes = b""
    part: int = WHOLE
    """Part of a round that it is, of `weights.WHOLE`."""
    stretch: float = 1.0
    """Factor of its step, from `weights.stretch_of`."""
    closing: bool = False
    """Whether all merged offers are the last ones of their racks."""
    sharded: bool = False
    """Whether it merges the merged slices of this attempt, not payloads."""


class FetchSlice(OfAttempt, Effect, frozen=True):
    """Pull slice `position` of `count`: of this rank's part of an offer (`member`, `seq`), or with
    `seq` 0 the merged one, from its owner `member`."""

    position: int
    count: int
    member: Member
    seq: int
    holders: tuple[Address, ...]


class MergeSlice(OfAttempt, Effect, frozen=True):
    """Merge slice `position` of `count` of the payloads of `members` (ascending), and serve it. One
    member's payload is this rank's own."""

    position: int
    count: int
    members: tuple[tuple[Member, int], ...]
    weights: tuple[float, ...]


class FreeSlices(OfAttempt, Effect, frozen=True):
    """Free the slices of an attempt."""


class Measure(OfAttempt, Effect, frozen=True):
    """Compute the sums over this rank's part of the payloads that a merge needs."""

    members: tuple[tuple[Member, int], ...]
    weights: tuple[float, ...]
    verify: bool


class Sum(OfAttempt, Effect, frozen=True):
    """For a leader: add the partials of all its ranks, in rank order."""

    partials: tuple[bytes, ...]


class Copy(Effect, frozen=True):
    """Pull the state of a fragment at the version and digest of the log."""

    fragment: int
    version: int
    digest: str
    holders: tuple[Address, ...]
    rounds: int = 0
    """Rounds that the fragment has merged by then, in parts of `weights.WHOLE`."""


class CopyState(Effect, frozen=True):
    """Pull this rank's part of a donor's training state."""

    donor: Member
    step: int
    size: int
    digest: str
    holder: Address
    shared: bool = False
    """All ranks of the rack get the same bytes: the first pulls them, for all."""


class NoState(Effect, frozen=True):
    """There will be no copy of a donor's training state."""

    reason: str


class AskedState(Effect, frozen=True):
    """These racks join, and wait for a copy of this rank's training state."""

    racks: tuple[Member, ...]


class FreeState(Effect, frozen=True):
    """Free the copy for a rack that joins."""

    to: Member


class Validate(Effect, frozen=True):
    """Make a micro-benchmark at the end of a step, after `steps` steps over which the wait before
    the forward is measured."""

    number: int
    steps: int


class Probe(Effect, frozen=True):
    """Pull probe bytes from this rack, to measure the link."""

    number: int
    rack: int
    holder: Address


class PublishAnchor(OfAttempt, Effect, frozen=True):
    """The rank holds this decided version: serve it and show it to the training thread. `attempt`:
    the tentative result that became it; 0: it came by Copy, or is the own version 0."""


class RecordCommitted(Effect, frozen=True):
    """A record is decided: the training thread reads its offers' fate from it."""

    record: Record
    rounds: int = 0
    """For a commit: rounds that its fragment has merged before, in parts of `weights.WHOLE`."""
    part: int = 0
    """For a commit: the part of a round that it is."""


class Restored(Effect, frozen=True):
    """The decided state up to a record, in place of the records, which will not come."""

    snapshot: Snapshot


class Free(Effect, frozen=True):
    """Free a payload."""

    member: Member
    fragment: int
    seq: int


class DropAnchor(Effect, frozen=True):
    """Free an anchor, or with attempt > 0 a tentative one."""

    fragment: int
    version: int
    attempt: int = 0


class DropOffer(Effect, frozen=True):
    """An own offer will not be merged; the training threads drop it at one apply point.

    `bad`: why the log refuses to merge it; empty: for no fault of its own.
    """

    fragment: int
    seq: int
    bad: str = ""


class Note(Effect, frozen=True):
    """An event for the events file and the log."""

    event: AnyEvent


class Fail(Effect, frozen=True):
    """This rack cannot go on. `kind` names an exception of mend.errors."""

    kind: str
    detail: str


class Finished(Effect, frozen=True):
    """The machine has nothing more to do; its process may stop. `reason`: how this rack lost its
    seat, where its log does not say."""

    reason: str = ""


class Machine(Protocol):
    """A pure part of the protocol: state in, effects out; time is an argument."""

    def handle(self, event: Event, now_ns: int) -> list[Effect]: ...

    def deadline_ns(self) -> int | None:
        """When a Tick is due at the latest."""
