"""Explores changes of votes, deaths, restarts and new lineages of a job that has begun.

This is the world of `founding` with rosters: `membership.next_roster` gives the proposals of a
leader, for every set of silent members. All past lives are attested dead at once and to all
processes; a process that has not heard of a death simply takes no step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

from mend.consensus.ballots import owner_of
from mend.consensus.log import Log
from mend.consensus.quorum import hold
from mend.consensus.records import Commit, Lineage
from mend.types import WITNESS, Member
from mend_lab.sim.model_check import founding
from mend_lab.sim.model_check.founding import Act, Ear, Node, SentOrders, State, name, play
from mend_lab.sim.model_check.membership import proposals
from mend_lab.sim.model_check.parts import ProposerShot
from mend_lab.sim.model_check.state import Broken, subsets, word


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds(founding.Bounds):
    """`rosters`: the number of rosters that leaders append. `merges`: the same of commits, each of
    racks that can merge it and are enough."""

    founds: int = 0
    commits: int = 0
    lineages: bool = True
    rosters: int = 1
    merges: int = 0


class ModelWorld(founding.ModelWorld):
    """A rack holds version 0 of a fragment if it founded the job, and a version that it has merged
    or copied."""

    bounds: Bounds

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self.proposals: Callable[..., tuple[int, ...]] = cache(self._proposals)
        self.problem: Callable[..., str] = cache(self._problem)

    def start(self) -> State:
        """All nodes know that the job has begun."""
        state = super().start()
        leader = name(self.member(state, self.racks.index(self.founder.rack)))
        names = [name(Member(rack, 1)) for rack in self.racks]
        everybody = [f"{each} gets orders" for each in names]
        counted = [f"{leader} hears what {each} has accepted" for each in names]
        moves = [*everybody, f"{leader} appends Genesis", *everybody, *counted, *everybody]
        return play(self, moves, state)

    def _born(self, rack: int, life: int) -> Node:
        version = 0 if life == 1 and rack != WITNESS else -1
        return super()._born(rack, life)._replace(held=(version,) * self.bounds.fragments)

    # -------------------------------------------------------------- what can happen

    def _alone(self, state: State, node: int) -> Iterator[Act]:
        yield from super()._alone(state, node)
        its, who = state.nodes[node], self.member(state, node)
        committed = self.log(its.ear.vote.log).committed
        if committed.member(who.rack) != who:
            return
        for p, version in enumerate(committed.versions):
            here = any(each.held[p] == version for each in state.nodes)
            if its.held[p] < version and here:
                step = f"{name(who)} copies version {version} of fragment {p}"
                yield step, partial(self._copy, state, node, p, version)

    def _copy(self, state: State, node: int, fragment: int, version: int) -> State:
        its = state.nodes[node]
        held = (*its.held[:fragment], version, *its.held[fragment + 1 :])
        return self._report_state(self._put(state, node, its._replace(held=held)), node)

    def _hear(self, state: State, node: int, sent: SentOrders, late: bool, prev: int) -> Act:
        step, act = super()._hear(state, node, sent, late, prev)

        def read() -> State | None:
            after = act()
            if after is None or after.nodes[node].ear == state.nodes[node].ear:
                return after
            return self._read(after, node)

        return step, read

    def _read(self, state: State, node: int) -> State:
        """The ranks of a rack read what is decided, where its leader passes it on: what they have
        merged counts as held from now on."""
        its, who = state.nodes[node], self.member(state, node)
        log, shot = self.log(its.ear.vote.log), self.logs[its.ear.vote.log]
        if who.rack == WITNESS or not self._passes_on(its.ear, log, who):
            return state
        decided, held = frozenset(shot.records[: shot.decided]), list(its.held)
        for number in its.made & decided:
            commit = self.records[number]
            if (
                isinstance(commit, Commit)
                and commit.version == log.committed.versions[commit.fragment]
            ):
                held[commit.fragment] = commit.version
        for p, version in enumerate(log.committed.versions):
            if held[p] > version:
                raise Broken(f"{name(who)} trains on an undone version of fragment {p}")
        after = its._replace(held=tuple(held), made=its.made - decided)
        if after == its:
            return state
        return self._report_state(self._put(state, node, after), node)

    @staticmethod
    def _passes_on(ear: Ear, log: Log, who: Member) -> bool:
        """`Leader._may_pass_on`."""
        awaits = 0 < ear.vote.accepted < ear.vote.promised
        begins = any(isinstance(record, Lineage) for record in log.undecided())
        return log.committed.member(who.rack) == who and not awaits and not begins

    def _may_stand(self, state: State, log: Log, who: Member) -> bool:
        written = log.appended
        alone = written.voters <= self._gone(state)
        return who in (written.members if alone else written.voters)

    def _of_right(self, state: State, node: int) -> Iterator[Act]:
        yield from super()._of_right(state, node)
        right, who = state.nodes[node].right, name(self.member(state, node))
        log = self.logs[right.log]
        if not right.leading or not log.records or log.decided < right.opening:
            return
        if state.used.commits < self.bounds.merges:
            yield from self._merges(state, node)
        if state.used.rosters < self.bounds.rosters and log.decided == len(log.records):
            held = tuple(
                (self.member(state, each), its.held) for each, its in enumerate(state.nodes)
            )
            for number in self.proposals(right, held):
                step = f"{who} appends {word(self.records[number])}"
                yield step, partial(self._roster, state, node, number)

    def _merges(self, state: State, node: int) -> Iterator[Act]:
        """A commit of every fragment, by each set of racks that holds the version before and is
        enough. They hold its result, tentatively."""
        right, who = state.nodes[node].right, name(self.member(state, node))
        proposer = self.proposer_of(right)
        log = proposer.log.committed
        busy = {r.fragment for r in proposer.log.undecided() if isinstance(r, Commit)}
        for p, version in enumerate(log.versions) if proposer.may_append() else ():
            able = [
                place
                for place, its in enumerate(state.nodes)
                if its.held[p] == version and self.member(state, place) in log.members
            ]
            for places in subsets(able) if p not in busy else ():
                if hold({self.member(state, place) for place in places}, log.voters):
                    racks = ",".join(str(self.racks[place]) for place in places)
                    step = f"{who} appends version {version + 1} of fragment {p} by {racks}"
                    yield step, partial(self._merge, state, node, p, places)

    def _merge(self, state: State, node: int, fragment: int, places: tuple[int, ...]) -> State:
        right, used = state.nodes[node].right, state.used
        version = self.log(right.log).committed.versions[fragment] + 1
        commit = Commit(fragment, version, (), (), (f"{right.ballot:032x}",), "all-in")
        number = self.records.number(commit)
        nodes = tuple(
            its._replace(made=its.made | {number}) if place in places else its
            for place, its in enumerate(state.nodes)
        )
        state = state._replace(nodes=nodes, used=used._replace(commits=used.commits + 1))
        return self._append(state, node, right, commit)

    def _roster(self, state: State, node: int, number: int) -> State:
        used = state.used._replace(rosters=state.used.rosters + 1)
        right = state.nodes[node].right
        return self._append(state._replace(used=used), node, right, self.records[number])

    def _proposals(
        self, right: ProposerShot, held: tuple[tuple[Member, tuple[int, ...]], ...]
    ) -> tuple[int, ...]:
        """Numbers of the records that this leader may append, by who is silent, and for how
        long."""
        proposer = self.proposer_of(right)
        lives = {member.rack: member for member, _ in held}
        owner = owner_of(proposer.ballot)
        ready = proposer.ready() | {lives[owner]}
        rosters = proposals(proposer.log.appended, owner, lives, dict(held), ready)
        return tuple(self.records.number(roster) for roster in rosters)

    # -------------------------------------------------------------- promises, with the bytes

    def _held(
        self, state: State, right: ProposerShot
    ) -> tuple[tuple[Member, tuple[int, ...]], ...]:
        return tuple(sorted({(t.sender, t.held) for t in state.votes if t.ballot == right.ballot}))

    # -------------------------------------------------------------- what must hold

    def _holds(self, state: State) -> None:
        super()._holds(state)
        logs = (its.ear.vote.log for its in state.nodes)
        longest = max(logs, key=lambda number: self.logs[number].decided)
        lives = tuple(self.member(state, node) for node in range(len(self.racks)))
        held = tuple((its.held, its.made) for its in state.nodes)
        if problem := self.problem(longest, lives, held):
            raise Broken(problem)

    def _problem(
        self,
        longest: int,
        lives: tuple[Member, ...],
        held: tuple[tuple[tuple[int, ...], frozenset[int]], ...],
    ) -> str:
        """Of the longest list of decisions that anybody knows who lives."""
        shot = self.logs[longest]
        if lost := self._left_out(shot.records[: shot.decided]).intersection(lives):
            return f"a lineage began without {name(min(lost))}, which lives"
        committed = self.log(longest).committed
        here = [member for member in lives if member in committed.members]
        if not committed.begun or not committed.may_decide(set(here)):
            return ""
        newest = {
            (record.fragment, record.version): number
            for number in shot.records[: shot.decided]
            if isinstance(record := self.records[number], Commit)
        }
        of_roster = [its for member, its in zip(lives, held, strict=True) if member in here]
        for p, version in enumerate(committed.versions):
            made = newest.get((p, version))
            if not any(has[p] >= version or made in results for has, results in of_roster):
                return (
                    f"bytes: a quorum of the roster lives, and no rack of it has version {version} "
                    f"of fragment {p}"
                )
        return ""

    def _left_out(self, records: tuple[int, ...]) -> frozenset[Member]:
        """Who had a seat before some lineage of this list, and none in it."""
        log, left_out = Log(), set[Member]()
        for number in records:
            before, record = log.appended.members, self.records[number]
            log.append(record)
            if isinstance(record, Lineage):
                left_out |= before - log.appended.members
        return frozenset(left_out)
