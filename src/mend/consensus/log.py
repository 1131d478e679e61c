"""The log of decisions, and the state after its records.

Records count from 1. Decided records are final. A replica may also hold later records that no
quorum has accepted; a later ballot may remove them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Set
from copy import copy
from dataclasses import dataclass, field

from mend.consensus.quorum import quorum
from mend.consensus.records import (
    AWAITED,
    EVICTED,
    NOT_AWAITED,
    RECORDS_FORMAT,
    Absent,
    CheckpointRecord,
    Commit,
    Drop,
    Ended,
    Genesis,
    Grant,
    Last,
    Lineage,
    MergeMember,
    Mitigation,
    Offer,
    Policy,
    Record,
    Roster,
    Seat,
    Snapshot,
    Units,
    encode_record,
)
from mend.consensus.units import give, merge, seat, undo
from mend.consensus.weights import mean_balance, merge_weights, momentum_waits, part_of, stretch_of
from mend.errors import ensure, require
from mend.types import WITNESS, Address, Member, Peer

RECORDS_KEPT = 4_096
"""Decided records that a replica keeps. Members that need earlier ones get a snapshot."""

FORMER_KEPT = 64
"""The members that lost their seats last, kept so that their late hellos are recognized."""

LINEAGES_SENT = 64

NORMS_KEPT = 64
"""Newest merged offers per fragment that a new offer is compared with."""

SENT_AT_ONCE = 256
"""Records in one message. A member that is further behind gets several messages."""

RECORDS_BYTES_MAX = 256 << 10
"""Limit of the bytes of decided records in flight to one reader."""

UNDECIDED_MAX = SENT_AT_ONCE // 2
"""Limit of the undecided records. It is lower than what fits into one message, because a voter
takes over the undecided end of a log as a whole or not at all."""


def voters_of(
    seats: Iterable[Seat], non_voters: Collection[int], witness: Member | None
) -> frozenset[Member]:
    """The voters of a roster. `non_voters` contains the rack number of the witness if it has no
    vote."""
    voters = {seat.member for seat in seats if seat.member.rack not in non_voters}
    return frozenset(voters | ({witness} if witness and WITNESS not in non_voters else set()))


def witness_votes(witness: Member | None, racks: int) -> bool:
    """Whether the witness votes: only if that makes the number of voters odd. With an odd number of
    racks, half of the voters, including the witness and the lowest rack, could decide without the
    bytes."""
    return witness is not None and racks % 2 == 0


@dataclass
class LogState:
    """The state after the records up to some index."""

    seats: dict[int, Seat] = field(default_factory=dict)
    non_voters: frozenset[int] = frozenset()
    """Racks without a vote: newcomers that still copy what is decided, and those in `demoted`; also
    the witness, if it has none."""
    unanimous: bool = False
    """Whether a decision needs every voter. True from a lineage in which each voter lacks a version
    that another holds, until the next roster."""
    demoted: frozenset[int] = frozenset()
    """Racks that lost their vote and kept their seats. They may hold bytes that no voter holds."""
    witness: Member | None = None
    roster_number: int = 0
    plan: str = ""
    policy: Policy | None = None
    ballot: int = 0
    former: tuple[Member, ...] = ()
    """The members that lost their seats last. A rack returns under another incarnation only."""
    versions: list[int] = field(default_factory=list)
    digests: list[tuple[str, ...]] = field(default_factory=list)
    ended: dict[tuple[Member, int], int] = field(default_factory=dict)
    """(member, fragment) -> highest seq that a commit named or that was dropped; seated members
    only."""
    named: dict[tuple[Member, int], tuple[int, int]] = field(default_factory=dict)
    """(seq, version) of the newest offer that a commit named. An offer that ended without being
    named was dropped."""
    work: dict[tuple[Member, int], tuple[int, int, int, int]] = field(default_factory=dict)
    """(capture step, tokens, steps, base) of the newest named offer: the weight of an absent rack,
    and the version that the rack had applied when its next work began."""
    rounds: list[int] = field(default_factory=list)
    """Rounds merged per fragment, in units of 1 / `weights.WHOLE`."""
    norms: list[tuple[float, ...]] = field(default_factory=list)
    """Per fragment the magnitude per step of the newest named offers, newest last."""
    checkpoint: CheckpointRecord | None = None
    """The newest checkpoint: its first record, or the second one, which lists the racks that wrote
    it."""
    checkpoint_versions: tuple[int, ...] = ()
    """Decided version of every fragment at that checkpoint."""
    units: Units | None = None
    """Units of data; None: the job gives none out."""
    checkpoint_units: Units | None = None
    """As they were at the newest checkpoint."""
    mitigations: Mapping[int, Mitigation] = field(default_factory=dict)
    """Mitigation in force by slow rack. That of an evicted rack stays until its next incarnation
    has the seat, a person has retired it, or a record declares it lost."""
    evictions: Mapping[int, int] = field(default_factory=dict)
    """Number of evictions by rack, without those that were never evicted."""
    mitigated: frozenset[int] = field(init=False)
    """Slow racks that rounds do not wait for."""

    def __post_init__(self) -> None:
        self._count_seats()
        self._mitigate(self.mitigations)

    @property
    def begun(self) -> bool:
        return bool(self.versions)

    @property
    def over(self) -> bool:
        return self.begun and not self.seats

    @property
    def checkpoint_number(self) -> int:
        """Number of the newest checkpoint."""
        return self.checkpoint.number if self.checkpoint is not None else 0

    def _count_seats(self) -> None:
        """Derive `voters` and `members` (all seated racks, and the witness). Cached, because every
        event reads them and only rosters change them."""
        self.voters = voters_of(self.seats.values(), self.non_voters, self.witness)
        self.members = voters_of(self.seats.values(), (), self.witness)

    def may_decide(self, votes: Set[Member]) -> bool:
        """Whether these members are enough to decide."""
        return self.voters <= votes if self.unanimous else quorum(votes, self.voters)

    def copy(self) -> LogState:
        """An independent copy."""
        other = copy(self)
        other.seats = dict(self.seats)
        other.versions, other.digests = list(self.versions), list(self.digests)
        other.ended, other.named = dict(self.ended), dict(self.named)
        other.work, other.rounds = dict(self.work), list(self.rounds)
        other.norms = list(self.norms)
        return other

    def member(self, rack: int) -> Member | None:
        seat = self.seats.get(rack)
        return seat.member if seat else None

    def is_evicted(self, rack: int) -> bool:
        """Whether the rack is to leave, or has left, to be started again."""
        done = self.mitigations.get(rack)
        return done is not None and done.stage == EVICTED

    @property
    def away(self) -> dict[int, Member]:
        """Evicted racks that have not returned, ascending, and their last members."""
        racks = [r for r in sorted(self.mitigations) if self.is_evicted(r) and r not in self.seats]
        if not racks:
            return {}
        former = {member.rack: member for member in self.former}
        return {rack: former[rack] for rack in racks if rack in former}

    def rail(self, me: Peer, first: int | None = None) -> tuple[Address, ...]:
        """Lane addresses of this rank's peers in the other racks: rack `first`, then ascending."""
        racks = [rack for rack in sorted(self.seats) if rack != me.rack]
        racks.sort(key=lambda rack: rack != first)
        return tuple(self.seats[rack].lanes[me.rank] for rack in racks)

    def units_given(self, member: Member) -> int:
        """Number of units of data that a member has got."""
        books = self.units.books if self.units is not None else ()
        return next((book.given for book in books if book.member == member), 0)

    def is_open(self, member: Member, fragment: int, seq: int) -> bool:
        """Whether a commit may still name an offer: its member has the seat, and no equally new or
        newer offer of it has ended."""
        return self.member(member.rack) == member and seq > self.ended.get((member, fragment), 0)

    def take(self, record: Record) -> None:
        """Apply one record. Raises InvariantError if it contradicts the log, which is a bug in the
        coordinator."""
        if isinstance(record, Genesis):
            ensure(not self.begun, "a second Genesis", record=record)
            self.units = record.units
            self.seats = {seat.member.rack: seat for seat in record.roster}
            self.witness, self.plan, self.policy = record.witness, record.plan, record.policy
            self.non_voters = frozenset(record.non_voters)
            self._count_seats()
            self._seat_units()
            self.versions = list(record.first())
            self.digests = list(record.digests)
            self.norms = [()] * len(record.digests)
            self.rounds = list(record.rounds) or [0] * len(record.digests)
        elif isinstance(record, Commit):
            fragment = record.fragment
            newest = self.versions[fragment]
            ensure(
                record.version == newest + 1,
                f"version {record.version} after {newest}",
                record=record,
            )
            racks = [share.member.rack for share in record.members]
            ensure(racks == sorted(set(racks)), "members of a commit must ascend", record=record)
            self._end(fragment, (*record.members, *record.dropped))
            for share in record.members:
                self.named[(share.member, fragment)] = (share.seq, record.version)
                self.work[(share.member, fragment)] = (
                    share.capture_step, share.tokens, share.steps, share.base,
                )  # fmt: skip
            self.rounds[fragment] += self.part(record.members, record.absent)
            self.versions[fragment] = record.version
            self.digests[fragment] = record.digests
            norms = tuple(share.norm / share.steps for share in record.members)
            self.norms[fragment] = (self.norms[fragment] + norms)[-NORMS_KEPT:]
            self._merge_units(record)
        elif isinstance(record, Drop):
            self._end(record.fragment, record.dropped)
        elif isinstance(record, Roster):
            self._seat(record, frozenset(record.non_voters))
        elif isinstance(record, Lineage):
            self._begin_anew(record)
        elif isinstance(record, CheckpointRecord):
            self._mark(record)
        elif isinstance(record, Grant):
            self.units = give(require(self.units, "a grant in a job without units"), record)
        elif isinstance(record, Mitigation):
            self._move(record)
        else:
            self.ballot = record.ballot

    def _mark(self, record: CheckpointRecord) -> None:
        self.checkpoint = record
        if not record.written:
            self.checkpoint_versions = tuple(self.versions)
            self.checkpoint_units = self.units

    def _merge_units(self, record: Commit) -> None:
        if self.units is not None and record.fragment < self._fragments:
            self.units = merge(self.units, record.fragment, record.version, record.members)

    @property
    def _fragments(self) -> int:
        """Number of fragments of weights."""
        return require(self.policy, "nothing is merged before the first record").of_weights

    def _seat_units(self) -> None:
        if self.units is not None:
            members = [seat.member for seat in self.seats.values()]
            self.units = seat(self.units, members, self._fragments)

    def _move(self, record: Mitigation) -> None:
        self._mitigate(mitigations_after(self.mitigations, record))
        if record.stage == EVICTED:
            count = self.evictions.get(record.rack, 0) + 1
            self.evictions = {**self.evictions, record.rack: count}

    def _mitigate(self, mitigations: Mapping[int, Mitigation]) -> None:
        self.mitigations = mitigations
        slow = (one.rack for one in mitigations.values() if one.stage >= NOT_AWAITED)
        self.mitigated = frozenset(slow)

    def part(self, members: Collection[MergeMember | Offer], absent: Collection[Absent]) -> int:
        """The part of a round that merging these offers counts as, in units of 1 /
        `weights.WHOLE`."""
        policy = require(self.policy, "nothing is merged before the first record")
        return part_of(
            [(each.tokens, each.steps) for each in members],
            [(each.tokens, each.steps) for each in absent],
            token_weighted=policy.token_weighted,
            period_steps=policy.period_steps,
        )

    def stretch(self, members: Collection[MergeMember | Offer]) -> float:
        """The factor by which the outer step of this merge is stretched."""
        policy = require(self.policy, "nothing is merged before the first record")
        return stretch_of(
            [(each.tokens, each.steps) for each in members],
            token_weighted=policy.token_weighted,
            period_steps=policy.period_steps,
        )

    def weights(self, members: Collection[MergeMember | Offer]) -> tuple[float, ...]:
        """The weights of a merge of these offers."""
        policy = require(self.policy, "nothing is merged before the first record")
        work = [(each.tokens, each.steps) for each in members]
        return tuple(merge_weights(work, token_weighted=policy.token_weighted))

    def waits(self, members: Collection[MergeMember | Offer]) -> bool:
        """Whether the merge of these offers is made without momentum."""
        signs = [(each.along, each.against) for each in members]
        return momentum_waits(signs, self.weights(members))

    def balance(self, members: Collection[MergeMember | Offer]) -> float | None:
        """The mean balance of signs of these offers with the outer momentum of their bases; None:
        none of them was compared with it."""
        signs = [(each.along, each.against) for each in members]
        compared = any(along or against for along, against in signs)
        return float(mean_balance(signs, self.weights(members))) if compared else None

    def _seat(self, record: Roster | Lineage, non_voters: frozenset[int]) -> None:
        stay = {seat.member for seat in record.members}
        had_votes = self.demoted | {member.rack for member in self.voters & stay}
        kept = {rack for rack, seat in self.seats.items() if seat.member in stay}
        self.demoted = frozenset(had_votes & kept & non_voters)
        away = {rack for rack, one in self.mitigations.items() if one.stage == EVICTED}
        away -= {seat.member.rack for seat in record.members}
        kept_or_away = kept | away - set(record.retired if isinstance(record, Roster) else ())
        self._mitigate({r: one for r, one in self.mitigations.items() if r in kept_or_away})
        gone = {seat.member for seat in self.seats.values()} - stay
        self.former = (*self.former, *sorted(gone))[-FORMER_KEPT:]
        self.ended = {key: seq for key, seq in self.ended.items() if key[0] in stay}
        self.named = {key: seq for key, seq in self.named.items() if key[0] in stay}
        self.work = {key: work for key, work in self.work.items() if key[0] in stay}
        self.seats = {seat.member.rack: seat for seat in record.members}
        self.non_voters, self.witness = non_voters, record.witness
        self.unanimous = isinstance(record, Lineage) and record.unanimous
        self._count_seats()
        self._seat_units()
        self.roster_number = record.number

    def _begin_anew(self, record: Lineage) -> None:
        if self.units is not None:
            self.units = undo(self.units, record.versions)
        self._seat(record, frozenset(record.non_voters))
        self.ballot = record.ballot
        self.named = {key: at for key, at in self.named.items() if at[1] <= record.versions[key[1]]}
        self.work = {key: work for key, work in self.work.items() if key in self.named}
        # Offers that only an undone commit named stay ended: they count as dropped.
        self.versions, self.digests = list(record.versions), list(record.digests)
        self.rounds = list(record.rounds)

    def _end(self, fragment: int, offers: Iterable[MergeMember | Ended]) -> None:
        for ended in offers:
            is_open = self.is_open(ended.member, fragment, ended.seq)
            ensure(is_open, "an offer ends twice", offer=ended, fragment=fragment)
            self.ended[(ended.member, fragment)] = ended.seq


def log_state_of(snapshot: Snapshot) -> LogState:
    """The log state that a snapshot was made from."""
    return LogState(
        seats={seat.member.rack: seat for seat in snapshot.members},
        non_voters=frozenset(snapshot.non_voters),
        witness=snapshot.witness,
        roster_number=snapshot.number,
        plan=snapshot.plan,
        policy=snapshot.policy,
        ballot=snapshot.ballot,
        former=snapshot.former,
        versions=list(snapshot.versions),
        digests=list(snapshot.digests),
        ended={(last.member, last.fragment): last.ended for last in snapshot.last},
        named={
            (last.member, last.fragment): (last.named, last.version)
            for last in snapshot.last
            if last.named
        },
        work={
            (last.member, last.fragment): (last.capture_step, last.tokens, last.steps, last.base)
            for last in snapshot.last
            if last.steps
        },
        rounds=list(snapshot.rounds),
        norms=list(snapshot.norms),
        demoted=frozenset(snapshot.demoted),
        checkpoint=snapshot.checkpoint,
        checkpoint_versions=snapshot.checkpoint_versions,
        mitigations={one.rack: one for one in snapshot.mitigations},
        evictions=dict(snapshot.evictions),
        unanimous=snapshot.unanimous,
        units=snapshot.units,
        checkpoint_units=snapshot.checkpoint_units,
    )


def _last(folded: LogState, member: Member, fragment: int) -> Last:
    key = (member, fragment)
    named, work = folded.named.get(key, (0, 0)), folded.work.get(key, (0, 0, 0, 0))
    return Last(*key, *named, folded.ended[key], *work)


def offers_of(record: Commit | Drop) -> tuple[MergeMember | Ended, ...]:
    """All offers that the record ends."""
    return (*record.members, *record.dropped) if isinstance(record, Commit) else record.dropped


def mitigations_after(
    before: Mapping[int, Mitigation], record: Mitigation
) -> Mapping[int, Mitigation]:
    """The mitigations by slow rack after `record`."""
    others = {rack: one for rack, one in before.items() if rack != record.rack}
    return others if record.stage == AWAITED else {**others, record.rack: record}


class Log:
    """A replica: records, chain hashes, the number of decided records, and two states.

    `appended` is the state after all records, which a coordinator must not contradict. `committed`
    is the state after the decided records, which every member may act on.
    """

    def __init__(self, kept: int = RECORDS_KEPT) -> None:
        """`kept`: number of decided records to keep."""
        self.kept = kept
        self.last = 0
        self.decided = 0
        self._lineages: list[tuple[int, str]] = [(0, "")]
        self.appended = LogState()
        self.committed = LogState()
        self._records: dict[int, Record] = {}
        self._chains: dict[int, str] = {0: ""}
        self._sizes: dict[int, int] = {0: 0}
        """Cumulative bytes of records 1..index (or of those after a snapshot), for the indices of
        `_chains`."""
        self._first = 1

    @property
    def lineage(self) -> str:
        """The identity of the job: the hash up to its first record, or up to the record that began
        a new lineage without the lost members."""
        return self._lineages[-1][1]

    def lineage_at(self, index: int) -> str:
        """The lineage when record `index` was the last one."""
        for begun, name in reversed(self._lineages):
            if begun <= index:
                return name
        return ""

    def continues(self, lineage: str, index: int) -> bool:
        """Whether a message of `lineage`, after record `index`, belongs to this job. A lineage that
        is known to be over does not. The newest lineage may still be undecided here or at the
        sender."""
        if lineage == self.lineage:
            return True
        over = [name for begun, name in self._lineages if begun <= self.decided][:-1]
        return lineage == self.lineage_at(min(index, self.last)) and lineage not in over

    def knows(self, lineage: str) -> bool:
        """Whether this log belongs to that lineage, or did before it began a new one."""
        return any(lineage == name for _, name in self._lineages)

    def chain(self, index: int) -> str:
        """Hash over records 1..index: equal hash, equal history."""
        return self._chains[index]

    def reaches(self, index: int) -> bool:
        """Whether the records after `index` are still here."""
        return self._first - 1 <= index <= self.last

    def copy(self) -> Log:
        """An independent replica with the same records."""
        other = copy(self)
        other.appended, other.committed = self.appended.copy(), self.committed.copy()
        other._records, other._chains = dict(self._records), dict(self._chains)
        other._sizes = dict(self._sizes)
        other._lineages = list(self._lineages)
        return other

    def record(self, index: int) -> Record:
        return self._records[index]

    def matches(self, prev: int, chain: str) -> bool:
        """Whether records 1..prev are those the sender has."""
        return self.reaches(prev) and self._chains[prev] == chain

    def append(self, record: Record) -> None:
        self.appended.take(record)
        before = self._chains[self.last]
        self.last += 1
        self._records[self.last] = record
        encoded = encode_record(record)
        digest = hashlib.sha256(bytes.fromhex(before) + encoded)
        self._chains[self.last] = digest.hexdigest()
        self._sizes[self.last] = self._sizes[self.last - 1] + len(encoded)
        if isinstance(record, Genesis | Lineage):
            self._lineages.append((self.last, self._chains[self.last]))

    def cut(self, index: int) -> None:
        """Forget the records after `index`, which are not decided."""
        ensure(index >= self.decided, f"record {self.decided} is decided", index=index)
        if index >= self.last:
            return
        kept = [self._records[i] for i in range(self.decided + 1, index + 1)]
        for i in range(index + 1, self.last + 1):
            del self._records[i], self._chains[i], self._sizes[i]
        self._lineages = [each for each in self._lineages if each[0] <= index]
        self.last, self.appended = index, self.committed.copy()
        for record in kept:
            self.appended.take(record)

    def put(self, prev: int, records: Iterable[Record]) -> bool:
        """Put `records` after `prev`, replacing those that differ. Returns False if that would undo
        a decision; the records before that one are taken."""
        for index, record in enumerate(records, start=prev + 1):
            if index <= self.last:
                if self.record(index) == record:
                    continue
                if index <= self.decided:
                    return False
                self.cut(index - 1)
            self.append(record)
        return True

    def roster_at(self, index: int) -> LogState:
        """The roster that decides record `index`, which is not decided yet: the newest roster
        before it. The first record of a lineage brings its own."""
        changes = [
            i
            for i in range(self.decided + 1, min(index, self.last) + 1)
            if isinstance(self._records[i], Genesis | Lineage)
            or (isinstance(self._records[i], Roster) and i < index)
        ]
        return self._roster_of(changes[-1]) if changes else self.committed

    def removal_of(self, member: Member) -> tuple[Seat, str] | None:
        """The last seat of a removed member and the reason of the removal; None if no record that
        is kept names the removal."""
        why = ""
        for index in range(self.last, self._first - 1, -1):
            record = self._records[index]
            if isinstance(record, Genesis | Roster | Lineage):
                seats = record.roster if isinstance(record, Genesis) else record.members
                if found := next((seat for seat in seats if seat.member == member), None):
                    return found, why
                why = "" if isinstance(record, Genesis) else record.reason
        return None

    def digests_of(self, fragment: int, version: int) -> tuple[str, ...] | None:
        """Digests of a version of the appended log; None where its record is compacted."""
        for index in range(self.last, self._first - 1, -1):
            record = self._records[index]
            if isinstance(record, Commit) and (record.fragment, record.version) == (
                fragment,
                version,
            ):
                return record.digests
            if isinstance(record, Lineage) and record.versions[fragment] == version:
                return record.digests[fragment]
            if isinstance(record, Genesis) and record.first()[fragment] == version:
                return record.digests[fragment]
        newest = self.committed.begun and self.committed.versions[fragment] == version
        return self.committed.digests[fragment] if newest else None

    def rounds_of(self, fragment: int, version: int) -> int | None:
        """Rounds merged up to a version of the appended log, in parts of `weights.WHOLE`; None
        where its record is compacted."""
        rounds, at = self.appended.rounds[fragment], self.appended.versions[fragment]
        for index in range(self.last, self._first - 1, -1):
            record = self._records[index]
            if at == version:
                break
            if isinstance(record, Commit) and (record.fragment, record.version) == (fragment, at):
                rounds -= self.appended.part(record.members, record.absent)
                at -= 1
        return rounds if at == version else None

    def _roster_of(self, index: int) -> LogState:
        folded = self.committed.copy()
        for i in range(self.decided + 1, index + 1):
            folded.take(self._records[i])
        return folded

    def decide(self, index: int) -> list[Record]:
        """Decide the records up to `index`. Returns the newly decided ones, in order. They are
        kept, even beyond `kept`, because a caller may read them during this event."""
        fresh = [self._records[i] for i in range(self.decided + 1, min(index, self.last) + 1)]
        for record in fresh:
            self.committed.take(record)
        self.decided += len(fresh)
        while self._first <= self.decided - max(self.kept, len(fresh)):
            del self._records[self._first]
            del self._chains[self._first - 1], self._sizes[self._first - 1]
            self._first += 1
        return fresh

    def snapshot(self) -> Snapshot:
        """The snapshot of the decided log."""
        state = self.committed
        policy = require(state.policy, "nothing is decided")
        return Snapshot(
            index=self.decided,
            chain=self.chain(self.decided),
            format=RECORDS_FORMAT,
            lineages=tuple(at for at in self._lineages if at[0] <= self.decided)[-LINEAGES_SENT:],
            ballot=state.ballot,
            number=state.roster_number,
            members=tuple(state.seats[rack] for rack in sorted(state.seats)),
            non_voters=tuple(sorted(state.non_voters)),
            witness=state.witness,
            former=state.former,
            policy=policy,
            plan=state.plan,
            versions=tuple(state.versions),
            digests=tuple(state.digests),
            last=tuple(_last(state, *key) for key in sorted(state.ended)),
            norms=tuple(state.norms),
            demoted=tuple(sorted(state.demoted)),
            rounds=tuple(state.rounds),
            checkpoint=state.checkpoint,
            checkpoint_versions=state.checkpoint_versions,
            mitigations=tuple(state.mitigations[rack] for rack in sorted(state.mitigations)),
            evictions=tuple(sorted(state.evictions.items())),
            unanimous=state.unanimous,
            units=state.units,
            checkpoint_units=state.checkpoint_units,
        )

    def install(self, snapshot: Snapshot) -> None:
        """Replace the decided log by a snapshot when its records are no longer available.

        Accepted records that differ from the snapshot were never decided. Records after it are
        kept.
        """
        index = snapshot.index
        if index <= self.decided:
            return
        if self.matches(index, snapshot.chain):
            self.decide(index)
            return
        self.last = self.decided = index
        self.committed, self.appended = log_state_of(snapshot), log_state_of(snapshot)
        self._records, self._chains, self._first = {}, {index: snapshot.chain}, index + 1
        self._sizes = {index: 0}
        self._lineages = [(begun, name) for begun, name in snapshot.lineages]

    def after(self, index: int, stop: int | None = None) -> tuple[Record, ...]:
        """Records index + 1 .. stop (default: all), at most SENT_AT_ONCE.

        Empty if the log is compacted beyond `index`.
        """
        if index == self.last or not self.reaches(index):
            return ()
        end = min(self.last if stop is None else stop, index + SENT_AT_ONCE)
        return tuple(self._records[i] for i in range(index + 1, end + 1))

    def portion(self, known: int, index: int, stop: int | None = None) -> tuple[Record, ...]:
        """As `after`, for a reader that has records up to `known` while those up to `index` are in
        flight. Limits the bytes in flight to RECORDS_BYTES_MAX, but always returns at least one
        record if nothing is in flight. The undecided end is never split, because a voter takes it
        as a whole."""
        if index >= (self.last if stop is None else stop):
            return ()
        records = self.after(index, stop)
        if not records:
            return ()
        start = self._sizes[max(known, self._first - 1)]
        for fits, i in enumerate(range(index + 1, min(index + len(records), self.decided) + 1)):
            if self._sizes[i] - start > RECORDS_BYTES_MAX and (fits or index > known):
                return records[:fits]
        return records

    def undecided(self) -> Iterable[Record]:
        return (self._records[i] for i in range(self.decided + 1, self.last + 1))
