"""The records of the log, and the nouns that they are made of. Plain values.

Everything here travels inside messages and is hashed into the log's chain: a change of meaning
changes RECORDS_FORMAT.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from functools import cache
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta, Struct

from mend.types import MS, SECOND, Address, Member

U16 = Annotated[int, Meta(ge=0, le=0xFFFF)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
AtLeastOne = Annotated[int, Meta(ge=1, le=2**62)]
Hex = Annotated[str, Meta(max_length=64, pattern=r"^([0-9a-f]{32})*([0-9a-f]{2})*\Z")]
"""Bytes. The pattern takes 32 digits at once: pair by pair it costs 20 us for a digest, of which a
result has one per rank."""
TEXT_MAX = 4096
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
Where = Annotated[str, Meta(max_length=256, pattern="^tcp://")]
Sizes = Annotated[tuple[Count, ...], Meta(max_length=1024)]
Digests = Annotated[tuple[Hex, ...], Meta(max_length=1024)]
Versions = Annotated[tuple[Annotated[int, Meta(ge=-1, le=2**62)], ...], Meta(max_length=1024)]
"""Newest version per fragment; -1 = none yet."""
Racks = Annotated[tuple[U16, ...], Meta(max_length=128)]
Facts = Annotated[tuple[tuple[Text, Text], ...], Meta(max_length=100_000)]

SUMS_BYTES_MAX = 4 << 20
"""Limit of the partials in one report of a rank, and of a total: half a frame."""

Blob = Annotated[bytes, Meta(max_length=SUMS_BYTES_MAX)]
"""Opaque to the protocol; its reader checks it."""

NORM_MAX = 2.0**64
"""Magnitudes from here on have no square in fp32: no norm, variance or second moment of such a
weight is a number. Whatever reaches it is treated like an infinity."""

Norm = Annotated[float, Meta(ge=0, lt=NORM_MAX)]
"""Greatest magnitude of a delta: a maximum is exact, however the delta is sharded."""

BAD_MAX = 1024

CHECKSUM_BYTES = 16
"""Length of the checksum of a payload. An offer has one per rank and is sent to every rack: bytes,
not hex."""

RECORDS_FORMAT = 6
"""What the records of a log mean; another one is refused by name. 1: shares without norms. 2: every
witness votes, and merges count no absent racks. 3: rounds wait for no racks in particular, and jobs
begin at version 0, without checkpoints. 4: racks that leave are never absent. 5: half of the racks
of a lineage may decide, whatever they hold."""


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

    The bytes are pulled.
    """

    member: Member
    fragment: U16
    seq: Count
    base: Count
    capture_step: Count
    tokens: AtLeastOne
    steps: AtLeastOne
    checksums: Annotated[bytes, Meta(max_length=1024 * CHECKSUM_BYTES)]
    """Checksums of the payloads of all ranks, end to end."""
    applied: Count
    """Version the rack trains on now; grows while the offer stays open."""
    norm: Norm = 0.0
    sizes: Sizes = ()
    """Bytes of the payload of each rank; empty where they follow from plan and codec."""
    closing: bool = False
    """The last one of its rack, whose script has ended."""

    def checksum(self, rank: int) -> str:
        """Checksum of the payload of one rank, hex; empty if there is none."""
        return self.checksums[CHECKSUM_BYTES * rank : CHECKSUM_BYTES * (rank + 1)].hex()


def checksums_of(each: Iterable[str]) -> bytes:
    """Checksums of all ranks in rank order, from hex to the bytes of an offer."""
    return b"".join([bytes.fromhex(checksum) for checksum in each])


class MergeMember(WireStruct, frozen=True):
    """One member of a merge, as the log remembers it."""

    member: Member
    seq: Count
    base: Count
    capture_step: Count
    tokens: AtLeastOne
    steps: AtLeastOne
    norm: Norm = 0.0
    closing: bool = False


def all_closing(members: Iterable[Offer | MergeMember], absent: Absentees) -> bool:
    """Whether no training follows this merge: then it takes no momentum along."""
    return all(each.closing for each in (*members, *absent))


def merge_member_of(offer: Offer) -> MergeMember:
    """What the log remembers of an offer that is merged."""
    return MergeMember(
        offer.member,
        offer.seq,
        offer.base,
        offer.capture_step,
        offer.tokens,
        offer.steps,
        offer.norm,
        offer.closing,
    )


class Absent(WireStruct, frozen=True):
    """A rack that is not in a merge and has trained, or trains, beside its members. It weighs as an
    offer of so many tokens and steps. `closing`: it trains no more."""

    rack: U16
    tokens: AtLeastOne
    steps: AtLeastOne
    closing: bool = False


Absentees = Annotated[tuple[Absent, ...], Meta(max_length=64)]
"""Ascending by rack."""

Rounds = Annotated[tuple[Count, ...], Meta(max_length=1024)]
"""Per fragment how many rounds it has merged, in parts of `weights.WHOLE`."""


class Ended(WireStruct, frozen=True):
    """An offer that will not be merged."""

    member: Member
    seq: Count


class MomentFragments(WireStruct, frozen=True):
    """Fragments of one moment of the inner optimizers, or of running statistics, which share a
    period."""

    count: Annotated[int, Meta(ge=1, le=1024)]
    period_steps: AtLeastOne


class Filled(NamedTuple):
    """Which setting of `MendConfig` fills a field of the policy, and how. The only place that says
    so: the policy is made from it, and so are the texts of a refusal."""

    setting: str
    unit_ns: int = 0
    """Of a time, which the policy has in ns, and -1 for "adaptive"; 0: it is no time."""
    among: tuple[str, ...] = ()
    """The field says whether the setting is one of these; empty: it has its value."""

    def of(self, value: Any) -> Any:
        """The field, from the value of the setting."""
        if self.among:
            return value in self.among
        if not self.unit_ns:
            return value
        return -1 if value == "adaptive" else int(value * self.unit_ns)

    def text(self, field: Any) -> str:
        """The value of the setting, from the field. Unequal fields have unequal texts: 300 ms in
        seconds is 0.3."""
        if self.among:
            return " or ".join(self.among) if field else f"not {' or '.join(self.among)}"
        if self.unit_ns:
            exact = f"{(Decimal(field) / self.unit_ns).normalize():f}"
            return "adaptive" if field < 0 else exact
        return ", ".join(map(str, field)) or "empty" if isinstance(field, tuple) else str(field)


class Policy(WireStruct, frozen=True):
    """What the coordinator must know of the racks' configuration; equal on all of them. A rack
    finds `ranks` and `moments` when it starts; all other fields are settings."""

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
    """Versions over which the overlap rises; 0: it does not."""
    stall_max_ns: Annotated[Count, Filled("stall_max_s", SECOND)]
    """Compared, as racks that waited unequally long in the same outage would come out of it at
    different steps."""
    evict_ns: Annotated[Count, Filled("seat_timeout_s", SECOND)]
    """Silence that costs a rack its seat; 0 = never."""
    restart_attests: Annotated[bool, Filled("restart_attests_death")]
    """Whether a rack that is started again proves that its former life is over."""
    token_weighted: Annotated[bool, Filled("token_weighted_merge")] = True
    """Racks weigh by their tokens; else all alike."""
    expected: Annotated[Racks, Filled("expected_racks")] = ()
    """Racks that a round waits for, ascending; empty: for all that are live."""
    moments: Annotated[tuple[MomentFragments, ...], Meta(max_length=3)] = ()
    """The last fragments: those of moments and of running statistics, not of weights."""
    acts: Annotated[bool, Filled("failslow_action", among=("act", "evict"))] = False
    """Whether slow racks are mitigated."""
    evicts: Annotated[bool, Filled("failslow_action", among=("evict",))] = False
    """Whether they may also be evicted, to be started again."""
    sharded: Annotated[bool, Filled("exchange_plan", among=("sharded",))] = False
    """Whether racks merge a slice each and pull the others' merged slices (coordination/slices)."""

    @property
    def of_weights(self) -> int:
        """How many fragments are, the first ones."""
        return self.fragments - sum(group.count for group in self.moments)


@cache
def filled_fields() -> dict[str, Filled]:
    """Fields of the policy that are settings."""
    hints = get_type_hints(Policy, include_extras=True).items()
    extras = {name: getattr(hint, "__metadata__", ()) for name, hint in hints}
    found = {name: [e for e in each if isinstance(e, Filled)] for name, each in extras.items()}
    return {name: each[0] for name, each in found.items() if each}


# ------------------------------------------------------------------ records of the log


class Genesis(WireStruct, frozen=True, tag=1):
    """The first record: who takes part and which bits version 0 has. digests[fragment][rank]."""

    roster: Annotated[tuple[Seat, ...], Meta(max_length=64)]
    witness: Member | None
    policy: Policy
    plan: Hex
    digests: Annotated[tuple[Digests, ...], Meta(max_length=1024)]
    format: Count = RECORDS_FORMAT
    """Format of this and all later records."""
    non_voters: Racks = ()
    """The witness, by its rack number, where it has no vote."""
    versions: Versions = ()
    """Versions that `digests` are of, in a job that resumes a checkpoint. Empty: 0 of every
    fragment."""
    rounds: Rounds = ()
    """In a job that resumes a checkpoint: as in `Lineage`."""
    parent: Hex = ""
    """The lineage that the checkpoint is of; empty: the job begins from nothing."""
    parent_checkpoint: Count = 0
    """Number of the checkpoint in that lineage."""

    def first(self) -> tuple[int, ...]:
        """The version of every fragment that the job begins with."""
        return self.versions or (0,) * len(self.digests)


class Commit(WireStruct, frozen=True, tag=2):
    """Fragment goes from version - 1 to version. Members ascending; digests per rank."""

    fragment: U16
    version: Count
    members: Annotated[tuple[MergeMember, ...], Meta(max_length=64)]
    dropped: Annotated[tuple[Ended, ...], Meta(max_length=64)]
    digests: Digests
    reason: Text
    absent: Absentees = ()


class Roster(WireStruct, frozen=True, tag=3):
    """The members from here on. Empty: the job is over, and `non_voters` are the racks that were
    not there then."""

    number: Count
    members: Annotated[tuple[Seat, ...], Meta(max_length=64)]
    non_voters: Racks
    """Which of them have no vote; the witness, too, by its rack number."""
    witness: Member | None
    reason: Text
    retired: Racks = ()
    """Racks that a person has retired: they lose their seats for good, or were evicted and are not
    back. What others keep for their return is freed."""


class Drop(WireStruct, frozen=True, tag=4):
    """Offers that end without a commit: too old, at a time when nothing else is there to commit,
    or not fit to be merged."""

    fragment: U16
    dropped: Annotated[tuple[Ended, ...], Meta(max_length=64)]
    reason: Text
    diverged: bool = False
    """Their racks' weights are not worth merging; the racks stop."""


class Ballot(WireStruct, frozen=True, tag=5):
    """A take-over: from here on `ballot` decides (docs/internals/protocol.md, Taking over)."""

    ballot: Count


class Lineage(WireStruct, frozen=True, tag=6):
    """All other voters are dead: the remaining members go on from the newest versions they hold."""

    ballot: Count
    number: Count
    members: Annotated[tuple[Seat, ...], Meta(max_length=64)]
    non_voters: Racks
    """Which of them do not hold these versions, and have no vote until they do."""
    witness: Member | None
    dead: Annotated[tuple[Member, ...], Meta(max_length=64)]
    versions: Versions
    digests: Annotated[tuple[Digests, ...], Meta(max_length=1024)]
    reason: Text
    rounds: Rounds = ()
    unanimous: bool = False
    """Whether no member holds all of these versions: then every voter is needed for a decision,
    until a roster says otherwise."""


class CheckpointRecord(WireStruct, frozen=True, tag=7):
    """A checkpoint: every rack in `racks` writes its state as this record finds it, with all that
    is decided before it and nothing after it. Once more, `written`, when all of them have."""

    number: Count
    """Number of the checkpoint in this lineage, from 1."""
    name: Text
    lineage: Hex
    racks: Racks
    """Ascending. Of the second record: those that have written and are still there."""
    written: bool = False


AWAITED, SMALLER, NOT_AWAITED, EVICTED = 0, 2, 3, 4
"""Stages of a mitigation: nothing is done; it takes fewer micro-batches; rounds do not wait for it
either; it leaves, to be started again."""

EVICTIONS_MAX = 2
"""Evictions of one rack in one job. If two restarts have not mended a slowdown, a third will
not."""


class Mitigation(WireStruct, frozen=True, tag=8):
    """What is done about a slow rack from here on, in place of what was done before."""

    rack: U16
    stage: Annotated[int, Meta(ge=0, le=EVICTED)]
    reason: Text
    batch_pct: Annotated[int, Meta(ge=1, le=100)] = 100
    """Percent of the micro-batches of a step that it takes, where its script asks."""


class Last(WireStruct, frozen=True):
    """The highest offers of one member and fragment that were named, and that ended at all."""

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
    """With the three before: of the offer that was named last; 0 steps: none was."""


class Snapshot(WireStruct, frozen=True):
    """The state after records 1..index, in place of the records: for a reader that is too late for
    them."""

    index: Count
    chain: Hex
    format: Count
    lineages: Annotated[tuple[tuple[Count, Hex], ...], Meta(max_length=64)]
    """(index, hash) of the records that began the job, or began it anew."""
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
    """Learners that had a vote."""
    checkpoint: CheckpointRecord | None = None
    """The newest checkpoint, written or not."""
    checkpoint_versions: Versions = ()
    """What was decided of every fragment before it."""
    mitigations: Annotated[tuple[Mitigation, ...], Meta(max_length=64)] = ()
    """In force, ascending by rack."""
    evictions: Annotated[tuple[tuple[U16, Count], ...], Meta(max_length=64)] = ()
    """(rack, how often it was evicted), ascending; without those that never were."""
    unanimous: bool = False
    """As in `Lineage`, if no roster followed."""


Record = Genesis | Commit | Roster | Drop | Ballot | Lineage | CheckpointRecord | Mitigation
Records = Annotated[tuple[Record, ...], Meta(max_length=4096)]


class AcceptorState(WireStruct, frozen=True):
    """What a voter has promised and accepted. It accepted its whole log in ballot `accepted`.

    `records` after `prev` only for a candidate, which asks for records that it does not know.
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
