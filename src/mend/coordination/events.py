"""Events, the inputs of the machines, and effects, their outputs. Plain values.

A machine decides and returns effects; the runtime performs them and reports back through events.
Neither machines nor effects hold tensors: they name (member, fragment, seq) and (fragment,
version), and the runtime keeps the bytes.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from mend.consensus.records import Offer, Record, Snapshot, Units
from mend.consensus.weights import WHOLE
from mend.coordination.messages import Message, OfAttempt, Pulled
from mend.events.lines import AnyEvent
from mend.types import Address, Member, Peer


class Event(Struct, frozen=True):
    """Base of all inputs of a machine. A tape names events by their classes."""


class Effect(Struct, frozen=True):
    """Base of all requests of a machine to its process. A rank performs each."""


class CommonEffect(Effect, frozen=True):
    """Base of those that the witness performs too (`Witness._handlers`). A coordinator and a
    `WitnessFollower` return no others."""


# ------------------------------------------------------------------ events


class Heard(Event, frozen=True):
    """A message arrived."""

    peer: Peer
    incarnation: int
    body: Message


class Tick(Event, frozen=True):
    """The deadline has passed. A tick without a deadline is harmless."""


class Captured(Event, frozen=True):
    """The training thread has copied a fragment. The offer `seq` is open from here on."""

    fragment: int
    seq: int
    base: int
    step: int
    tokens: int
    steps: int
    closing: bool = False
    """Whether the script has ended and this is the last offer of the fragment."""
    units: int = 0
    """Units of data whose work it contains, with those of earlier captures."""


class StillOpen(Event, frozen=True):
    """A capture step passed while the fragment's previous offer was open: nothing was captured."""

    fragment: int
    applied: int


class Encoded(Event, frozen=True):
    """The payload of an own offer is ready and served, or the offer is `declined` for a reason."""

    fragment: int
    seq: int
    checksum: str
    declined: str = ""
    norm: float = 0.0
    """Greatest magnitude of this rank's part."""
    size: int = 0
    """Bytes of the payload; 0: the codec's fixed size for this length."""
    along: int = 0
    """Elements of this rank's part that have the sign of the outer momentum of the offer's base."""
    against: int = 0
    """Elements that have the other sign."""


class Fetched(Event, frozen=True):
    """A pull of an offer has ended. `error` is empty if all bytes are here and verified."""

    member: Member
    fragment: int
    seq: int
    error: str = ""
    size: int = 0
    """Bytes that arrived since the pull was requested; 0: none."""


class SliceFetched(OfAttempt, Event, frozen=True):
    """A pull of a slice has ended: of a member's payload (`seq`), or of the merged slice of its
    owner (`seq` 0)."""

    rack: int
    seq: int
    error: str = ""
    size: int = 0
    """Bytes pulled."""


class SliceMerged(OfAttempt, Event, frozen=True):
    """One more of the own slices of an attempt is merged and served, or merging it has failed."""

    error: str = ""


class Measured(OfAttempt, Event, frozen=True):
    """The sums over this rank's part are ready, as bytes for the leader, or computing them has
    failed."""

    blob: bytes
    error: str = ""


class Summed(OfAttempt, Event, frozen=True):
    """The total of the partial sums of all ranks is ready, or computing it has failed."""

    blob: bytes
    error: str = ""


class Merged(OfAttempt, Event, frozen=True):
    """A merge has produced a tentative anchor with this digest, or has failed."""

    digest: str
    error: str = ""
    tensors: bytes = b""
    """If a tape is kept: xxh3_64 of this rank's part of every tensor, so that a replay with another
    digest can name the tensor that differs."""
    bad: tuple[tuple[Member, int], ...] = ()
    """With an error: the offers (member, seq) that must not be merged, although their bytes arrived
    intact."""


class Copied(Event, frozen=True):
    """A pull of a fragment's state has ended; its digest was compared with the log's."""

    fragment: int
    version: int
    error: str = ""


class Wanting(Event, frozen=True):
    """The rack joins and waits for a donor's training state. `on` false: it no longer waits."""

    on: bool


class StateTaken(Event, frozen=True):
    """A donor's rank has copied its training state after `step` for a joining rack and serves it,
    or cannot, for the reason `refused`."""

    to: Member
    step: int
    size: int
    digest: str
    refused: str = ""


class StateCopied(Event, frozen=True):
    """A pull of a donor's training state has ended; its digest was compared with the donor's."""

    donor: Member
    step: int
    digest: str
    error: str = ""


class RackStateLoaded(Event, frozen=True):
    """The rank continues with the objects of scope rack that a former life of its rack had
    registered when it captured after `step`. Recorded for the tape; no machine handles it."""

    owner: Member
    step: int
    digest: str


class Moved(Event, frozen=True):
    """Progress of the pulls of this rank, by source rack."""

    pulls: tuple[Pulled, ...]


class Spoiled(Event, frozen=True):
    """The bytes of a held version failed their checksum."""

    fragment: int
    version: int


class Applied(Event, frozen=True):
    """The training thread now trains on `version`. `ended`: the own offer that this resolved, or
    0."""

    fragment: int
    version: int
    ended: int
    step: int = 0


class Discarded(Event, frozen=True):
    """All ranks of the rack have discarded an own offer that was never announced."""

    fragment: int
    seq: int
    step: int = 0


class StepReached(Event, frozen=True):
    """The training thread has reached `step`. `step_ns`: time per step (moving average)."""

    step: int
    step_ns: int


class Timed(Event, frozen=True):
    """The steps up to `step` took `ns` in total for `tokens`, without mend's own waits and work."""

    step: int
    ns: int
    tokens: int
    batch: int = 0
    """Micro-batches per step for which the script has asked how many to take, in the last step in
    which it did."""


class Started(Event, frozen=True):
    """The rank has completed its first step, `ns` after the start of its process. 0: not counted,
    because the rank was evicted and could not leave."""

    ns: int


class BatchSet(Event, frozen=True):
    """After `step` the rank takes `batch_pct` percent of its micro-batches."""

    step: int
    batch_pct: int


class Validated(Event, frozen=True):
    """The training thread has run a micro-benchmark after `step`."""

    number: int
    step: int
    gemm_ns: int
    """Time of one matrix product; 0: it could not be measured."""
    waited_ppm: int
    """Fraction of the step time before the first forward, in millionths; -1: unknown."""


class Probed(Event, frozen=True):
    """A probe of a link has ended."""

    number: int
    rack: int
    error: str = ""


class Leaving(Event, frozen=True):
    """The rank has stopped training. `now`: it does not wait for the others to finish."""

    now: bool = False


class Idle(Event, frozen=True):
    """The leaving rank has no open offer and its training thread is at `versions`."""

    versions: tuple[int, ...]


class UnitsAsked(Event, frozen=True):
    """The training thread asks for units of data: see `UnitsAsk`."""

    given: int
    size: int
    empty: bool


class BarrierChanged(Event, frozen=True):
    """The rank waits at the barrier of the checkpoint `name`, or has `written` its part. Empty: it
    no longer waits."""

    name: str
    written: bool = False


# ------------------------------------------------------------------ effects


class Send(CommonEffect, frozen=True):
    """Deliver at most once. The machine repeats whatever matters."""

    to: Peer
    body: Message


class Connect(CommonEffect, frozen=True):
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

    `verify`: check the checksums of the inputs first. `total`: the total of the rack's sums; empty
    if none is needed.
    """

    members: tuple[tuple[Member, int], ...]
    weights: tuple[float, ...]
    verify: bool
    total: bytes = b""
    part: int = WHOLE
    """Part of a round that this merge counts as, in units of 1 / `weights.WHOLE`."""
    stretch: float = 1.0
    """Factor of the outer step, from `weights.stretch_of`."""
    closing: bool = False
    """Whether every merged offer is the last one of its rack."""
    waits: bool = False
    """Whether the step is made without momentum, against which the offers point."""
    sharded: bool = False
    """Whether to assemble the merged slices of this attempt instead of merging payloads."""


class FetchSlice(OfAttempt, Effect, frozen=True):
    """Pull slice `position` of `count`: of this rank's part of an offer (`member`, `seq`), or, with
    `seq` 0, the merged slice from its owner `member`."""

    position: int
    count: int
    member: Member
    seq: int
    holders: tuple[Address, ...]


class MergeSlice(OfAttempt, Effect, frozen=True):
    """Merge slice `position` of `count` of the payloads of `members` (ascending) and serve it. One
    of the payloads is this rank's own."""

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
    """For a leader: add the partial sums of all its ranks, in rank order."""

    partials: tuple[bytes, ...]


class Copy(Effect, frozen=True):
    """Pull the state of a fragment at the version and digest that the log names."""

    fragment: int
    version: int
    digest: str
    holders: tuple[Address, ...]
    rounds: int = 0
    """Rounds merged up to that version, in units of 1 / `weights.WHOLE`."""


class CopyState(Effect, frozen=True):
    """Pull this rank's part of a donor's training state."""

    donor: Member
    step: int
    size: int
    digest: str
    holder: Address
    shared: bool = False
    """Whether all ranks of the rack get the same bytes. Then the first rank pulls them for all."""


class NoState(Effect, frozen=True):
    """No copy of a donor's training state will come. `step`: the one to go on from without it; 0:
    none."""

    reason: str
    step: int = 0


class AskedState(Effect, frozen=True):
    """These racks join and wait for a copy of this rank's training state."""

    racks: tuple[Member, ...]


class FreeState(Effect, frozen=True):
    """Free the copy for a joining rack."""

    to: Member


class Validate(Effect, frozen=True):
    """Run a micro-benchmark at the end of a step, after `steps` steps over which the wait before
    the forward is measured."""

    number: int
    steps: int


class Probe(Effect, frozen=True):
    """Pull probe bytes from this rack, to measure the link."""

    number: int
    rack: int
    holder: Address


class PublishAnchor(OfAttempt, Effect, frozen=True):
    """The rank holds this decided version: serve it and publish it to the training thread.
    `attempt`: the tentative result that became the version; 0: it was copied, or is the own version
    0."""


class RecordCommitted(Effect, frozen=True):
    """A record is decided. The training thread reads the fate of its offers from it."""

    record: Record
    rounds: int = 0
    """For a commit: rounds that its fragment merged before, in units of 1 / `weights.WHOLE`."""
    part: int = 0
    """For a commit: the part of a round that it counts as."""


class UnitsChanged(Effect, frozen=True):
    """The units of data after the newest record."""

    units: Units


class Restored(Effect, frozen=True):
    """The decided state up to a record, replacing the records, which will not come."""

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

    `bad`: why the log refuses to merge it; empty: the offer itself is not at fault.
    """

    fragment: int
    seq: int
    bad: str = ""


class Note(CommonEffect, frozen=True):
    """An event for the events file and the log."""

    event: AnyEvent


class Fail(Effect, frozen=True):
    """This rack cannot go on. `kind`: as in coordination/failures.py."""

    kind: str
    detail: str


class Finished(CommonEffect, frozen=True):
    """The machine is done; its process may stop. `reason`: how this rack lost its seat, if its log
    does not show it."""

    reason: str = ""


class Machine(Protocol):
    """A pure state machine of the protocol: events in, effects out; time is an argument."""

    def handle(self, event: Event, now_ns: int) -> list[Effect]: ...

    def deadline_ns(self) -> int | None:
        """When a Tick is due at the latest."""
