"""protocol: the words on the wire.

Every message is a whole, current state, so losing one costs only time. There are four, and three
to get in:

    rank --RankReport--> leader --Report--> coordinator    what I have, what I wait for
    rank <--RankOrders-- leader <--Orders-- coordinator    the log, open offers, rounds in flight
    leader --Hello--> coordinator --Refusal--> leader
    leader <--Challenge-- voter                             who has its seat; a hello answers

Votes are states as well: a candidate repeats `Prepare`, a voter answers with its `Ballot`, which
travels in its `Report`, or by itself in a `Vote`.

A sender repeats its newest state on every heartbeat and at once when it changes; a receiver keeps
the highest `serial`. Duplicated, reordered and lost frames need no further rule.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from mend.terms import Address, Member

U16 = Annotated[int, Meta(ge=0, le=0xFFFF)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
AtLeastOne = Annotated[int, Meta(ge=1, le=2**62)]
Hex = Annotated[str, Meta(max_length=64, pattern=r"^([0-9a-f]{2})*\Z")]
TEXT_MAX = 4096
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
Where = Annotated[str, Meta(max_length=256, pattern="^tcp://")]
Digests = Annotated[tuple[Hex, ...], Meta(max_length=1024)]
Versions = Annotated[tuple[Annotated[int, Meta(ge=-1, le=2**62)], ...], Meta(max_length=1024)]
"""Newest version per fragment; -1 = none yet."""
Racks = Annotated[tuple[U16, ...], Meta(max_length=128)]
Facts = Annotated[tuple[tuple[Text, Text], ...], Meta(max_length=100_000)]

SUMS_BYTES_MAX = 4 << 20
"""Of the partials that a rank reports at once, or of a total: half a frame."""

Blob = Annotated[bytes, Meta(max_length=SUMS_BYTES_MAX)]
"""Opaque to the protocol; whoever reads it checks it."""

NORM_MAX = 2.0**64
"""Magnitudes from here on have no square in fp32: no norm, variance or second moment of such a
weight is a number. Whatever reaches it is treated like an infinity."""

Norm = Annotated[float, Meta(ge=0, lt=NORM_MAX)]
"""Greatest magnitude of a delta: a maximum is exact, however the delta is sharded."""

BAD_MAX = 1024

PERSON = 0xFFFD
"""Rack number under which a person speaks."""

LIVES_MAX = 8
"""Former lives that a hello names, the newest last."""

RECORDS_FORMAT = 4
"""What the records of a log mean; another one is refused by name. 1: shares without norms. 2: every
witness votes, and merges count no absent racks. 3: jobs begin at version 0, without checkpoints."""


class Word(Struct, frozen=True, array_like=True):
    """Base of everything that travels inside a message."""


class State(Word, frozen=True):
    """Base of the messages that are a whole state; `serial` orders them."""

    serial: Count


# ------------------------------------------------------------------ nouns of the log


class Seat(Word, frozen=True):
    """A member with the addresses of its leader and of its ranks' lanes."""

    member: Member
    address: Where
    lanes: Annotated[tuple[Address, ...], Meta(max_length=1024)]


class Offer(Word, frozen=True):
    """Header of a contribution: one rack's encoded anchor - snapshot of one fragment.

    The bytes are pulled.
    """

    member: Member
    fragment: U16
    seq: Count
    base: Count
    capture_step: Count
    tokens: AtLeastOne
    steps: AtLeastOne
    checksums: Digests
    applied: Count
    """Version the rack trains on now; grows while the offer stays open."""
    norm: Norm = 0.0


class Share(Word, frozen=True):
    """One member of a merge, as the log remembers it."""

    member: Member
    seq: Count
    base: Count
    capture_step: Count
    tokens: AtLeastOne
    steps: AtLeastOne
    norm: Norm = 0.0


def share_of(offer: Offer) -> Share:
    """What the log remembers of an offer that is merged."""
    return Share(
        offer.member,
        offer.seq,
        offer.base,
        offer.capture_step,
        offer.tokens,
        offer.steps,
        offer.norm,
    )


class Absent(Word, frozen=True):
    """A rack that trains and is not in a merge. It weighs as the last offer of it that was named,
    which had these tokens and steps."""

    rack: U16
    tokens: AtLeastOne
    steps: AtLeastOne


Absentees = Annotated[tuple[Absent, ...], Meta(max_length=64)]
"""Ascending by rack."""

Rounds = Annotated[tuple[Count, ...], Meta(max_length=1024)]
"""Per fragment how many rounds it has merged, in parts of `weights.WHOLE`."""


class Ended(Word, frozen=True):
    """An offer that will not be merged."""

    member: Member
    seq: Count


class Policy(Word, frozen=True):
    """What the coordinator must know of the racks' configuration; equal on all of them."""

    racks: Annotated[int, Meta(ge=1, le=64)]
    ranks: Annotated[int, Meta(ge=1, le=1024)]
    fragments: Annotated[int, Meta(ge=1, le=1024)]
    quorum_min_learners: Count
    grace_ns: Annotated[int, Meta(ge=-1, le=2**62)]
    """Fixed window; -1 = adaptive."""
    lockstep: bool
    max_age: Count
    period_steps: Count
    overlap_steps: Count
    overlap_ramp: Count
    """Versions over which the overlap rises; 0: it does not."""
    stall_max_ns: Count
    evict_ns: Count
    """Silence that costs a rack its seat; 0 = never."""
    restart_attests: bool
    """Whether a rack that is started again proves that its former life is over."""
    token_weighted: bool = True
    """Racks weigh by their tokens; else all alike."""


# ------------------------------------------------------------------ records of the log


class Genesis(Word, frozen=True, tag=1):
    """The first record: who takes part and which bits version 0 has. digests[fragment][rank]."""

    roster: Annotated[tuple[Seat, ...], Meta(max_length=64)]
    witness: Member | None
    policy: Policy
    plan: Hex
    digests: Annotated[tuple[Digests, ...], Meta(max_length=1024)]
    format: Count = RECORDS_FORMAT
    """Of this and all records behind it."""
    learners: Racks = ()
    """The witness, by its rack number, where it has no vote."""
    versions: Versions = ()
    """Of a job that resumes a checkpoint: what `digests` are of. Empty: 0 of every fragment."""
    rounds: Rounds = ()
    """Of a job that resumes a checkpoint: as in `Lineage`."""
    parent: Hex = ""
    """The lineage that the checkpoint is of; empty: the job begins from nothing."""
    parent_mark: Count = 0
    """Number of the checkpoint in that lineage."""

    def first(self) -> tuple[int, ...]:
        """The version of every fragment that the job begins with."""
        return self.versions or (0,) * len(self.digests)


class Commit(Word, frozen=True, tag=2):
    """Fragment goes from version - 1 to version. Members ascending; digests per rank."""

    fragment: U16
    version: Count
    members: Annotated[tuple[Share, ...], Meta(max_length=64)]
    dropped: Annotated[tuple[Ended, ...], Meta(max_length=64)]
    digests: Digests
    reason: Text
    absent: Absentees = ()


class Roster(Word, frozen=True, tag=3):
    """The members from here on. Empty: the job is over."""

    number: Count
    members: Annotated[tuple[Seat, ...], Meta(max_length=64)]
    learners: Racks
    """Which of them have no vote; the witness, too, by its rack number."""
    witness: Member | None
    reason: Text


class Drop(Word, frozen=True, tag=4):
    """Offers that end without a commit: too old, at a time when nothing else is there to commit,
    or not fit to be merged."""

    fragment: U16
    dropped: Annotated[tuple[Ended, ...], Meta(max_length=64)]
    reason: Text
    diverged: bool = False
    """Their racks' weights are not worth merging; the racks stop."""


class Epoch(Word, frozen=True, tag=5):
    """A take-over: from here on `epoch` decides. See docs/protocol.md for why it is recorded."""

    epoch: Count


class Lineage(Word, frozen=True, tag=6):
    """Those that are left, all others being dead, go on from the newest versions they hold."""

    epoch: Count
    number: Count
    members: Annotated[tuple[Seat, ...], Meta(max_length=64)]
    learners: Racks
    """Which of them do not hold these versions, and have no vote until they do."""
    witness: Member | None
    dead: Annotated[tuple[Member, ...], Meta(max_length=64)]
    versions: Versions
    digests: Annotated[tuple[Digests, ...], Meta(max_length=1024)]
    reason: Text
    rounds: Rounds = ()


class Mark(Word, frozen=True, tag=7):
    """A checkpoint: every rack in `racks` writes its state as this record finds it, with all that
    is decided before it and nothing behind it. Once more, `written`, when all of them have."""

    number: Count
    """Of the checkpoint in this lineage, from 1."""
    name: Text
    lineage: Hex
    racks: Racks
    """Ascending. Of the second record: those that have written and are still there."""
    written: bool = False


class Last(Word, frozen=True):
    """The highest offers of one member and fragment that were named, and that ended at all."""

    member: Member
    fragment: U16
    named: Count
    version: Count
    """Of the commit that named it."""
    ended: Count
    capture_step: Count = 0
    tokens: Count = 0
    steps: Count = 0
    """Of the one that was named last, with the two before; 0: none was."""


class Snapshot(Word, frozen=True):
    """What records 1..index add up to, in their place: for a log whose reader is too far behind."""

    index: Count
    chain: Hex
    format: Count
    lineages: Annotated[tuple[tuple[Count, Hex], ...], Meta(max_length=64)]
    """(index, hash) of the records that began the job, or began it anew."""
    epoch: Count
    number: Count
    """Of the roster."""
    members: Annotated[tuple[Seat, ...], Meta(max_length=64)]
    learners: Racks
    witness: Member | None
    former: Annotated[tuple[Member, ...], Meta(max_length=64)]
    policy: Policy
    plan: Hex
    versions: Versions
    digests: Annotated[tuple[Digests, ...], Meta(max_length=1024)]
    last: Annotated[tuple[Last, ...], Meta(max_length=65536)]
    norms: Annotated[
        tuple[Annotated[tuple[Norm, ...], Meta(max_length=64)], ...], Meta(max_length=1024)
    ]
    rounds: Rounds
    demoted: Racks = ()
    """Learners that had a vote."""
    marks: Count = 0
    """Checkpoints so far."""
    mark: Mark | None = None
    """The newest of them while its racks write it."""


Record = Genesis | Commit | Roster | Drop | Epoch | Lineage | Mark
Records = Annotated[tuple[Record, ...], Meta(max_length=4096)]


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
    """Incarnations of its rack that, as it has heard, have the seat: this was said later, and the
    lives of a rack follow each other, so they are over."""
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


class Retire(Word, frozen=True, tag=19):
    """A person attests that this life of a rack is over, and that none comes after it soon."""

    member: Member


class Refusal(Word, frozen=True, tag=11):
    """The coordinator's no. kind: plan, resume, taken, started, racks, over."""

    incarnation: Count
    kind: Text
    detail: Text


class Ballot(Word, frozen=True):
    """All that a voter has promised and accepted. It accepted its whole log in epoch `accepted`.

    `records` behind `prev` only for a candidate, who asks for what it does not know.
    """

    promised: Count
    accepted: Count
    last: Count
    decided: Count
    prev: Count
    chain: Hex
    records: Records


class Prepare(State, frozen=True, tag=16):
    """A candidate asks for the promise to accept nothing of a lower epoch any more, and for the
    records behind `after`, up to which it knows that all is decided."""

    epoch: Count
    lineage: Hex
    after: Count


class Vote(State, frozen=True, tag=17):
    """A voter to a candidate or, where it leads no rack, to the coordinator."""

    lineage: Hex
    ballot: Ballot
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


class Report(State, frozen=True, tag=12):
    """Leader to coordinator: the state of a rack, aggregated over all its ranks."""

    to: Count
    """Incarnation of the coordinator whose orders it heard last; 0: it has heard none. What waited
    for a former life of the receiver is not for this one."""
    ballot: Ballot
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
