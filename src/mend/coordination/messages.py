"""The messages between processes.

Every message is a whole, current state, so losing one costs only time. Four of them drive the
rounds, and three let a rack in:

    rank --RankReport--> leader --Report--> coordinator    what I have, what I wait for
    rank <--RankOrders-- leader <--Orders-- coordinator    the log, open offers, rounds in flight
    leader --Hello--> coordinator --Refusal--> leader
    leader <--Challenge-- voter                             who has its seat; a hello answers

A person says `Retire` of a rack that will not come back.

Between two processes a state travels as a patch of one that the receiver has confirmed; see
`streams`. Votes are states as well: a candidate repeats `Prepare`, an acceptor answers with its
`AcceptorState`, which travels in its `Report`, or by itself in a `Vote`.

A sender repeats its newest state on every heartbeat and at once when it changes; a receiver keeps
the highest `serial`. Duplicated, reordered and lost frames need no further rule.
"""

from __future__ import annotations

from typing import Annotated

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
    Versions,
    Where,
    WireStruct,
)
from mend.types import BUFFERS_MAX, RACKS_MAX, Member

CauseName = Annotated[str, Meta(max_length=32)]
"""One of the detector's; any other is shown as unknown."""

LIVES_MAX = 8
"""Former lives that a hello names, the newest last."""


class StateMessage(WireStruct, frozen=True):
    """Base of the messages that are a whole state; `serial` orders them."""

    serial: Count


class OfAttempt(Struct, frozen=True):
    """Base of what belongs to one attempt to merge a version of a fragment. Newer ones are
    greater."""

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
    """What a rack has read from a checkpoint: equal on all racks that have, to the last field."""

    lineage: Hex
    number: Count
    """Number of the checkpoint, as in its `CheckpointRecord`."""
    racks: Racks
    """Racks that have a part of it."""
    versions: Versions
    rounds: Rounds


class BarrierState(WireStruct, frozen=True):
    """A rack waits in a checkpoint of this number and name, or has `written` its part."""

    number: Count
    name: Text
    written: bool


class Hello(WireStruct, frozen=True, tag=10):
    """A rack asks to take part. Its `facts` are compared; the first that differs is named."""

    seat: Seat
    policy: Policy
    facts: Facts
    digests: Annotated[tuple[Digests, ...], Meta(max_length=1024)]
    after: Annotated[tuple[Count, ...], Meta(max_length=LIVES_MAX)] = ()
    """Lives of its rack (`life_of`) that, as it has heard, have the seat: this was said later, and
    the lives of a rack follow each other, so they are over."""
    resume: Resume | None = None
    """What the `digests` are of, where it has read a checkpoint; else of its own weights."""
    resume_step: Count = 0
    """The step at which this rack's part of the checkpoint was written."""
    buffers: Annotated[tuple[tuple[Text, Text], ...], Meta(max_length=BUFFERS_MAX)] = ()
    """(name, digest) of the buffers of its first rank. They may differ, and decide nothing."""
    part_lost: bool = False
    """It was given a checkpoint in which it has no part, and begins with a copy."""


class Challenge(WireStruct, frozen=True, tag=18):
    """To a rack that says hello: who has its seat. A hello that does not name that life may have
    waited in a queue since before it, and proves nothing."""

    to: Count
    """Incarnation of the receiver."""
    seated: Count
    """`life_of` the member that has the seat; it is sent to any process that says hello."""


class Retire(WireStruct, frozen=True, tag=19):
    """A person attests that this life of a rack is over, and that none comes after it soon."""

    rack: U16
    life: Count


class Refusal(WireStruct, frozen=True, tag=11):
    """A no. kind: plan, resume, taken, started, racks, over; of a candidate: lost; to a life that
    has lost its seat: seat."""

    incarnation: Count
    kind: Text
    detail: Text


class Prepare(StateMessage, frozen=True, tag=16):
    """A candidate asks for the promise to accept nothing of a lower ballot any more, and for the
    records after `after`, up to which it knows that all is decided."""

    ballot: Count
    lineage: Hex
    after: Count
    address: Where | None = None
    """Address of the candidate: a witness that was started again knows none."""


class Vote(StateMessage, frozen=True, tag=17):
    """A voter to a candidate or, where it leads no rack, to the coordinator."""

    lineage: Hex
    acceptor_state: AcceptorState
    held: Versions
    """What the voter's rack holds on all ranks; empty for the witness."""


class OfferId(WireStruct, frozen=True):
    member: Member
    fragment: U16
    seq: Count


class Bad(WireStruct, frozen=True):
    """An offer whose bytes are those that its member sent, and must not be merged."""

    offer: OfferId
    reason: Text


class Held(OfAttempt, frozen=True, array_like=True):
    """A tentative result that is complete on all ranks of the sender."""

    digests: Digests


SLICES_EACH = 2
"""Slices that each member of a sharded attempt merges, one after the other: while it pulls the
payloads of the next, the others pull what it has merged. One would leave the link idle between
the two; more cost words."""


class Sliced(OfAttempt, frozen=True, array_like=True):
    """How a rack stands in a sharded attempt: so many of its own slices are merged and served on
    all ranks, the first ones; or one rank has `failed` to make something of the slices."""

    merged: Annotated[int, Meta(ge=0, le=SLICES_EACH)] = 0
    failed: bool = False


class MergeProposal(OfAttempt, frozen=True, array_like=True):
    """Merge exactly these, in this order, into `version`; keep the result until it is decided."""

    members: Annotated[tuple[Offer, ...], Meta(max_length=64)]
    absent: Absentees = ()
    sharded: bool = False
    """Each member's rack merges SLICES_EACH slices, and all pull the merged ones."""
    merged: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=SLICES_EACH)], ...], Meta(max_length=64)
    ] = ()
    """Of a sharded one, by member: how many of its slices are merged and can be pulled. Empty: none
    of anybody's."""


class Declined(WireStruct, frozen=True):
    """A capture that gave no offer (non-finite delta, no tokens), at the version it began from."""

    fragment: U16
    applied: Count
    reason: Text


class SlowLink(WireStruct, frozen=True):
    """Pulls of a rank from another rack take longer than they did."""

    rack: U16
    """The rack that it pulls from."""
    rank: U16
    """The rank that pulls."""
    since_step: Count
    """A step of the rank that pulls."""
    ratio_milli: Count = 0
    """Time per byte over that of the past, in thousandths."""
    sure_milli: Count = 0


class Pace(WireStruct, frozen=True):
    """How fast a rank trains, and what its own past says of it. Of a rack: that of its slowest."""

    rank: U16 = 0
    time_ps: Count = 0
    """Per token of a step, picoseconds, median of the newest samples; 0: not known yet."""
    margin_ppm: Count = 0
    """How uncertain that is: `failslow_zscore_threshold` standard errors, in millionths of it."""
    slow_since: Count = 0
    """Step from which on it is slower than it was; 0: it is not."""
    ratio_milli: Count = 0
    """Step time per token over that of its past, in thousandths; 0: it is not slow."""
    sure_milli: Count = 0
    """Probability of the change, in thousandths."""
    cause: CauseName = ""
    """compute, link, input or unknown; empty: not validated (yet)."""
    link_to: Annotated[int, Meta(ge=-1, le=0xFFFF)] = -1
    """The rack at the other end, where a link is the cause."""
    gemm_ns: Count = 0
    """Time of the newest matrix product of the micro-benchmark; 0: not known."""
    batch: Count = 0
    """Micro-batches of a step of which the script would take fewer, as it has asked how many
    (`Runtime.local_batch`); 0: it does not ask."""
    links: Annotated[tuple[SlowLink, ...], Meta(max_length=64)] = ()
    """Slow links, one per rack at the other end."""
    start_ms: Count = 0
    """From the start of the process to its first step: what starting it again costs; 0: it has
    made none, or has tried to leave for it and could not."""


SLOW_MAX = 128
"""Verdicts that are told; where there are more, links are left out."""


class FailSlow(WireStruct, frozen=True):
    """A verdict in force: a rack is slow in its steps; or, `of_link`, to be pulled from."""

    rack: U16
    rank: U16
    """The slowest of its ranks."""
    own_past: bool
    """Compared with its own past; else with the median of the other racks."""
    since_step: Count
    """Its own step at which it began, or at which the comparison found it."""
    ratio_tenths: Count
    sure_milli: Count = 1000
    cause: CauseName = ""
    """As in Pace."""
    link_to: Annotated[int, Meta(ge=-1, le=0xFFFF)] = -1
    of_link: bool = False
    """What is slow are pulls by `rank` of rack `link_to`, whose step `since_step` is, from it."""


JOINERS_MAX = 64
"""Racks that join at once."""


class Pulled(WireStruct, frozen=True):
    """Verified bytes of pulls, which only grow, and the bytes that are still to come. In a report
    `rack` is the rack whose bytes they are, its own for decided versions; in orders the rack that
    pulls."""

    rack: U16
    moved: Count
    left: Count


Pulls = Annotated[tuple[Pulled, ...], Meta(max_length=RACKS_MAX + 1)]


class RankCopy(WireStruct, frozen=True):
    """What one rank has copied of its training state for a rack that joins, after a step; or why
    it cannot (`refused`)."""

    to: Member
    step: Count
    size: Annotated[int, Meta(ge=0, le=2**50)]
    digest: Hex
    refused: Text = ""


class StateCopy(WireStruct, frozen=True):
    """What all ranks of a rack have copied, at one step: sizes in bytes and digests per rank."""

    to: Member
    donor: Member
    step: Count
    sizes: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**50)], ...], Meta(max_length=1024)]
    digests: Digests
    refused: Text = ""


class Donor(WireStruct, frozen=True):
    """`donor` is to copy its training state for `to`, which joins."""

    to: Member
    donor: Member


class Report(StateMessage, frozen=True, tag=12):
    """Leader to coordinator: the state of a rack, aggregated over all its ranks."""

    to: Count
    """Incarnation of the coordinator whose orders it heard last; 0: it has heard none. What waited
    for a former life of the receiver is not for this one."""
    acceptor_state: AcceptorState
    fresh: bool
    step: Count
    step_ns: Count
    versions: Versions
    offers: Annotated[tuple[Offer, ...], Meta(max_length=1024)]
    declined: Annotated[tuple[Declined, ...], Meta(max_length=1024)]
    coming: Annotated[tuple[U16, ...], Meta(max_length=1024)]
    """Fragments that are captured on some rank and are no offer yet."""
    got: Annotated[tuple[OfferId, ...], Meta(max_length=65536)]
    held: Annotated[tuple[Held, ...], Meta(max_length=1024)]
    leaving: bool
    hurry: bool
    """Leaving only: do not wait until the other racks have finished too."""
    idle: bool
    """Leaving only: nothing of this rack is open any more."""
    gone: bool
    """The rack stops now, whatever the log says (its last word)."""
    bad: Annotated[tuple[Bad, ...], Meta(max_length=BAD_MAX)] = ()
    """Open offers that a rank of this rack has found not fit to be merged."""
    heard: Count = 0
    """Serial of the newest orders of the ballot that is promised."""
    pace: Pace = Pace()
    barrier: BarrierState | None = None
    """The checkpoint that all its ranks wait in."""
    wants: bool = False
    """It joins, and waits for the training state of another rack."""
    copies: Annotated[tuple[StateCopy, ...], Meta(max_length=JOINERS_MAX)] = ()
    """What it has copied as a donor."""
    slices: Annotated[tuple[Sliced, ...], Meta(max_length=1024)] = ()
    pulls: Pulls = ()


class Reason(WireStruct, frozen=True):
    """Why something does not go on, for people."""

    text: Text
    fragment: Annotated[int, Meta(ge=-1, le=0xFFFF)] = -1
    """The fragment whose round waits; -1: it is not one round alone."""
    refused: Annotated[int, Meta(ge=-1, le=0xFFFF)] = -1
    """The rack that was refused; -1: none."""

    def __str__(self) -> str:
        if self.refused >= 0:
            return f"rack {self.refused} was refused: {self.text}"
        return f"fragment {self.fragment}: {self.text}" if self.fragment >= 0 else self.text


class Orders(StateMessage, frozen=True, tag=13):
    """Coordinator to leader: the log after `prev`, the open offers and the rounds that gather."""

    to: Count
    """Incarnation of the receiver: what was meant for its former life is not for this one."""
    ballot: Count
    lineage: Hex
    prev: Count
    chain: Hex
    records: Records
    last: Count
    """Last record of the whole log; `records` may end before it."""
    decided: Count
    offers: Annotated[tuple[Offer, ...], Meta(max_length=65536)]
    gathers: Annotated[tuple[MergeProposal, ...], Meta(max_length=1024)]
    settled: Versions
    """Per fragment the version every live rack holds; older payloads and states may be freed."""
    live: Racks
    missing: Racks
    """Racks that did not say hello yet; empty once the log has begun."""
    why: Annotated[tuple[Reason, ...], Meta(max_length=1024)]
    """Why rounds that are open do not close."""
    snapshot: Snapshot | None = None
    """The state at `prev`, for a receiver whose log ends before the first record that the sender
    has."""
    slow: Annotated[tuple[FailSlow, ...], Meta(max_length=SLOW_MAX)] = ()
    donors: Annotated[tuple[Donor, ...], Meta(max_length=JOINERS_MAX)] = ()
    copies: Annotated[tuple[StateCopy, ...], Meta(max_length=JOINERS_MAX)] = ()
    """What these donors have copied."""
    moving: Pulls = ()
    """Racks that copy what the job begins with, join or leave: others may wait for their pulls."""
    taken: Count = 0
    """Bytes of the receiver's offers that other racks have pulled so far."""


class CapturePart(WireStruct, frozen=True):
    """One rank's piece of its rack's offer, or why there is none (then checksum is empty)."""

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
    """Bytes; 0: as the codec always makes of a part."""
    closing: bool = False


class Partial(OfAttempt, frozen=True, array_like=True):
    """The sums over one rank's part of the members of a gather."""

    blob: Blob


class Total(OfAttempt, frozen=True, array_like=True):
    """The total of the partials of all ranks of a rack. Empty: there will be none."""

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


class RankOrders(StateMessage, frozen=True, tag=15):
    """Leader to its rank: decided records after `prev`, and the newest orders of the
    coordinator."""

    prev: Count
    records: Records
    offers: Annotated[tuple[Offer, ...], Meta(max_length=65536)]
    gathers: Annotated[tuple[MergeProposal, ...], Meta(max_length=1024)]
    totals: Annotated[tuple[Total, ...], Meta(max_length=2048)]
    settled: Versions
    live: Racks
    discarded: Annotated[tuple[tuple[U16, Count], ...], Meta(max_length=1024)]
    """(fragment, seq) of own offers that were declined inside the rack and never announced."""
    why: Annotated[tuple[Text, ...], Meta(max_length=1024)]
    failure: tuple[Text, Text]
    """(kind, detail) of what stops this rack, so that all its ranks raise it; else ("", "")."""
    finish: bool
    """The rack has left: all its ranks may stop."""
    snapshot: Snapshot | None = None
    slow: Annotated[tuple[FailSlow, ...], Meta(max_length=SLOW_MAX)] = ()
    asked: Annotated[tuple[Member, ...], Meta(max_length=JOINERS_MAX)] = ()
    """Racks that join, for which this one is the donor."""
    copy: StateCopy | None = None
    """What a donor has copied for this rack."""
    moving: Pulls = ()
    taken: Count = 0
    lost: Text = ""
    """How this rack has lost its seat, of which its log does not know; empty: it has not."""


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
    """What has changed in a state since another one of its stream (streams.py)."""

    kind: U16
    """Tag of the state."""
    base: Count
    """Number of the other state."""
    fields: dict[U16, Raw]
    """By place in the state."""


class Ack(WireStruct, frozen=True):
    """The newest state of a stream that was read; 0: none, or none any more."""

    kind: U16
    number: Count


class Envelope(WireStruct, frozen=True):
    """What a frame holds."""

    job: Annotated[str, Meta(max_length=64)]
    rack: U16
    rank: U16
    incarnation: Count
    body: Message | Patch
    number: Count = 0
    """In the stream of states that the body belongs to; 0: in none."""
    acked: Count = 0
    """Incarnation of the receiver that `acks` are meant for."""
    acks: Annotated[tuple[Ack, ...], Meta(max_length=8)] = ()
