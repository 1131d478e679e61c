"""The messages between processes.

Every message is a whole, current state, so losing one costs only time. Four of them drive the
rounds, and three let a rack in:

    rank --RankReport--> leader --Report--> coordinator    what I have, what I wait for
    rank <--RankOrders-- leader <--Orders-- coordinator    the log, open offers, rounds in flight
    leader --Hello--> coordinator --Refusal--> leader
    leader <--Challenge-- voter                             who has its seat; a hello answers

A person sends `Retire` for a rack that will not return.

Between two processes a state travels as a patch of one that the receiver has confirmed; see
`streams`. Votes are states as well: a candidate repeats `Prepare`, an acceptor answers with its
`AcceptorState`, which travels in its `Report`, or by itself in a `Vote`.

A sender repeats its newest state on every heartbeat and at once when it changes; a receiver keeps
the highest `serial`. Duplicated, reordered and lost frames need no further rule.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Raw, Struct

from mend.consensus.records import (
    BAD_MAX,
    U16,
    Absentees,
    AcceptorState,
    AtLeastOne,
    Blob,
    Count,
    Digests,
    Facts,
    Hex,
    Norm,
    Offer,
    Policy,
    Racks,
    Records,
    Rounds,
    Seat,
    Snapshot,
    Text,
    Units,
    Versions,
    Where,
    WireStruct,
)
from mend.types import BUFFERS_MAX, RACKS_MAX, Member

CauseName = Annotated[str, Meta(max_length=32)]
"""Name of a cause of the detector; any other is shown as unknown."""

LIVES_MAX = 8
"""Limit of the former incarnations that a hello names, newest last."""


class StateMessage(WireStruct, frozen=True):
    """Base of the messages that are a whole state, ordered by `serial`."""

    serial: Count


class OfAttempt(Struct, frozen=True):
    """Base of values that belong to one attempt to merge a version of a fragment. Newer attempts
    are greater."""

    fragment: U16
    version: Count
    attempt: Count

    @property
    def which(self) -> tuple[int, int]:
        """(version, attempt)"""
        return self.version, self.attempt

    @property
    def key(self) -> tuple[int, int, int]:
        """(fragment, version, attempt)"""
        return self.fragment, self.version, self.attempt


# ------------------------------------------------------------------ messages


class Resume(WireStruct, frozen=True):
    """What a rack has read from a checkpoint. All fields must be equal on all racks that have read
    one."""

    lineage: Hex
    number: Count
    """Number of the checkpoint, as in its `CheckpointRecord`."""
    racks: Racks
    """Racks that have written a part of it."""
    versions: Versions
    rounds: Rounds
    units: Units | None = None


class BarrierState(WireStruct, frozen=True):
    """State at the barrier of a checkpoint: the sender waits for it to begin, or has `written` its
    part."""

    number: Count
    name: Text
    written: bool


class Hello(WireStruct, frozen=True, tag=10):
    """A rack asks to take part. Its `facts` are compared, and a refusal names the first that
    differs."""

    seat: Seat
    policy: Policy
    facts: Facts
    digests: Annotated[tuple[Digests, ...], Meta(max_length=1024)]
    after: Annotated[tuple[Count, ...], Meta(max_length=LIVES_MAX)] = ()
    """Incarnations of its rack (`life_of`) that it has heard to have the seat. The hello is later
    than they are, and incarnations of a rack do not overlap, so they are over."""
    resume: Resume | None = None
    """The checkpoint that `digests` are of; None: they are of the rack's own weights."""
    resume_step: Count = 0
    """Step at which this rack's part of the checkpoint was written."""
    buffers: Annotated[tuple[tuple[Text, Text], ...], Meta(max_length=BUFFERS_MAX)] = ()
    """(name, digest) of the buffers of its first rank, and of stages that others hold. They may
    differ and do not affect the admission."""
    part_lost: bool = False
    """The rack was given a checkpoint without a part for it and begins with a copy."""


class Challenge(WireStruct, frozen=True, tag=18):
    """Answer to a hello: who has its seat. A hello that does not name that incarnation may have
    waited in a queue since before it, and proves nothing."""

    to: Count
    """Incarnation of the receiver."""
    seated: Count
    """`life_of` the member that has the seat. Not secret: it is sent to any process that sends a
    hello."""


class Retire(WireStruct, frozen=True, tag=19):
    """A person attests that this incarnation of a rack is over and that none follows soon."""

    rack: U16
    life: Count


class Refusal(WireStruct, frozen=True, tag=11):
    """A refusal. kind: plan, resume, taken, started, racks, over; from a candidate: lost; to an
    incarnation that has lost its seat: seat."""

    incarnation: Count
    kind: Text
    detail: Text


class Prepare(StateMessage, frozen=True, tag=16):
    """A candidate asks for the promise to reject all lower ballots, and for the records after
    `after`, up to which it knows that everything is decided."""

    ballot: Count
    lineage: Hex
    after: Count
    address: Where | None = None
    """Address of the candidate, because a restarted witness knows none."""


class Vote(StateMessage, frozen=True, tag=17):
    """From a voter to a candidate or, from the witness, to the coordinator."""

    lineage: Hex
    acceptor_state: AcceptorState
    held: Versions
    """Versions that the voter's rack holds on all ranks; empty for the witness."""


class OfferId(WireStruct, frozen=True):
    member: Member
    fragment: U16
    seq: Count


class Bad(WireStruct, frozen=True):
    """An offer that must not be merged, although its bytes arrived intact."""

    offer: OfferId
    reason: Text


class Held(OfAttempt, frozen=True, array_like=True):
    """A tentative result that is complete on all ranks of the sender."""

    digests: Digests


SLICES_EACH = 2
"""Slices that each member of a sharded attempt merges, one after the other: while it pulls the
payloads of the second, the others pull its first merged slice. With one slice the link would be
idle in between; more would cost messages."""


SliceCount = Annotated[int, Meta(ge=0, le=SLICES_EACH)]
SliceCounts = Annotated[tuple[SliceCount, ...], Meta(max_length=64)]


class Sliced(OfAttempt, frozen=True, array_like=True):
    """Progress of a rack in a sharded attempt: its first `merged` own slices are merged and served
    on all ranks; or one rank has `failed` to pull or merge slices."""

    merged: SliceCount = 0
    failed: bool = False


class MergeProposal(OfAttempt, frozen=True, array_like=True):
    """Merge exactly these members, in this order, into `version`, and keep the result until the
    version is decided."""

    members: Annotated[tuple[Offer, ...], Meta(max_length=64)]
    absent: Absentees = ()
    sharded: bool = False
    """Whether each member's rack merges SLICES_EACH slices and all racks pull the merged ones."""
    merged: SliceCounts = ()
    """In a sharded attempt, by member: how many of its slices are merged and can be pulled. Empty:
    none of any member."""


class Declined(WireStruct, frozen=True):
    """A capture that gave no offer (non-finite delta, no tokens), and the version it began from."""

    fragment: U16
    applied: Count
    reason: Text


class SlowLink(WireStruct, frozen=True):
    """Pulls of a rank from another rack have become slower."""

    rack: U16
    """The rack that it pulls from."""
    rank: U16
    """The rank that pulls."""
    since_step: Count
    """A step of the rank that pulls."""
    ratio_milli: Count = 0
    """Ratio of the time per byte to that of the past, in thousandths."""
    sure_milli: Count = 0


class Pace(WireStruct, frozen=True):
    """How fast a rank trains, and the verdict of its own past. For a rack: those of its slowest
    rank."""

    rank: U16 = 0
    time_ps: Count = 0
    """Time per token of a step, in picoseconds, median of the newest samples; 0: unknown yet."""
    margin_ppm: Count = 0
    """Uncertainty of `time_ps`: `failslow_zscore_threshold` standard errors, in millionths of
    it."""
    slow_since: Count = 0
    """Step from which on it is slower than before; 0: it is not slow."""
    ratio_milli: Count = 0
    """Ratio of its time per token to that of its past, in thousandths; 0: it is not slow."""
    sure_milli: Count = 0
    """Probability of the change, in thousandths."""
    cause: CauseName = ""
    """compute, link, input or unknown; empty: not validated (yet)."""
    link_to: Annotated[int, Meta(ge=-1, le=0xFFFF)] = -1
    """The rack at the other end, if a link is the cause."""
    gemm_ns: Count = 0
    """Time of the newest matrix product of the micro-benchmark; 0: not known."""
    batch: Count = 0
    """Micro-batches of a step, if the script asks how many to take (`Runtime.local_batch`); 0: it
    does not ask."""
    links: Annotated[tuple[SlowLink, ...], Meta(max_length=64)] = ()
    """Slow links, one per rack at the other end."""
    start_ms: Count = 0
    """Time from the start of the process to its first step, which is the cost of a restart; 0:
    there was no step yet, or the rack has tried in vain to leave for a restart."""


SLOW_MAX = 128
"""Limit of the verdicts in a message; beyond it, links are left out."""


class FailSlow(WireStruct, frozen=True):
    """A verdict in force: a rack's steps are slow or, with `of_link`, pulls from it."""

    rack: U16
    rank: U16
    """The slowest of its ranks."""
    own_past: bool
    """Whether it is compared with its own past; otherwise with the median of the other racks."""
    since_step: Count
    """The rack's own step at which the slowdown began, or at which the comparison found it."""
    ratio_tenths: Count
    sure_milli: Count = 1000
    cause: CauseName = ""
    """As in Pace."""
    link_to: Annotated[int, Meta(ge=-1, le=0xFFFF)] = -1
    of_link: bool = False
    """Whether pulls of rank `rank` of rack `link_to` from this rack are slow; `since_step` is a
    step of `link_to`."""


JOINERS_MAX = 64
"""Limit of racks that join at the same time."""


class Pulled(WireStruct, frozen=True):
    """Verified bytes of pulls, which only grow, and the bytes still to come. In a report `rack` is
    the source of the bytes (the reporting rack itself for decided versions); in orders it is the
    rack that pulls."""

    rack: U16
    moved: Count
    left: Count


Pulls = Annotated[tuple[Pulled, ...], Meta(max_length=RACKS_MAX + 1)]


class RankCopy(WireStruct, frozen=True):
    """What one rank has copied of its training state for a joining rack after a step, or why it
    cannot (`refused`)."""

    to: Member
    step: Count
    size: Annotated[int, Meta(ge=0, le=2**50)]
    digest: Hex
    refused: Text = ""


class StateCopy(WireStruct, frozen=True):
    """What all ranks of a rack have copied at the same step: sizes in bytes and digests per
    rank. `refused`: why there is no copy; `step` is then the one to go on from without it, or 0."""

    to: Member
    donor: Member
    step: Count
    sizes: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**50)], ...], Meta(max_length=1024)]
    digests: Digests
    refused: Text = ""


class Donor(WireStruct, frozen=True):
    """`donor` must copy its training state for `to`, which joins."""

    to: Member
    donor: Member


class UnitsAsk(WireStruct, frozen=True):
    """A rack asks for units of data. `given`: how many it has got so far; an ask with another
    number is answered already. `empty`: it has taken all of them."""

    given: Count
    size: AtLeastOne
    empty: bool


class Report(StateMessage, frozen=True, tag=12):
    """Leader to coordinator: the state of a rack, aggregated over all its ranks."""

    to: Count
    """Incarnation of the coordinator whose orders it heard last; 0: none. A report that waited for
    a former life of the receiver is not meant for this one."""
    acceptor_state: AcceptorState
    fresh: bool
    step: Count
    step_ns: Count
    versions: Versions
    offers: Annotated[tuple[Offer, ...], Meta(max_length=1024)]
    declined: Annotated[tuple[Declined, ...], Meta(max_length=1024)]
    coming: Annotated[tuple[U16, ...], Meta(max_length=1024)]
    """Fragments that are captured on some rank and not offered yet."""
    got: Annotated[tuple[OfferId, ...], Meta(max_length=65536)]
    held: Annotated[tuple[Held, ...], Meta(max_length=1024)]
    leaving: bool
    hurry: bool
    """Only while leaving: do not wait until the other racks have finished."""
    idle: bool
    """Only while leaving: this rack has no open offer any more."""
    gone: bool
    """The rack stops now, whatever the log says. This is its last report."""
    bad: Annotated[tuple[Bad, ...], Meta(max_length=BAD_MAX)] = ()
    """Open offers that a rank of this rack has found not fit to be merged."""
    heard: Count = 0
    """Serial of the newest orders in the promised ballot."""
    pace: Pace = Pace()
    barrier: BarrierState | None = None
    """The checkpoint barrier that all its ranks have reached."""
    wants: bool = False
    """Whether it joins and waits for the training state of another rack."""
    copies: Annotated[tuple[StateCopy, ...], Meta(max_length=JOINERS_MAX)] = ()
    """Its copies as a donor."""
    slices: Annotated[tuple[Sliced, ...], Meta(max_length=1024)] = ()
    pulls: Pulls = ()
    units: UnitsAsk | None = None


WHY_MAX = 1024
"""Limit of the reasons in a message."""


OpenFor = Literal["", "grace", "lockstep"]
"""Why a round waits for more racks although enough offers have arrived: until its grace window is
over, or as in lockstep for all; empty: it does not."""


class Reason(WireStruct, frozen=True):
    """Reason why something is blocked, for people."""

    text: Text
    fragment: Annotated[int, Meta(ge=-1, le=0xFFFF)] = -1
    """The fragment whose round waits; -1: not a single round."""
    refused: Annotated[int, Meta(ge=-1, le=0xFFFF)] = -1
    """The rack that was refused; -1: none."""
    open_for: OpenFor = ""

    def __str__(self) -> str:
        if self.refused >= 0:
            return f"rack {self.refused} was refused: {self.text}"
        return f"fragment {self.fragment}: {self.text}" if self.fragment >= 0 else self.text


class Orders(StateMessage, frozen=True, tag=13):
    """Coordinator to leader: the log after `prev`, the open offers and the proposals."""

    to: Count
    """Incarnation of the receiver. Orders to its former life are not meant for this one."""
    ballot: Count
    lineage: Hex
    prev: Count
    chain: Hex
    records: Records
    last: Count
    """Last record of the whole log; `records` may end before it."""
    decided: Count
    offers: Annotated[tuple[Offer, ...], Meta(max_length=65536)]
    proposals: Annotated[tuple[MergeProposal, ...], Meta(max_length=1024)]
    settled: Versions
    """Per fragment the version that every live rack holds. Older payloads and states may be
    freed."""
    live: Racks
    missing: Racks
    """Racks that have not sent a hello yet; empty once the job has begun."""
    why: Annotated[tuple[Reason, ...], Meta(max_length=WHY_MAX)]
    """Why open rounds do not close."""
    snapshot: Snapshot | None = None
    """The state at `prev`, for a receiver whose log ends before the first record that the sender
    keeps."""
    slow: Annotated[tuple[FailSlow, ...], Meta(max_length=SLOW_MAX)] = ()
    donors: Annotated[tuple[Donor, ...], Meta(max_length=JOINERS_MAX)] = ()
    copies: Annotated[tuple[StateCopy, ...], Meta(max_length=JOINERS_MAX)] = ()
    """The copies of these donors."""
    moving: Pulls = ()
    """Racks that copy the initial versions, join or leave. Others may wait for their pulls."""
    taken: Count = 0
    """Bytes of the receiver's offers that other racks have pulled so far."""


class CapturePart(WireStruct, frozen=True):
    """One rank's part of its rack's offer, or why there is none (then the checksum is empty)."""

    fragment: U16
    seq: Count
    base: Count
    capture_step: Count
    tokens: Annotated[int, Meta(ge=0, le=2**50)]
    steps: AtLeastOne
    checksum: Hex
    applied: Count
    declined: Text
    norm: Norm = 0.0
    size: Count = 0
    """Payload bytes; 0: the codec's fixed size for this part."""
    closing: bool = False
    units: Count = 0
    """As in `Offer`."""
    along: Count = 0
    against: Count = 0


class Partial(OfAttempt, frozen=True, array_like=True):
    """The sums over one rank's part of the members of a merge proposal."""

    blob: Blob


class Total(OfAttempt, frozen=True, array_like=True):
    """The total of the partial sums of all ranks of a rack. Empty: there will be none."""

    blob: Blob


class RankReport(StateMessage, frozen=True, tag=14):
    """Rank to its leader. held[].digests has exactly one entry."""

    step: Count
    step_ns: Count
    decided: Count
    versions: Versions
    parts: Annotated[tuple[CapturePart, ...], Meta(max_length=1024)]
    got: Annotated[tuple[OfferId, ...], Meta(max_length=65536)]
    held: Annotated[tuple[Held, ...], Meta(max_length=1024)]
    partials: Annotated[tuple[Partial, ...], Meta(max_length=1024)]
    leaving: bool
    hurry: bool
    idle: bool
    bad: Annotated[tuple[Bad, ...], Meta(max_length=BAD_MAX)] = ()
    heard: Count = 0
    """Serial of the newest orders of its leader."""
    pace: Pace = Pace()
    barrier: BarrierState | None = None
    wants: bool = False
    copies: Annotated[tuple[RankCopy, ...], Meta(max_length=JOINERS_MAX)] = ()
    slices: Annotated[tuple[Sliced, ...], Meta(max_length=1024)] = ()
    pulls: Pulls = ()
    units: UnitsAsk | None = None


class RankOrders(StateMessage, frozen=True, tag=15):
    """Leader to its ranks: decided records after `prev`, and the newest orders of the
    coordinator."""

    prev: Count
    records: Records
    offers: Annotated[tuple[Offer, ...], Meta(max_length=65536)]
    proposals: Annotated[tuple[MergeProposal, ...], Meta(max_length=1024)]
    totals: Annotated[tuple[Total, ...], Meta(max_length=2048)]
    settled: Versions
    live: Racks
    discarded: Annotated[tuple[tuple[U16, Count], ...], Meta(max_length=1024)]
    """(fragment, seq) of own offers that were declined within the rack and never announced."""
    why: Annotated[tuple[Text, ...], Meta(max_length=WHY_MAX)]
    failure: tuple[Text, Text]
    """(kind, as in coordination/failures.py, detail) of the error that stops this rack, so that all
    its ranks raise it; otherwise ("", "")."""
    finish: bool
    """Whether the rack has left, so that all its ranks may stop."""
    snapshot: Snapshot | None = None
    slow: Annotated[tuple[FailSlow, ...], Meta(max_length=SLOW_MAX)] = ()
    asked: Annotated[tuple[Member, ...], Meta(max_length=JOINERS_MAX)] = ()
    """Joining racks that this rack is the donor of."""
    copy: StateCopy | None = None
    """A donor's copy for this rack."""
    moving: Pulls = ()
    taken: Count = 0
    lost: Text = ""
    """How this rack has lost its seat, if its own log does not show it; otherwise empty."""


Message = (
    Hello
    | Refusal
    | Report
    | Orders
    | RankReport
    | RankOrders
    | Prepare
    | Vote
    | Challenge
    | Retire
)


class Patch(WireStruct, frozen=True, tag=20):
    """The changes of a state relative to an earlier one of its stream (streams.py)."""

    kind: U16
    """Tag of the state."""
    base: Count
    """Number of the earlier state."""
    fields: dict[U16, Raw]
    """The changed fields, by index."""


class Ack(WireStruct, frozen=True):
    """Number of the newest state of a stream that was read; 0: none, or no longer any."""

    kind: U16
    number: Count


class Envelope(WireStruct, frozen=True):
    """Content of a frame."""

    job: Annotated[str, Meta(max_length=64)]
    rack: U16
    rank: U16
    incarnation: Count
    body: Message | Patch
    number: Count = 0
    """Number in the stream of states that the body belongs to; 0: it belongs to none."""
    acked: Count = 0
    """Incarnation of the receiver that `acks` are meant for."""
    acks: Annotated[tuple[Ack, ...], Meta(max_length=8)] = ()
