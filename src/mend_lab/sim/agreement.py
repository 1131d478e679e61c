"""Checks the promises of the log after every event, independently of the machines.

The checks read the replicas in memory, count the votes over them again, and look for the bytes in
the memory of the ranks. The rules of quorum and hold are implemented a second time here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mend.consensus.log import Log, LogState, log_state_of
from mend.consensus.records import (
    EVICTED,
    EVICTIONS_MAX,
    Commit,
    Ended,
    Genesis,
    Lineage,
    MergeMember,
    Mitigation,
    Record,
    Roster,
    Snapshot,
)
from mend.types import WITNESS, Member

if TYPE_CHECKING:
    from mend_lab.sim.process import Process

FRAGMENTS_MAX = 64
"""More than any simulated job has."""

UNDECIDED_MAX = 128
"""Limit on the records after the last decided one, in any replica."""

Problem = Callable[[str], None]
Undo = Callable[[tuple[int, ...]], None]
"""Called with the versions that a new lineage continues from; newer versions are void."""


@dataclass
class Replica:
    """A log in a process. `owner.log` may become another object. `decided`, and `last` (the newest
    record in the log), are the values at the last check."""

    owner: Any
    votes: bool
    decided: int = 0
    last: int = 0


@dataclass
class Seating:
    """The members, derived from the decided records alone."""

    racks: dict[int, Member] = field(default_factory=dict)
    non_voters: frozenset[int] = frozenset()
    witness: Member | None = None
    unanimous: bool = False

    @property
    def voters(self) -> frozenset[int]:
        named = frozenset({WITNESS} if self.witness else ())
        return (frozenset(self.racks) | named) - self.non_voters

    def may_decide(self, votes: Set[int]) -> bool:
        """A quorum of the voters; all of them, where no rack holds everything."""
        return is_quorum(votes, self.voters) and (not self.unanimous or votes >= self.voters)


def is_quorum(votes: Set[int], voters: Set[int]) -> bool:
    """More than half, or half with the lowest; the witness sorts last
    (docs/internals/protocol.md)."""
    inside = sorted(votes & voters)
    double = 2 * len(inside)
    return double > len(voters) or (double == len(voters) > 0 and inside[0] == min(voters))


def is_held(holders: Set[int], voters: Set[int]) -> bool:
    """Whether every quorum that could decide without the holders is impossible."""
    return not is_quorum(voters - holders, voters)


def replicas_of(machines: Iterable[Any]) -> list[Replica]:
    """Every object of a process that keeps a log: a machine, or a part of one.

    The log that counts as a vote is the one of an object with `promised`; without such an object,
    the log of the leader or the witness.
    """
    owners: list[Any] = []
    for machine in machines:
        parts = [machine, *vars(machine).values()]
        owners += [p for p in parts if isinstance(getattr(p, "log", None), Log)]
    owners = list({id(owner): owner for owner in owners}.values())
    voting = [owner for owner in owners if hasattr(owner, "promised")]
    return [Replica(owner, owner in (voting or owners)[:1]) for owner in owners]


class Agreement:
    """One list of decisions: the same for everybody, never undone, and its bytes survive."""

    def __init__(self, problem: Problem, undo: Undo) -> None:
        self._problem, self._undo = problem, undo
        self.chains: list[str] = [""]
        """chains[i]: hash over records 1..i, as decided first."""
        self.records: list[Record | None] = [None]
        self.rosters: list[Seating] = [Seating()]
        """rosters[i]: the roster in force after record i."""
        self.newest: dict[int, Commit] = {}
        self.in_force: dict[tuple[int, int], Commit] = {}
        """(fragment, version) -> its commit, except those that a new lineage has undone."""
        self.replicas: dict[int, tuple[Process, list[Replica]]] = {}
        self.beyond = False
        """Another job began when nobody who knew this one was left: nothing is promised."""
        self.merged: dict[tuple[Member, int, int], MergeMember] = {}
        """(member, fragment, version) -> the member's share of that merge."""
        self.ended: dict[tuple[Member, int, int], int] = {}
        """(member, fragment, seq) -> the version that merged or dropped it."""
        self.read: dict[int, int] = {}
        self.lost: set[tuple[int, int]] = set()

    # -------------------------------------------------------------- hooks

    def enter(self, process: Process, machines: Iterable[Any]) -> None:
        self.replicas[id(process)] = (process, replicas_of(machines))

    def check(self, process: Process) -> None:
        """After an event of this process."""
        if self.beyond:
            return
        for replica in self.replicas[id(process)][1]:
            log = replica.owner.log
            if log.decided != replica.decided:
                self._follow(process, replica, log)
            replica.last = log.last

    def check_survivors(self) -> None:
        """Check, after a death, that the newest versions still exist."""
        for commit in () if self.beyond else self.newest.values():
            self._check_survival(commit)

    def forget(self, process: Process) -> None:
        """A witness forgets its job: no live process may have a seat in it. A new job follows, with
        a log of its own."""
        for other, replicas in self.replicas.values():
            if other is process or other.dead or other.stopped:
                continue
            logs = [replica.owner.log for replica in replicas if replica.votes]
            if any(
                self._is_of(log) and log.committed.member(other.me.rack) == other.member
                for log in logs
            ):
                self._problem(f"I1: {process.me} gives up a job in which {other.me} lives")
        self.chains, self.records, self.rosters = [""], [None], [Seating()]
        self.newest, self.in_force, self.merged, self.ended = {}, {}, {}, {}
        self.read, self.lost = {}, set()
        self._undo((-1,) * FRAGMENTS_MAX)

    def _is_of(self, log: Log) -> bool:
        """Whether the log belongs to the job under observation."""
        return bool(self.chains[1:]) and log.reaches(1) and log.chain(1) == self.chains[1]

    def _is_forgotten(self) -> bool:
        """Whether no live process knows the job that began first: one name, one job."""
        return not any(self._remembers(process) for process, _ in self.replicas.values())

    def _remembers(self, process: Process) -> bool:
        """Whether the process is alive and holds the log of the job that began first."""
        votes = [r.owner.log for r in self.replicas[id(process)][1] if r.votes]
        known = (log for log in votes if log.last >= 1 and log.reaches(1))
        alive = not process.dead and not process.stopped
        return alive and any(log.chain(1) == self.chains[1] for log in known)

    def check_record(self, process: Process, record: Record) -> None:
        """A rank acts on a record, which must follow the last one that it acted on."""
        if id(process) in self.replicas:
            self.check(process)  # it may have decided it in this very event
        if self.beyond:
            return
        last = self.read.get(id(process))
        if last is None:  # its first; it may have joined in the middle
            index = next((i for i, known in enumerate(self.records) if known == record), 0)
        else:
            index = last + 1 if self.records[last + 1 : last + 2] == [record] else 0
        if not index:
            where = f"after record {last}" if last else "in the decided log"
            self._problem(f"I1: {process.me} acts on {record}, which is not {where}")
        self.read[id(process)] = index or last or 0

    def check_snapshot(self, process: Process, snapshot: Snapshot) -> None:
        """A rank acts on a snapshot, which must be the state after the records it covers."""
        self.check(process)
        if self.beyond:
            return
        if snapshot.index >= len(self.chains) or self.chains[snapshot.index] != snapshot.chain:
            self._problem(f"I1: {process.me} acts on a snapshot of another log")
            return
        folded = LogState()
        for record in self.records[1 : snapshot.index + 1]:
            assert record is not None
            folded.take(record)
        if folded != log_state_of(snapshot):
            self._problem(f"I1: {process.me} acts on a snapshot that is not of its records")
        self.read[id(process)] = snapshot.index

    def end(self) -> None:
        """Compare all replicas once more, from their beginning."""
        for process, replicas in self.replicas.values():
            for replica in replicas:
                # A new lineage may have undone what only the dead knew; they were checked in time.
                if not self.beyond and not process.dead:
                    self._compare(process, replica.owner.log, 1, replica.owner.log.decided)
        self.check_survivors()

    def ended_versions(self) -> list[int] | None:
        """The versions that were decided before the end of the job; None: it is not over."""
        folded = LogState()
        for record in self.records[1:]:
            assert record is not None
            folded.take(record)
        return folded.versions if folded.over else None

    # -------------------------------------------------------------- one list

    def _follow(self, process: Process, replica: Replica, log: Log) -> None:
        if log.decided < replica.decided and replica.votes and self._must_keep(process, replica):
            self._problem(f"I1: {process.me} undid decisions: {replica.decided} -> {log.decided}")
        known, replica.decided = replica.decided, log.decided
        for index in range(known + 1, log.decided + 1):
            if log.reaches(index - 1) and isinstance(log.record(index), Lineage):
                self._undo_to(process, log, index)
        self._compare(process, log, 1, 1)
        if self.beyond:
            return
        undecided = log.last - log.decided
        if undecided > UNDECIDED_MAX:
            self._problem(f"I6: {process.me} has {undecided} undecided records")
        first = len(self.records)
        for index in range(first, log.decided + 1):
            self._check_decision(process, index, log)
        self._compare(process, log, max(1, min(known, log.decided)), log.decided)

    def _must_keep(self, process: Process, replica: Replica) -> bool:
        """Whether the process must keep its log: its log tells it of its seat, or its vote was
        counted for a record in it."""
        rack = process.me.rack
        decided = self.rosters[: replica.decided + 1]
        accepted = self.rosters[: replica.last]  # those that decided the records that it has
        voted = (rack in roster.voters for roster in accepted if is_seated(process, roster))
        return any(is_seated(process, roster) for roster in decided) or any(voted)

    def _compare(self, process: Process, log: Log, first: int, last: int) -> None:
        for index in range(first, min(last + 1, len(self.chains))):
            if log.reaches(index) and log.chain(index) != self.chains[index]:
                if index == 1 and self._is_forgotten():
                    self.beyond = True
                    return
                self._problem(
                    f"I1: {process.me} has another decided record {index}: {_record(log, index)}"
                )
                return

    def _check_decision(self, process: Process, index: int, log: Log) -> None:
        """Check the votes and the holders of a record that this process is the first to decide."""
        record = log.after(index - 1, index)[0]
        before = self.rosters[-1]
        after = _fold(before, record)
        self.chains.append(log.chain(index))
        self.records.append(record)
        self.rosters.append(after)
        own = isinstance(record, Genesis)
        anew = _next_lineage(log, index)  # decides with its own voters, and all before itself
        voters = after if own else before if anew is None else _fold(before, anew)
        votes = self._votes(index, voters)
        if not (votes >= voters.voters if own else voters.may_decide(votes)):
            self._problem(
                f"I1: {process.me} decided record {index} ({type(record).__name__}) with the votes "
                f"{sorted(votes)} of {sorted(voters.voters)}"
            )
        if isinstance(record, Commit):
            self._end_offers(record)
            if anew and record.version > anew.versions[record.fragment]:
                for share in record.members:  # decided by the very lineage that goes on without it
                    del self.merged[(share.member, record.fragment, record.version)]
                return
            self.newest[record.fragment] = record
            self.in_force[(record.fragment, record.version)] = record
            holders = self._holders(record, voters)
            if anew is None and not is_held(holders, voters.voters):
                self._problem(
                    f"I4: version {record.version} of fragment {record.fragment} was decided, held "
                    f"by {sorted(holders)} of {sorted(voters.voters)} only"
                )
        elif isinstance(record, Roster):
            self.check_survivors()
        elif isinstance(record, Mitigation) and record.stage == EVICTED:
            self._check_eviction(record)

    def _check_eviction(self, record: Mitigation) -> None:
        """I9: at least two racks stay and can decide; one eviction at a time, and a limited number
        per rack."""
        roster, evicted = self.rosters[-1], list[int]()
        away: dict[int, Member | None] = {}
        for index, known in enumerate(self.records[:-1]):
            if isinstance(known, Mitigation) and known.stage == EVICTED:
                away[known.rack] = self.rosters[index].racks.get(known.rack)
                evicted.append(known.rack)
            elif isinstance(known, Mitigation):
                away.pop(known.rack, None)
            for rack in known.retired if isinstance(known, Roster) else ():
                away.pop(rack, None)
        left, voters = roster.voters - {record.rack}, roster.voters
        if len(left) < 2 or not roster.may_decide(left):
            self._problem(
                f"I9: rack {record.rack} is evicted, {sorted(left)} of {sorted(voters)} are left"
            )
        away = {r: m for r, m in away.items() if roster.racks.get(r) in (None, m)}
        if away or evicted.count(record.rack) >= EVICTIONS_MAX:
            self._problem(f"I9: rack {record.rack} is evicted after {evicted}, and {away} are")

    def _undo_to(self, process: Process, log: Log, index: int) -> None:
        """Once per lineage: forget what only the dead knew, and check that they are dead."""
        if index < len(self.chains) and self.chains[index] == log.chain(index):
            return
        record = log.record(index)
        assert isinstance(record, Lineage)
        here = (i for i in range(min(len(self.chains), index)) if log.reaches(i))
        same = [i for i in here if self.chains[i] == log.chain(i)]
        before, stay = self.rosters[same[-1]], _fold(Seating(), record)
        for other, _ in self.replicas.values():
            votes = other.me.rack in before.voters
            present = not other.dead and (votes or not other.stopped)
            if present and is_seated(other, before) and not is_seated(other, stay):
                self._problem(f"I1: {process.me} begins anew without {other.me}, which lives")
        del self.chains[same[-1] + 1 :], self.records[same[-1] + 1 :], self.rosters[same[-1] + 1 :]
        self.newest, self.merged, self.ended = {}, {}, {}
        for known in self.records:
            if isinstance(known, Commit):
                self._end_offers(known)
                if known.version <= record.versions[known.fragment]:
                    self.newest[known.fragment] = known
        self.in_force = {
            key: made for key, made in self.in_force.items() if key[1] <= record.versions[key[0]]
        }
        for key in [key for key in self.merged if key[2] > record.versions[key[1]]]:
            del self.merged[key]  # its offer has ended, but nobody merged it
        self._undo(record.versions)

    def _end_offers(self, commit: Commit) -> None:
        """I3: no offer is merged twice, or merged and dropped."""
        fragment, version = commit.fragment, commit.version
        for share in commit.members:
            self.merged[(share.member, fragment, version)] = share
        ends: list[MergeMember | Ended] = [*commit.members, *commit.dropped]
        for each in ends:
            name = (each.member, fragment, each.seq)
            if name in self.ended:
                self._problem(
                    f"I3: offer {each.seq} of fragment {fragment} of rack {each.member.rack} ends "
                    f"in versions {self.ended[name]} and {version}"
                )
            self.ended[name] = version

    def _votes(self, index: int, roster: Seating) -> set[int]:
        """Racks whose replica holds this very record. The dead count: they accepted it while they
        lived, and the decision may depend on their votes."""
        return {
            process.me.rack
            for process, replicas in self.replicas.values()
            if process.me.rank == 0 and is_seated(process, roster)
            for log in (replica.owner.log for replica in replicas if replica.votes)
            if log.last >= index and log.reaches(index) and log.chain(index) == self.chains[index]
        }

    # -------------------------------------------------------------- the bytes

    def _holders(self, commit: Commit, roster: Seating, *, live: bool = False) -> set[int]:
        """Racks all of whose ranks have the version in memory, decided or tentative."""
        counts = Counter(
            process.me.rack
            for process, _ in self.replicas.values()
            if process.trainer is not None
            and is_seated(process, roster)
            and not (live and (process.dead or process.stopped))
            and _has(process, commit)
        )
        return {rack for rack, count in counts.items() if count == len(commit.digests)}

    def _check_survival(self, commit: Commit) -> None:
        """While a quorum lives, one of its racks holds the newest version."""
        roster = self.rosters[-1]
        seated = [process for process, _ in self.replicas.values() if is_seated(process, roster)]
        alive = {p.me.rack for p in seated} - {p.me.rack for p in seated if p.dead}
        key = (commit.fragment, commit.version)
        if not roster.may_decide(alive) or key in self.lost or not roster.racks:
            return
        left = any(process.stopped for process in seated)
        if not left and not self._holders(commit, roster, live=True):
            self.lost.add(key)
            self._problem(
                f"I4: version {commit.version} of fragment {commit.fragment} is lost: "
                f"{sorted(alive)} live and are a quorum, and no rack of them holds it"
            )


def is_seated(process: Process, roster: Seating) -> bool:
    if process.me.rack == WITNESS:
        return roster.witness == process.member
    return roster.racks.get(process.me.rack) == process.member


def _has(process: Process, commit: Commit) -> bool:
    assert process.trainer is not None
    store, digest = process.trainer.rank.store, commit.digests[process.me.rank]
    key = (commit.fragment, commit.version)
    tentative = [anchor for (*place, _), anchor in store.tentative.items() if tuple(place) == key]
    return any(
        anchor is not None and anchor.digest == digest
        for anchor in (store.anchors.get(key), *tentative)
    )


def _fold(roster: Seating, record: Record) -> Seating:
    if not isinstance(record, Genesis | Roster | Lineage):
        return roster
    seats = record.roster if isinstance(record, Genesis) else record.members
    racks = {seat.member.rack: seat.member for seat in seats}
    unanimous = isinstance(record, Lineage) and record.unanimous
    return Seating(racks, frozenset(record.non_voters), record.witness, unanimous)


def _next_lineage(log: Log, index: int) -> Lineage | None:
    """The first decided one at or after `index`."""
    records = (log.record(i) for i in range(index, log.decided + 1))
    return next((record for record in records if isinstance(record, Lineage)), None)


def _record(log: Log, index: int) -> object:
    return next(iter(log.after(index - 1, index)), "compacted")
