"""The words on the wire.

Every message is a whole, current state, so losing one costs only time. There are four, and three
to get in:

    rank --RankReport--> leader --Report--> coordinator    what I have, what I wait for
    rank <--RankOrders-- leader <--Orders-- coordinator    the log, open offers, rounds in flight
    leader --Hello--> coordinator --Refusal--> leader
    leader <--Challenge-- voter                             who has its seat; a hello answers

Votes are states as well: a candidate repeats `Prepare`, an acceptor answers with its
`AcceptorState`, which travels in its `Report`, or by itself in a `Vote`.

A sender repeats its newest state on every heartbeat and at once when it changes; a receiver keeps
the highest `serial`. Duplicated, reordered and lost frames need no further rule.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

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
    Word,
)
from mend.types import Member

LIVES_MAX = 8
"""Former lives that a hello names, the newest last."""


class State(Word, frozen=True):
    """Base of the messages that are a whole state; `serial` orders them."""

    serial: Count


# ------------------------------------------------------------------ messages


class Resume(Word, frozen=True):
    """What a rack has read from a checkpoint: equal on all racks that have, to the last field."""

    lineage: Hex
    number: Count
    """Of the checkpoint, as its `Mark` has it."""
    racks: Racks
    """That have a part of it."""
    versions: Versions
    rounds: Rounds


class Cut(Word, frozen=True):
    """A rack waits in a checkpoint of this number and name, or has `written` its part."""

    number: Count
    name: Text
    written: bool


class Hello(Word, frozen=True, tag=10):
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


class Challenge(Word, frozen=True, tag=18):
    """To a rack that says hello: who has its seat. A hello that does not name that life may have
    waited in a queue since before it, and proves nothing."""

    to: Count
    """Incarnation of the receiver."""
    seated: Count
    """`life_of` who has the seat: whoever says hello hears it."""


class Retire(Word, frozen=True, tag=19):
    """A person attests that this life of a rack is over, and that none comes after it soon."""

    rack: U16
    life: Count


class Refusal(Word, frozen=True, tag=11):
    """The coordinator's no. kind: plan, resume, taken, started, racks, over."""

    incarnation: Count
    kind: Text
    detail: Text


class Prepare(State, frozen=True, tag=16):
    """A candidate asks for the promise to accept nothing of a lower epoch any more, and for the
    records behind `after`, up to which it knows that all is decided."""

    epoch: Count
    lineage: Hex
    after: Count
    address: Where | None = None
    """Of the candidate: a witness that was started again knows the address of nobody."""


class Vote(State, frozen=True, tag=17):
    """A voter to a candidate or, where it leads no rack, to the coordinator."""

    lineage: Hex
    acceptor_state: AcceptorState
    held: Versions
    """What the voter's rack holds on all ranks; empty for the witness."""


class OfferId(Word, frozen=True):
    member: Member
    fragment: U16
    seq: Count


class Bad(Word, frozen=True):
    """An offer whose bytes are those that its member sent, and must not be merged."""

    offer: OfferId
    reason: Text


class Held(Word, frozen=True):
    """A tentative result that is complete on all ranks of the sender."""

    fragment: U16
    version: Count
    attempt: Count
    digests: Digests


class Gather(Word, frozen=True):
    """Merge exactly these, in this order, into `version`; keep the result until it is decided."""

    fragment: U16
    version: Count
    attempt: Count
    members: Annotated[tuple[Offer, ...], Meta(max_length=64)]
    absent: Absentees = ()


class Declined(Word, frozen=True):
    """A capture that gave no offer (non-finite delta, no tokens), at the version it began from."""

    fragment: U16
    applied: Count
    reason: Text


class Pace(Word, frozen=True):
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


class FailSlow(Word, frozen=True):
    """A verdict in force: a rack is slow."""

    rack: U16
    rank: U16
    """The slowest of its ranks."""
    own_past: bool
    """Compared with its own past; else with the median of the other racks."""
    since_step: Count
    """Its own step at which it began, or at which the comparison found it."""
    ratio_tenths: Count
    sure_milli: Count = 1000


class Report(State, frozen=True, tag=12):
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
    """Serial of the newest orders of the epoch that is promised."""
    pace: Pace = Pace()
    cut: Cut | None = None
    """The checkpoint that all its ranks wait in."""


class Orders(State, frozen=True, tag=13):
    """Coordinator to leader: the log behind `prev`, the open offers and the rounds that gather."""

    to: Count
    """Incarnation of the receiver: what was meant for its former life is not for this one."""
    epoch: Count
    lineage: Hex
    prev: Count
    chain: Hex
    records: Records
    last: Count
    """Of the whole log; further than the records reach where the receiver is far behind."""
    decided: Count
    offers: Annotated[tuple[Offer, ...], Meta(max_length=65536)]
    gathers: Annotated[tuple[Gather, ...], Meta(max_length=1024)]
    settled: Versions
    """Per fragment the version every live rack holds; older payloads and states may be freed."""
    live: Racks
    missing: Racks
    """Racks that did not say hello yet; empty once the log has begun."""
    why: Annotated[tuple[Text, ...], Meta(max_length=1024)]
    """Why rounds that are open do not close."""
    snapshot: Snapshot | None = None
    """Of `prev`, for a receiver whose log ends before what the sender still has."""
    slow: Annotated[tuple[FailSlow, ...], Meta(max_length=128)] = ()


class Part(Word, frozen=True):
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


class Partial(Word, frozen=True):
    """What one rank has measured of its part of the members of a gather."""

    fragment: U16
    version: Count
    attempt: Count
    blob: Blob


class Total(Word, frozen=True):
    """What the partials of all ranks of a rack come to. Empty: there will be none."""

    fragment: U16
    version: Count
    attempt: Count
    blob: Blob


class RankReport(State, frozen=True, tag=14):
    """Rank to its leader. held[].digests has exactly one entry."""

    step: Count
    step_ns: Count
    decided: Count
    versions: Versions
    parts: Annotated[tuple[Part, ...], Meta(max_length=1024)]
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
    cut: Cut | None = None


class RankOrders(State, frozen=True, tag=15):
    """Leader to its rank: decided records behind `prev`, and what the coordinator last said."""

    prev: Count
    records: Records
    offers: Annotated[tuple[Offer, ...], Meta(max_length=65536)]
    gathers: Annotated[tuple[Gather, ...], Meta(max_length=1024)]
    totals: Annotated[tuple[Total, ...], Meta(max_length=2048)]
    settled: Versions
    live: Racks
    discarded: Annotated[tuple[tuple[U16, Count], ...], Meta(max_length=1024)]
    """(fragment, seq) of own offers that died inside the rack and were never announced."""
    why: Annotated[tuple[Text, ...], Meta(max_length=1024)]
    failure: tuple[Text, Text]
    """(kind, detail) of what stops this rack, so that all its ranks raise it; else ("", "")."""
    finish: bool
    """Every rank of this rack may stop: the rack has left."""
    snapshot: Snapshot | None = None
    slow: Annotated[tuple[FailSlow, ...], Meta(max_length=128)] = ()


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


class Envelope(Word, frozen=True):
    """What a frame holds."""

    job: Annotated[str, Meta(max_length=64)]
    rack: U16
    rank: U16
    incarnation: Count
    body: Message
