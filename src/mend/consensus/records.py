"""The records of the log, and the values that they consist of. Plain data.

Everything here travels inside messages and is hashed into the log's chain: a change of meaning
needs a new RECORDS_FORMAT.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta, Struct

from mend.types import MS, SECOND, Address, Member, visible

U16 = Annotated[int, Meta(ge=0, le=0xFFFF)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
AtLeastOne = Annotated[int, Meta(ge=1, le=2**62)]
Hex = Annotated[str, Meta(max_length=64, pattern=r"^([0-9a-f]{32})*([0-9a-f]{2})*\Z")]
"""Bytes in hex. The pattern consumes 32 digits at a time: digit pairs would cost 20 us per digest,
and a result has one digest per rank."""
TEXT_MAX = 4096
"""Senders cut longer texts: with one, receivers would refuse the whole message."""

Text = Annotated[str, Meta(max_length=TEXT_MAX)]
Where = Annotated[str, Meta(max_length=256, pattern="^tcp://")]
Sizes = Annotated[tuple[Count, ...], Meta(max_length=1024)]
Digests = Annotated[tuple[Hex, ...], Meta(max_length=1024)]
Versions = Annotated[tuple[Annotated[int, Meta(ge=-1, le=2**62)], ...], Meta(max_length=1024)]
"""Newest version per fragment; -1 = none yet."""
Racks = Annotated[tuple[U16, ...], Meta(max_length=128)]
Facts = Annotated[tuple[tuple[Text, Text], ...], Meta(max_length=100_000)]

SUMS_BYTES_MAX = 4 << 20
"""Limit of the partial sums in one report of a rank, and of a total: half a frame."""

Blob = Annotated[bytes, Meta(max_length=SUMS_BYTES_MAX)]
"""Opaque to the protocol; its reader checks it."""

NORM_MAX = 2.0**64
"""Magnitudes from here on overflow when squared in fp32, so no norm, variance or second moment of
them is finite. A weight that reaches it is treated like Inf."""

Norm = Annotated[float, Meta(ge=0, lt=NORM_MAX)]
"""Greatest magnitude of a delta: a maximum is exact, however the delta is sharded."""

BAD_MAX = 1024

EPOCHS_MAX = 1000
"""Limit of the epochs of a data ledger, because in lockstep one record gives all of them out."""

CHECKSUM_BYTES = 16
"""Length of the checksum of a payload. Stored as bytes and not as hex, because an offer has one per
rank and is sent to every rack."""

RECORDS_FORMAT = 9
"""Version of the meaning of log records; a log of another format is refused with an error that
names it. 1: merge members without norms. 2: every witness votes, and merges do not count absent
racks. 3: rounds do not wait for expected racks, and jobs begin at version 0, without checkpoints.
4: racks that leave are never absent. 5: half of the racks of a lineage may decide, whatever they
hold. 6: without units of data, and momentum is in every merge. 7: one epoch of units. 8: why rounds
closed as text alone."""


class WireStruct(Struct, frozen=True, array_like=True):
    """Base of everything that travels inside a message."""


# ------------------------------------------------------------------ nouns of the log


class Seat(WireStruct, frozen=True):
    """A member with the addresses of its leader and of its ranks' lanes."""

    member: Member
    address: Where
    lanes: Annotated[tuple[Address, ...], Meta(max_length=1024)]


class Offer(WireStruct, frozen=True):
    """Header of a contribution: one rack's encoded anchor - snapshot of one fragment.

    The payload itself is pulled.
    """

    member: Member
    fragment: U16
    seq: Count
    base: Count
    capture_step: Count
    tokens: AtLeastOne
    steps: AtLeastOne
    checksums: Annotated[bytes, Meta(max_length=1024 * CHECKSUM_BYTES)]
    """Checksums of the payloads of all ranks, concatenated."""
    applied: Count
    """Version that the rack trains on now. It grows while the offer stays open."""
    norm: Norm = 0.0
    sizes: Sizes = ()
    """Payload bytes per rank; empty if they follow from plan and codec."""
    closing: bool = False
    """Whether this is the last offer of its rack, whose script has ended."""
    units: Count = 0
    """Units of data whose work it contains, with those of all earlier offers of its member."""
    along: Count = 0
    """Elements of all ranks that have the sign of the outer momentum of `base`."""
    against: Count = 0
    """Elements that have the other sign."""

    def checksum(self, rank: int) -> str:
        """Checksum of the payload of one rank, hex; empty if there is none."""
        return self.checksums[CHECKSUM_BYTES * rank : CHECKSUM_BYTES * (rank + 1)].hex()


def checksums_of(each: Iterable[str]) -> bytes:
    """Concatenates the hex checksums of all ranks, in rank order, to the bytes of an offer."""
    return b"".join([bytes.fromhex(checksum) for checksum in each])


class MergeMember(WireStruct, frozen=True):
    """One member of a merge, as the log records it: an `Offer` without payload details."""

    member: Member
    seq: Count
    base: Count
    capture_step: Count
    tokens: AtLeastOne
    steps: AtLeastOne
    norm: Norm = 0.0
    closing: bool = False
    units: Count = 0
    along: Count = 0
    against: Count = 0


def all_closing(members: Iterable[Offer | MergeMember], absent: Absentees) -> bool:
    """Whether no training follows this merge. Such a merge applies no momentum."""
    return all(each.closing for each in (*members, *absent))


def merge_member_of(offer: Offer) -> MergeMember:
    """The log entry of an offer that is merged."""
    return MergeMember(*[getattr(offer, name) for name in MergeMember.__struct_fields__])


class Absent(WireStruct, frozen=True):
    """A rack that has trained, or trains, at the time of a merge and is not in it. It weighs like
    an offer of `tokens` and `steps`. `closing`: it has stopped training."""

    rack: U16
    tokens: AtLeastOne
    steps: AtLeastOne
    closing: bool = False


Absentees = Annotated[tuple[Absent, ...], Meta(max_length=64)]
"""Ascending by rack."""

Rounds = Annotated[tuple[Count, ...], Meta(max_length=1024)]
"""Rounds merged per fragment, in units of 1 / `weights.WHOLE`."""


class Ended(WireStruct, frozen=True):
    """An offer that will not be merged."""

    member: Member
    seq: Count


class MomentFragments(WireStruct, frozen=True):
    """Fragments of one moment of the inner optimizers, or of running statistics, that share a
    period."""

    count: Annotated[int, Meta(ge=1, le=1024)]
    period_steps: AtLeastOne


class Filled(NamedTuple):
    """The setting of `MendConfig` that fills a field of the policy, and how. The only such table:
    the policy and the texts of refusals are made from it."""

    setting: str
    unit_ns: int = 0
    """Unit of a duration, which the policy holds in ns (-1 for "adaptive"); 0: not a duration."""
    among: tuple[str, ...] = ()
    """The field says whether the setting is one of these values; empty: the field is the value."""

    def of(self, value: Any) -> Any:
        """The field, from the value of the setting."""
        if self.among:
            return value in self.among
        if not self.unit_ns:
            return value
        return -1 if value == "adaptive" else int(value * self.unit_ns)

    def text(self, field: Any) -> str:
        """The value of the setting, from the field, exact (300 ms are 0.3 s): unequal fields have
        unequal texts."""
        if self.among:
            return " or ".join(self.among) if field else f"not {' or '.join(self.among)}"
        if self.unit_ns:
            exact = f"{(Decimal(field) / self.unit_ns).normalize():f}"
            return "adaptive" if field < 0 else exact
        if isinstance(field, tuple):
            return ", ".join(map(str, field)) or "empty"
        return visible(str(field))


class Policy(WireStruct, frozen=True):
    """The part of the configuration that the coordinator needs; equal on all racks. `ranks` and
    `moments` are found at the start of a rack; all other fields are settings."""

    racks: Annotated[int, Meta(ge=1, le=64), Filled("racks")]
    ranks: Annotated[int, Meta(ge=1, le=1024)]
    fragments: Annotated[int, Meta(ge=1, le=1024), Filled("fragments")]
    merge_min_racks: Annotated[Count, Filled("merge_min_racks")]
    grace_ns: Annotated[int, Meta(ge=-1, le=2**62), Filled("grace_window_ms", MS)]
    """Fixed window; -1 = adaptive."""
    lockstep: Annotated[bool, Filled("lockstep")]
    staleness_max_rounds: Annotated[Count, Filled("staleness_max_rounds")]
    period_steps: Annotated[Count, Filled("sync_period_steps")]
    overlap_steps: Annotated[Count, Filled("overlap_steps")]
    overlap_ramp: Annotated[Count, Filled("outer_ramp_rounds")]
    """Versions over which the overlap rises; 0: it is constant."""
    stall_max_ns: Annotated[Count, Filled("stall_max_s", SECOND)]
    """Must be equal, because racks with unequal limits would leave the same outage at different
    steps."""
    seat_timeout_ns: Annotated[Count, Filled("seat_timeout_s", SECOND)]
    """Silence after which a rack loses its seat; 0: never."""
    restart_attests: Annotated[bool, Filled("restart_attests_death")]
    """Whether a restarted rack proves that its former incarnation has ended."""
    token_weighted: Annotated[bool, Filled("token_weighted_merge")] = True
    """Whether racks are weighted by tokens; otherwise equally."""
    expected: Annotated[Racks, Filled("expected_racks")] = ()
    """Racks that a round waits for, ascending; empty: all live racks."""
    moments: Annotated[tuple[MomentFragments, ...], Meta(max_length=3)] = ()
    """The last fragments: those of moments and of running statistics instead of weights."""
    acts: Annotated[bool, Filled("failslow_action", among=("act", "evict"))] = False
    """Whether slow racks are mitigated."""
    evicts: Annotated[bool, Filled("failslow_action", among=("evict",))] = False
    """Whether slow racks may also be evicted, to be restarted."""
    sharded: Annotated[bool, Filled("exchange_plan", among=("sharded",))] = False
    """Whether each rack merges one slice and pulls the others' merged slices
    (coordination/slices)."""
    units: Count = 0
    """Units of data of an epoch that the log gives out; 0: none. Found at the start of a rack."""
    epochs: Annotated[int, Meta(ge=1, le=EPOCHS_MAX)] = 1
    """Passes over these units; those of epoch e begin at e x `units`."""

    @property
    def of_weights(self) -> int:
        """Number of fragments of weights; they come first."""
        return self.fragments - sum(group.count for group in self.moments)


@cache
def filled_fields() -> dict[str, Filled]:
    """Fields of the policy that are settings."""
    hints = get_type_hints(Policy, include_extras=True).items()
    extras = {name: getattr(hint, "__metadata__", ()) for name, hint in hints}
    found = {name: [e for e in each if isinstance(e, Filled)] for name, each in extras.items()}
    return {name: each[0] for name, each in found.items() if each}


Span = tuple[Count, AtLeastOne]
"""(first unit, number of units)"""

Spans = Annotated[tuple[Span, ...], Meta(max_length=65536)]

Positions = Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=64)]
"""(version, units merged up to it), ascending."""


class UnitBook(WireStruct, frozen=True):
    """The units of data of one member. It takes them in the order in which it got them; a position
    counts those before it."""

    member: Member
    first: Count
    """Position of the first unit of `spans`. All before it are permanently done."""
    spans: Spans
    merged: Annotated[tuple[Positions, ...], Meta(max_length=1024)]
    """Per fragment of weights. The newest versions are kept, because a lineage may undo them."""
    seated: bool = True

    @property
    def given(self) -> int:
        """Number of units that the member has got."""
        return self.first + sum(count for _, count in self.spans)

    @property
    def done(self) -> int:
        """Number of units whose work is merged into every fragment."""
        return min(positions[-1][1] for positions in self.merged)


class Units(WireStruct, frozen=True):
    """Which units of data are free, given to a member, and done."""

    total: Count
    free: Spans
    """Ascending."""
    fresh: Count = 0
    """No unit from this one on was ever given."""
    again: Count = 0
    """Units that were given again, each as often as it was."""
    ended: bool = False
    """Whether nothing was free when all racks had taken what they had got."""
    books: Annotated[tuple[UnitBook, ...], Meta(max_length=256)] = ()
    """Ascending by member."""

    @property
    def open(self) -> int:
        """Units that members have, and that are not done."""
        return sum(book.given - book.done for book in self.books)

    @property
    def done(self) -> int:
        return self.total - self.open - sum(count for _, count in self.free)


# ------------------------------------------------------------------ records of the log


class Genesis(WireStruct, frozen=True, tag=1):
    """The first record: the members and the digests of the initial versions.
    digests[fragment][rank]."""

    roster: Annotated[tuple[Seat, ...], Meta(max_length=64)]
    witness: Member | None
    policy: Policy
    plan: Hex
    digests: Annotated[tuple[Digests, ...], Meta(max_length=1024)]
    format: Count = RECORDS_FORMAT
    """Format of this and all later records."""
    non_voters: Racks = ()
    """The rack number of the witness, if it has no vote."""
    versions: Versions = ()
    """Versions of `digests` in a job that resumes a checkpoint. Empty: 0 for every fragment."""
    rounds: Rounds = ()
    """As in `Lineage`, in a job that resumes a checkpoint."""
    parent: Hex = ""
    """Lineage of the resumed checkpoint; empty: the job does not resume one."""
    parent_checkpoint: Count = 0
    """Number of the checkpoint in that lineage."""
    units: Units | None = None
    """Units of data, in a job that gives them out."""

    def first(self) -> tuple[int, ...]:
        """The initial version of every fragment."""
        return self.versions or (0,) * len(self.digests)


ClosedBy = Literal["all-in", "rest-in", "grace-over", "expected-in", "slow-left", "lockstep"]
"""Why a round did not wait longer (docs/internals/protocol.md, How long a round waits)."""


class Commit(WireStruct, frozen=True, tag=2):
    """A fragment goes from version - 1 to version. Members ascend; one digest per rank."""

    fragment: U16
    version: Count
    members: Annotated[tuple[MergeMember, ...], Meta(max_length=64)]
    dropped: Annotated[tuple[Ended, ...], Meta(max_length=64)]
    digests: Digests
    closed_by: ClosedBy
    detail: Text = ""
    """The racks that this is about, and what became of the round then; for people."""
    absent: Absentees = ()

    @property
    def reason(self) -> str:
        """Why the round closed, as people read it."""
        return ", ".join(filter(None, (self.closed_by, self.detail)))


class Roster(WireStruct, frozen=True, tag=3):
    """The members from here on. Without members the job is over, and `non_voters` are the racks
    that were missing at its end."""

    number: Count
    members: Annotated[tuple[Seat, ...], Meta(max_length=64)]
    non_voters: Racks
    """The racks without a vote; includes the rack number of the witness if it has none."""
    witness: Member | None
    reason: Text
    retired: Racks = ()
    """Racks that a person has retired: they lose their seats permanently, or were evicted and have
    not returned. The state that other racks keep for their return is freed."""


class Drop(WireStruct, frozen=True, tag=4):
    """Offers that end without a commit: they are too old while there is nothing else to commit, or
    are not fit to be merged."""

    fragment: U16
    dropped: Annotated[tuple[Ended, ...], Meta(max_length=64)]
    reason: Text
    diverged: bool = False
    """The racks of these offers have diverged and stop."""


class Ballot(WireStruct, frozen=True, tag=5):
    """A take-over: from here on `ballot` decides (docs/internals/protocol.md, Taking over)."""

    ballot: Count


DEAD_MAX = 64
"""Limit of the dead members that a lineage names."""


class Lineage(WireStruct, frozen=True, tag=6):
    """All other voters are dead: the remaining members continue from the newest versions they
    hold."""

    ballot: Count
    number: Count
    members: Annotated[tuple[Seat, ...], Meta(max_length=64)]
    non_voters: Racks
    """Members that lack some of these versions. They have no vote until they hold them."""
    witness: Member | None
    dead: Annotated[tuple[Member, ...], Meta(max_length=DEAD_MAX)]
    versions: Versions
    digests: Annotated[tuple[Digests, ...], Meta(max_length=1024)]
    reason: Text
    rounds: Rounds = ()
    unanimous: bool = False
    """Whether no member holds all of these versions. Then a decision needs every voter, until the
    next roster."""


class CheckpointRecord(WireStruct, frozen=True, tag=7):
    """A checkpoint: every rack in `racks` writes its state with everything that is decided before
    this record and nothing after it. A second record with `written` follows when all have
    written."""

    number: Count
    """Number of the checkpoint in this lineage, from 1."""
    name: Text
    lineage: Hex
    racks: Racks
    """Ascending. In the second record: the racks that have written and still have their seats."""
    written: bool = False


AWAITED, SMALLER, NOT_AWAITED, EVICTED = 0, 2, 3, 4
"""Stages of a mitigation: none; the rack takes fewer micro-batches; rounds do not wait for it
either; it leaves, to be restarted."""

EVICTIONS_MAX = 2
"""Evictions of one rack in one job. If two restarts have not cured a slowdown, a third will not."""


class Mitigation(WireStruct, frozen=True, tag=8):
    """The mitigation of a slow rack from here on; it replaces the previous one."""

    rack: U16
    stage: Annotated[int, Meta(ge=0, le=EVICTED)]
    reason: Text
    batch_pct: Annotated[int, Meta(ge=1, le=100)] = 100
    """Percentage of the micro-batches of a step that the rack takes, if its script asks for it."""


class Grant(WireStruct, frozen=True, tag=9):
    """Gives free units of data to members. Without shares and `back` no unit is left to give."""

    shares: Annotated[tuple[tuple[Member, Spans], ...], Meta(max_length=64)]
    back: Annotated[tuple[Member, ...], Meta(max_length=64)] = ()
    """Members that have stopped training: their units that are not done become free."""


class Last(WireStruct, frozen=True):
    """The newest offers of one member and fragment: the last that was named, and the last that
    ended."""

    member: Member
    fragment: U16
    named: Count
    version: Count
    """Version of the commit that named it."""
    ended: Count
    capture_step: Count = 0
    tokens: Count = 0
    steps: Count = 0
    base: Count = 0
    """This and the three fields before it describe the last named offer; 0 steps: there is none."""


class Snapshot(WireStruct, frozen=True):
    """The state after records 1..index, for a reader that is too late for the records
    themselves."""

    index: Count
    chain: Hex
    format: Count
    lineages: Annotated[tuple[tuple[Count, Hex], ...], Meta(max_length=64)]
    """(index, hash) of the records that began the job or a new lineage."""
    ballot: Count
    number: Count
    """Number of the roster."""
    members: Annotated[tuple[Seat, ...], Meta(max_length=64)]
    non_voters: Racks
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
    """Racks that lost their vote and kept their seats."""
    checkpoint: CheckpointRecord | None = None
    """The newest checkpoint, complete or not."""
    checkpoint_versions: Versions = ()
    """What was decided of every fragment before it."""
    mitigations: Annotated[tuple[Mitigation, ...], Meta(max_length=64)] = ()
    """In force, ascending by rack."""
    evictions: Annotated[tuple[tuple[U16, Count], ...], Meta(max_length=64)] = ()
    """(rack, number of evictions), ascending, without racks that were never evicted."""
    unanimous: bool = False
    """As in `Lineage`, until the next roster."""
    units: Units | None = None
    checkpoint_units: Units | None = None
    """As they were at the newest checkpoint."""


Record = Genesis | Commit | Roster | Drop | Ballot | Lineage | CheckpointRecord | Mitigation | Grant
Records = Annotated[tuple[Record, ...], Meta(max_length=4096)]


class AcceptorState(WireStruct, frozen=True):
    """What a voter has promised and accepted. `accepted` is the ballot in which it accepted its
    whole log.

    `records` (after `prev`) are present only for a candidate, which asks for the records that it
    lacks.
    """

    promised: Count
    accepted: Count
    last: Count
    decided: Count
    prev: Count
    chain: Hex
    records: Records


_encoder = msgspec.msgpack.Encoder()


def encode_record(record: Record) -> bytes:
    """Canonical bytes of a log record, for the chain hash."""
    return _encoder.encode(record)
