"""The proposer: wins a ballot, carries the log over into it, appends records and counts accepts.

It knows neither time nor addresses, like its counterpart `acceptor`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from mend.consensus.log import UNDECIDED_MAX, Log, LogState, witness_votes
from mend.consensus.records import DEAD_MAX, AcceptorState, Ballot, Lineage, Record, Roster
from mend.errors import ensure
from mend.types import WITNESS, Member


@dataclass
class Proposer:
    """`ballot` 0: it is neither a candidate nor the leader. Rounds may open once record `opening`
    is decided."""

    log: Log = field(default_factory=Log)
    ballot: int = 0
    leading: bool = False
    opening: int = 0
    acceptor_states: dict[Member, AcceptorState] = field(default_factory=dict)
    held: dict[Member, tuple[int, ...]] = field(default_factory=dict)
    """Versions that the voters' racks hold. Needed for a new lineage only."""
    dead: set[Member] = field(default_factory=set)
    """Voters whose process has ended. This is always attested, never inferred from silence."""
    retired: set[Member] = field(default_factory=set)
    """The members of `dead` that a person has retired."""
    returned: Member | None = None
    """The incarnation of the witness that has promised, if the seat belongs to a former, dead
    one."""
    lost: bool = False
    """Whether the job is lost: all remaining members have promised, and some fragment has no
    version that any of them holds."""

    @property
    def standing(self) -> bool:
        return self.ballot > 0 and not self.leading

    @property
    def open(self) -> bool:
        """Whether this ballot's first record is decided. From then on no older log can be
        adopted."""
        return self.leading and 0 < self.opening <= self.log.decided

    def found(self, ballot: int) -> None:
        """Lead a ballot with an empty log, whose first record will be Genesis."""
        self.log, self.ballot, self.leading, self.opening = Log(self.log.kept), ballot, True, 1
        self.acceptor_states, self.held = {}, {}

    def stand(self, ballot: int, log: Log) -> None:
        """Become a candidate, with a copy of the own acceptor's log."""
        self.log, self.ballot, self.leading, self.opening = log.copy(), ballot, False, 0
        self.acceptor_states, self.held, self.returned = {}, {}, None

    def step_down(self) -> None:
        """Give up the ballot and its log. A candidate's copy may belong to a job that was given up
        since then; the next candidacy starts from the acceptor's log."""
        self.log, self.ballot, self.leading, self.opening = Log(self.log.kept), 0, False, 0
        self.acceptor_states = {}

    def hear(self, member: Member, acceptor_state: AcceptorState) -> bool:
        """Record a voter's newest state. Returns False if it shows that this ballot is over."""
        if acceptor_state.promised > self.ballot:
            return False
        self.acceptor_states[member] = acceptor_state
        return True

    # -------------------------------------------------------------- winning

    def asked(self) -> frozenset[Member]:
        """Members to ask for a promise: the voters of every roster that may be in force and, if
        some of them are dead, also the members without a vote, for a new lineage."""
        rosters = self._rosters(self.log)
        all_seats = any(roster.voters & self.dead for roster in rosters)
        return frozenset().union(
            *(roster.members if all_seats else roster.voters for roster in rosters)
        )

    def would_win(self, me: Member) -> bool:
        """Whether only the own promise is missing. A candidate gives it last: one that no member
        hears must not bar itself from the coordinator that the others follow."""
        promised = {member for member in self.acceptor_states if self._has_promised(member)}
        return self.standing and self._enough(promised | {me}, self._rosters(self.log))

    def try_lead(self) -> bool:
        """Take over if the promises suffice: adopt the log that was accepted in the highest ballot
        and append a Ballot record.

        This needs a quorum of promises from every roster that may be in force: the decided one, and
        every undecided Roster in the log to adopt. If no quorum is possible any more, because all
        missing voters are dead, the remaining members begin a new lineage.
        """
        self.lost = False
        if not self.standing:
            return False
        self._learn()
        promises = {
            member: state
            for member, state in self.acceptor_states.items()
            if self._has_promised(member) and self._complete(state)
        }
        if not promises:
            return False
        best = max(promises.values(), key=lambda promise: (promise.accepted, promise.last))
        adopted = self.log.copy()
        adopted.cut(adopted.decided)
        if best.prev == adopted.decided and adopted.matches(best.prev, best.chain):
            adopted.put(best.prev, best.records)  # else it ends before the decided end
        self.log = adopted  # it may name more voters to ask; undecided records may still go
        rosters = self._rosters(adopted)
        if not self._enough(promises.keys(), rosters):
            return False
        opening: Record | None = Ballot(self.ballot)
        if not all(roster.may_decide(promises.keys()) for roster in rosters):
            opening = self._lineage(promises.keys())
        if opening is None:
            return False
        self.log.append(opening)
        self.leading, self.opening = True, self.log.last
        return True

    def _enough(self, promised: Set[Member], rosters: Sequence[LogState]) -> bool:
        """Whether a quorum of each roster has promised; or, for a new lineage, all remaining
        members of each, because members without a vote may hold versions that no live voter
        holds."""
        lefts = [each.members - self.dead for each in rosters]
        return all(each.may_decide(promised) for each in rosters) or all(
            left and left <= promised for left in lefts
        )

    def _lineage(self, left: Set[Member]) -> Lineage | None:
        """The new lineage of these members. None while their versions are unknown, or if there is
        no rack among them. A rack that lacks a version gets no vote. If every rack lacks one, all
        keep their votes and decide unanimously, because only all of them together hold the
        bytes."""
        log = self.log.appended
        seats = tuple(log.seats[r] for r in sorted(log.seats) if log.seats[r].member in left)
        held = [self.held.get(seat.member, ()) for seat in seats]
        if not seats or any(len(versions) != len(log.versions) for versions in held):
            return None
        best = [max(of) for of in zip(*held, strict=True)]
        self.lost = min(best) < 0
        versions = tuple(map(min, best, log.versions))
        late = {
            seat.member.rack
            for seat, has in zip(seats, held, strict=True)
            if any(own < wanted for own, wanted in zip(has, versions, strict=True))
        }
        digests = [self.log.digests_of(p, version) for p, version in enumerate(versions)]
        rounds = [self.log.rounds_of(p, version) for p, version in enumerate(versions)]
        if any(value is None for value in (*digests, *rounds)):
            return None
        unanimous = len(late) == len(seats)
        non_voters = set[int]() if unanimous else late
        witness = log.witness if log.witness in left else self.returned
        votes = witness_votes(witness, len(seats) - len(non_voters)) and witness != self.returned
        if witness and (unanimous or not votes):
            non_voters.add(WITNESS)
        return Lineage(
            ballot=self.ballot,
            number=log.roster_number + 1,
            members=seats,
            non_voters=tuple(sorted(non_voters)),
            witness=witness,
            dead=self._dead_of(log.members | self.log.committed.members, log.former),
            versions=versions,
            digests=tuple(value for value in digests if value is not None),
            reason=f"the voters that are missing are dead{self._by_hand()}",
            rounds=tuple(value for value in rounds if value is not None),
            unanimous=unanimous,
        )

    def _dead_of(self, seated: Set[Member], former: Sequence[Member]) -> tuple[Member, ...]:
        """The dead that a record names, those with a seat first. After many restarts there is no
        room for all of them."""
        ordered = sorted(self.dead, key=lambda member: (member not in seated, member not in former))
        return tuple(sorted(ordered[:DEAD_MAX]))

    def _by_hand(self) -> str:
        """Text naming the dead members that a person has retired."""
        racks = ", ".join(f"rack {member.rack}" for member in sorted(self.retired & self.dead))
        return f"; a person has retired {racks}" if racks else ""

    def _has_promised(self, member: Member) -> bool:
        return self.acceptor_states[member].promised == self.ballot

    def _complete(self, acceptor_state: AcceptorState) -> bool:
        """Whether it contains all records of its voter after the ones that are decided here."""
        decided = self.log.decided
        has_none = acceptor_state.last <= decided
        return has_none or (
            acceptor_state.prev == decided
            and acceptor_state.prev + len(acceptor_state.records) == acceptor_state.last
        )

    def _learn(self) -> None:
        """Decide what a voter reports as decided. The others are asked again from there."""
        for acceptor_state in self.acceptor_states.values():
            fits = self.log.matches(acceptor_state.prev, acceptor_state.chain)
            if acceptor_state.decided > self.log.decided == acceptor_state.prev and fits:
                known = acceptor_state.records[: acceptor_state.decided - acceptor_state.prev]
                self.log.put(acceptor_state.prev, known)
                self.log.decide(acceptor_state.prev + len(known))

    @staticmethod
    def _rosters(log: Log) -> list[LogState]:
        """The decided roster and every undecided one."""
        changes = [
            index
            for index in range(log.decided + 1, log.last + 1)
            if isinstance(log.record(index), Roster | Lineage)
        ]
        return [log.roster_at(log.decided + 1)] + [log.roster_at(index + 1) for index in changes]

    # -------------------------------------------------------------- leading

    def may_append(self) -> bool:
        """Whether a record may be appended: not after an undecided Roster, and not beyond
        UNDECIDED_MAX."""
        if self.log.last == self.log.decided:
            return True
        undecided = list(self.log.undecided())
        return len(undecided) < UNDECIDED_MAX and not any(
            isinstance(record, Roster | Lineage) for record in undecided
        )

    def append(self, record: Record) -> None:
        ensure(self.leading, "only a coordinator appends", record=record, ballot=self.ballot)
        self.log.append(record)

    def may_decide(self, heard: Set[Member]) -> bool:
        """Whether these members can decide the next record, or a new lineage that is not decided
        yet."""
        log = self.log
        nexts = [log.decided + 1] + [
            index
            for index in range(log.decided + 1, log.last + 1)
            if isinstance(log.record(index), Lineage)
        ]
        return not log.appended.begun or any(log.roster_at(i).may_decide(heard) for i in nexts)

    def common(self, member: Member) -> int:
        """The index up to which a voter's log is known to equal this one."""
        acceptor_state = self.acceptor_states.get(member)
        if acceptor_state is None:
            return self.log.decided
        accepted = acceptor_state.accepted == self.ballot
        return min(acceptor_state.last if accepted else acceptor_state.decided, self.log.last)

    def ready(self) -> set[Member]:
        """Members that have accepted the whole log."""
        last = self.log.last
        acceptor_states = self.acceptor_states.items()
        return {m for m, b in acceptor_states if b.accepted == self.ballot and b.last == last}

    def decide(self) -> list[Record]:
        """Index i is decided when enough of the roster in force at i have accepted it in this
        ballot; Genesis needs all its members. Returns the newly decided records."""
        log, index = self.log, self.log.decided
        if index == log.last:
            return []
        reached = {m: b.last for m, b in self.acceptor_states.items() if b.accepted == self.ballot}
        if index == 0 and not log.roster_at(1).members <= {m for m in reached if reached[m] > 0}:
            return []  # all must begin this same job: majorities could begin two
        while index < log.last and log.roster_at(index + 1).may_decide(
            {member for member, last in reached.items() if last > index}
        ):
            index += 1
        for anew in range(index + 1, log.last + 1):
            # The voters of a new lineage decide it, and with it all records that it took over.
            if isinstance(log.record(anew), Lineage) and log.roster_at(anew).may_decide(
                {member for member, last in reached.items() if last >= anew}
            ):
                index = anew
        return log.decide(index) if self.leading else []
