"""protocol: the one list of decisions, and what it says when it is read from the start.

Records count from 1. A log only grows here: the coordinator is fixed, so there is one epoch and
nothing is ever cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mend.protocol.messages import Commit, Drop, Ended, Genesis, Record, Seat, Share
from mend.protocol.wire import encode_record
from mend.terms import WITNESS, Address, Member, Peer

RECORDS_KEPT = 65_536
"""Decided records a replica keeps for members that are behind; further back is compacted."""

SENT_AT_ONCE = 256
"""Records in one message; a member further behind gets them in several."""


@dataclass
class Folded:
    """What the records up to some index add up to."""

    seats: dict[int, Seat] = field(default_factory=dict)
    witness: bool = False
    roster_number: int = 0
    versions: list[int] = field(default_factory=list)
    digests: list[tuple[str, ...]] = field(default_factory=list)
    ended: dict[tuple[Member, int], int] = field(default_factory=dict)
    """(member, fragment) -> highest seq named or dropped."""

    @property
    def begun(self) -> bool:
        return bool(self.versions)

    @property
    def over(self) -> bool:
        return self.begun and not self.seats

    @property
    def voters(self) -> frozenset[int]:
        return frozenset(self.seats) | ({WITNESS} if self.witness else frozenset())

    def member(self, rack: int) -> Member | None:
        seat = self.seats.get(rack)
        return seat.member if seat else None

    def rail(self, me: Peer, first: int | None = None) -> tuple[Address, ...]:
        """Lanes of this rank's rail in the other racks: rack `first`, then ascending."""
        racks = [rack for rack in sorted(self.seats) if rack != me.rack]
        racks.sort(key=lambda rack: rack != first)
        return tuple(self.seats[rack].lanes[me.rank] for rack in racks)

    def is_open(self, member: Member, fragment: int, seq: int) -> bool:
        """Whether an offer may still be named: its member is in, nothing as new of it has ended."""
        return self.member(member.rack) == member and seq > self.ended.get((member, fragment), 0)

    def take(self, record: Record) -> None:
        """Add one record. One that contradicts the log is a bug of the coordinator and stops us."""
        if isinstance(record, Genesis):
            assert not self.begun, "a second Genesis"
            self.seats = {seat.member.rack: seat for seat in record.roster}
            self.witness = record.witness
            self.versions = [0] * len(record.digests)
            self.digests = list(record.digests)
        elif isinstance(record, Commit):
            fragment = record.fragment
            assert record.version == self.versions[fragment] + 1, (
                f"{record.version=} after {self.versions[fragment]}"
            )
            racks = [share.member.rack for share in record.members]
            assert racks == sorted(set(racks)), f"members of a commit must ascend: {racks}"
            self._end(fragment, (*record.members, *record.dropped))
            self.versions[fragment] = record.version
            self.digests[fragment] = record.digests
        elif isinstance(record, Drop):
            self._end(record.fragment, record.dropped)
        else:
            self.seats = {seat.member.rack: seat for seat in record.members}
            self.roster_number = record.number

    def _end(self, fragment: int, offers: Iterable[Share | Ended]) -> None:
        for ended in offers:
            assert self.is_open(ended.member, fragment, ended.seq), (
                f"{ended} of fragment {fragment} ends twice"
            )
            self.ended[(ended.member, fragment)] = ended.seq


class Log:
    """A replica: records, chain hash, how far it is decided, and both readings of it.

    `written` folds everything appended (what the coordinator must not contradict), `told`
    everything decided (what anybody may act on).
    """

    def __init__(self) -> None:
        self.last = 0
        self.decided = 0
        self.written = Folded()
        self.told = Folded()
        self._records: dict[int, Record] = {}
        self._chains: dict[int, str] = {0: ""}
        self._first = 1

    def chain(self, index: int) -> str:
        """Hash over records 1..index: equal hash, equal history."""
        return self._chains[index]

    def reaches(self, index: int) -> bool:
        """Whether the records behind `index` are still here."""
        return self._first - 1 <= index <= self.last

    def append(self, record: Record) -> None:
        self.written.take(record)
        before = self._chains[self.last]
        self.last += 1
        self._records[self.last] = record
        digest = hashlib.sha256(bytes.fromhex(before) + encode_record(record))
        self._chains[self.last] = digest.hexdigest()

    def accept(self, prev: int, chain: str, records: Sequence[Record]) -> None:
        """Take what is new of `records` (from prev + 1) if they continue this log, else nothing."""
        if not self.reaches(prev) or self._chains[prev] != chain:
            return
        for record in records[self.last - prev :]:
            self.append(record)

    def decide(self, index: int) -> list[Record]:
        """Everything up to `index` is decided; returns what is newly so, in order."""
        fresh = [self._records[i] for i in range(self.decided + 1, min(index, self.last) + 1)]
        for record in fresh:
            self.told.take(record)
        self.decided += len(fresh)
        while self._first <= self.decided - RECORDS_KEPT:
            del self._records[self._first], self._chains[self._first - 1]
            self._first += 1
        return fresh

    def after(self, index: int, stop: int | None = None) -> tuple[Record, ...]:
        """Records index + 1 .. stop (default: all), at most SENT_AT_ONCE.

        Empty when that far back is compacted.
        """
        if not self.reaches(index):
            return ()
        end = min(self.last if stop is None else stop, index + SENT_AT_ONCE)
        return tuple(self._records[i] for i in range(index + 1, end + 1))

    def undecided(self) -> Iterable[Record]:
        return (self._records[i] for i in range(self.decided + 1, self.last + 1))
