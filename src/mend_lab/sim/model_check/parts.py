"""The real Acceptor and Proposer as steps between snapshots, each step computed once.

A snapshot is a small number that stands for the whole state of an object. A step restores the
object from its snapshot, calls it, and takes a new snapshot; the result is cached. Millions of
global states share a few thousand snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from mend.consensus.acceptor import Acceptor
from mend.consensus.log import Log, LogState
from mend.consensus.proposer import Proposer
from mend.consensus.records import AcceptorState, Commit, Genesis, Record, Roster
from mend.types import Member

Value = TypeVar("Value", bound=Hashable)


class Table(Generic[Value]):
    """Values <-> numbers from 0, in the order of their first appearance."""

    def __init__(self) -> None:
        self.numbers: dict[Value, int] = {}
        self.values: list[Value] = []

    def number(self, value: Value) -> int:
        index = self.numbers.setdefault(value, len(self.values))
        if index == len(self.values):
            self.values.append(value)
        return index

    def __getitem__(self, number: int) -> Value:
        return self.values[number]


class LogShot(NamedTuple):
    """`records`: numbers of the records 1, 2, ..."""

    records: tuple[int, ...]
    decided: int


class AcceptorShot(NamedTuple):
    log: int
    promised: int
    accepted: int


Votes = tuple[tuple[Member, int], ...]
"""Members with a snapshot each, of their acceptor or of its report."""


class ProposerShot(NamedTuple):
    """`acceptor_states`: the reports that it has heard; empty where these can be sent again, or are
    still under way."""

    log: int
    ballot: int
    leading: bool
    opening: int
    acceptor_states: Votes = ()


class Committed(NamedTuple):
    """The state that a decided log describes. `result`: digest of the newest version, empty for
    version 0."""

    voters: frozenset[Member]
    seats: frozenset[Member]
    version: int
    result: str


class Snapshots:
    """Logs, votes and rights to append, as numbers and back."""

    def __init__(self) -> None:
        self.records: Table[Record] = Table()
        self.logs: Table[LogShot] = Table()
        self.acceptor_states: Table[AcceptorState] = Table()
        self.log: Callable[[int], Log] = cache(self._log)

    def keep_log(self, log: Log) -> int:
        records = tuple(self.records.number(record) for record in log.after(0))
        assert len(records) == log.last, "an explored log is short enough to be seen as a whole"
        return self.logs.number(LogShot(records, log.decided))

    def _log(self, number: int) -> Log:
        """A shared log: read it or copy it."""
        shot = self.logs[number]
        log = Log()
        log.put(0, (self.records[record] for record in shot.records))
        log.decide(shot.decided)
        return log

    def acceptor(self, shot: AcceptorShot) -> Acceptor:
        return Acceptor(self.log(shot.log).copy(), shot.promised, shot.accepted)

    def shot_of_acceptor(self, acceptor: Acceptor) -> AcceptorShot:
        return AcceptorShot(self.keep_log(acceptor.log), acceptor.promised, acceptor.accepted)

    def proposer_of(self, shot: ProposerShot) -> Proposer:
        proposer = Proposer(self.log(shot.log).copy(), shot.ballot, shot.leading, shot.opening)
        proposer.acceptor_states = {
            member: self.acceptor_states[number] for member, number in shot.acceptor_states
        }
        return proposer

    def shot_of_proposer(self, proposer: Proposer, *, heard: bool) -> ProposerShot:
        states = sorted(proposer.acceptor_states.items()) if heard else ()
        numbers = tuple((member, self.acceptor_states.number(state)) for member, state in states)
        log = self.keep_log(proposer.log)
        return ProposerShot(log, proposer.ballot, proposer.leading, proposer.opening, numbers)


class Parts(Snapshots):
    """All snapshots of one exploration. Numbers of different tables are never mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.voters: Table[AcceptorShot] = Table()
        self.proposers: Table[ProposerShot] = Table()
        self.committed: Callable[[tuple[int, ...]], Committed] = cache(self._committed)
        self.decided: Callable[[int], tuple[int, ...]] = cache(self._decided)
        self.addressed: Callable[[int], frozenset[Member]] = cache(self._addressed)
        self.prepare: Callable[[int, int], int] = cache(self._prepare)
        self.append: Callable[[int, int, int], tuple[int, bool]] = cache(self._append)
        self.acceptor_state: Callable[[int], int] = cache(self._acceptor_state)
        self.stand: Callable[[int, int], int] = cache(self._stand)
        self.learn: Callable[[int, Member, int], int] = cache(self._learn)
        self.win: Callable[[int, Votes], int] = cache(self._win)
        self.count: Callable[[int, Votes], int] = cache(self._count)
        self.propose: Callable[[int, int], int] = cache(self._propose)
        self.proposer: Callable[[int], Proposer] = cache(self.new_proposer)

    # -------------------------------------------------------------- logs

    def _decided(self, number: int) -> tuple[int, ...]:
        shot = self.logs[number]
        return shot.records[: shot.decided]

    def _committed(self, decided: tuple[int, ...]) -> Committed:
        folded, result = LogState(), ""
        for number in decided:
            record = self.records[number]
            folded.take(record)
            result = record.digests[0] if isinstance(record, Commit) else result
        seats = frozenset(seat.member for seat in folded.seats.values())
        version = folded.versions[0] if folded.begun else -1
        return Committed(folded.voters, seats, version, result)

    def _addressed(self, number: int) -> frozenset[Member]:
        """The members that the owner of this log may have sent it to: all that ever had a seat."""
        members: set[Member] = set()
        for record in (self.records[each] for each in self.logs[number].records):
            if isinstance(record, Genesis | Roster):
                seats = record.roster if isinstance(record, Genesis) else record.members
                members.update(seat.member for seat in seats)
                members.update({record.witness} if record.witness else ())
        return frozenset(members)

    # -------------------------------------------------------------- a vote

    def _voter(self, number: int) -> Acceptor:
        return self.acceptor(self.voters[number])

    def keep_acceptor(self, acceptor: Acceptor) -> int:
        return self.voters.number(self.shot_of_acceptor(acceptor))

    def _prepare(self, number: int, ballot: int) -> int:
        acceptor = self._voter(number)
        acceptor.prepare(ballot)
        return self.keep_acceptor(acceptor)

    def _append(self, number: int, ballot: int, orders: int) -> tuple[int, bool]:
        """The log of the coordinator of `ballot`, after what the voter is sure of. False: the
        voter refused, or found a decision contradicted."""
        acceptor, log = self._voter(number), self.log(orders)
        prev = min(acceptor.log.decided, log.last)
        taken = acceptor.append(
            ballot, prev, log.chain(prev), log.after(prev), log.last, log.decided
        )
        return self.keep_acceptor(acceptor), taken

    def _acceptor_state(self, number: int) -> int:
        """The report of an acceptor, without the fields that a coordinator does not read, so that
        fewer states differ."""
        acceptor_state = self._voter(number).acceptor_state()
        return self.acceptor_states.number(
            replace(acceptor_state, decided=0, prev=0, chain="", records=())
        )

    # -------------------------------------------------------------- the right to append

    def new_proposer(self, number: int) -> Proposer:
        return self.proposer_of(self.proposers[number])

    def keep_proposer(self, proposer: Proposer) -> int:
        return self.proposers.number(self.shot_of_proposer(proposer, heard=False))

    def _stand(self, acceptor: int, ballot: int) -> int:
        proposer = Proposer()
        proposer.stand(ballot, self.log(self.voters[acceptor].log))
        return self.keep_proposer(proposer)

    def _learn(self, number: int, member: Member, acceptor: int) -> int:
        """A candidate hears a member that does not promise, but knows of decisions."""
        proposer = self.new_proposer(number)
        if not proposer.hear(member, self._voter(acceptor).acceptor_state(proposer.log.decided)):
            return number
        assert not proposer.try_lead(), "nobody has promised"
        return self.keep_proposer(proposer)

    def _win(self, number: int, promises: Votes) -> int:
        """A candidate hears these promises and no others; returns `number` if they do not suffice.
        It asks again while the log that it learns has a gap."""
        proposer, decided = self.new_proposer(number), -1
        while decided < proposer.log.decided:
            decided = proposer.log.decided
            for member, acceptor in promises:
                if not proposer.hear(member, self._voter(acceptor).acceptor_state(decided)):
                    return number
            if proposer.try_lead():
                proposer.decide()
                return self.keep_proposer(proposer)
        return number

    def _count(self, number: int, acceptor_states: Votes) -> int:
        """A coordinator hears all these reports. One that would depose it does not arrive: an idle
        node equals a dead one."""
        proposer = self.new_proposer(number)
        for member, acceptor_state in acceptor_states:
            proposer.hear(member, self.acceptor_states[acceptor_state])
        proposer.decide()
        return self.keep_proposer(proposer)

    def _propose(self, number: int, record: int) -> int:
        proposer = self.new_proposer(number)
        proposer.append(self.records[record])
        proposer.decide()
        return self.keep_proposer(proposer)
