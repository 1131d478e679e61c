"""Explores changes of votes, deaths, restarts and new lineages of a job that has begun.

This is the world of `founding` with rosters: `membership.next_roster` gives the proposals of a
leader, for every set of silent members. All past lives are attested dead at once and to all
processes; a process that has not heard of a death simply takes no step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

from mend.consensus.epochs import owner_of
from mend.consensus.log import Log
from mend.consensus.quorum import quorum
from mend.consensus.records import Lineage
from mend.types import WITNESS, Member
from mend_lab.sim.model_check import founding
from mend_lab.sim.model_check.founding import Act, Node, State, name, play
from mend_lab.sim.model_check.membership import proposals
from mend_lab.sim.model_check.parts import ProposerShot
from mend_lab.sim.model_check.state import Broken, word


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds(founding.Bounds):
    """`rosters`: the number of rosters that leaders append."""

    founds: int = 0
    commits: int = 0
    lineages: bool = True
    rosters: int = 1


class ModelWorld(founding.ModelWorld):
    """A rack holds version 0 of the one fragment if it founded the job or has copied it."""

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
        return super()._born(rack, life)._replace(held=0 if life == 1 and rack != WITNESS else -1)

    # -------------------------------------------------------------- what can happen

    def _alone(self, state: State, node: int) -> Iterator[Act]:
        yield from super()._alone(state, node)
        its, who = state.nodes[node], self.member(state, node)
        seated = self.log(its.ear.vote.log).committed.member(who.rack) == who
        if seated and its.held < 0 and any(each.held >= 0 for each in state.nodes):
            yield f"{name(who)} copies version 0", partial(self._copy, state, node)

    def _copy(self, state: State, node: int) -> State:
        after = self._put(state, node, state.nodes[node]._replace(held=0))
        return self._report_state(after, node)

    def _may_stand(self, state: State, log: Log, who: Member) -> bool:
        written = log.appended
        alone = written.voters <= self._gone(state)
        return who in (written.members if alone else written.voters)

    def _of_right(self, state: State, node: int) -> Iterator[Act]:
        yield from super()._of_right(state, node)
        right, who = state.nodes[node].right, name(self.member(state, node))
        if not right.leading or state.used.rosters == self.bounds.rosters:
            return
        log = self.logs[right.log]
        if log.records and log.decided == len(log.records) >= right.opening:
            held = tuple(
                (self.member(state, each), its.held) for each, its in enumerate(state.nodes)
            )
            for number in self.proposals(right, held):
                said = f"{who} appends {word(self.records[number])}"
                yield said, partial(self._roster, state, node, number)

    def _roster(self, state: State, node: int, number: int) -> State:
        used = state.used._replace(rosters=state.used.rosters + 1)
        right = state.nodes[node].right
        return self._append(state._replace(used=used), node, right, self.records[number])

    def _proposals(
        self, right: ProposerShot, held: tuple[tuple[Member, int], ...]
    ) -> tuple[int, ...]:
        """Numbers of the records that this leader may append, by who is silent, and for how
        long."""
        proposer = self.proposer_of(right)
        lives = {member.rack: member for member, _ in held}
        owner = owner_of(proposer.epoch)
        ready = proposer.ready() | {lives[owner]}
        rosters = proposals(proposer.log.appended, owner, lives, dict(held), ready)
        return tuple(self.records.number(roster) for roster in rosters)

    # -------------------------------------------------------------- promises, with the bytes

    def _held(self, state: State, right: ProposerShot) -> tuple[tuple[Member, int], ...]:
        return tuple(sorted({(t.sender, t.held) for t in state.votes if t.epoch == right.epoch}))

    # -------------------------------------------------------------- what must hold

    def _holds(self, state: State) -> None:
        super()._holds(state)
        logs = (its.ear.vote.log for its in state.nodes)
        longest = max(logs, key=lambda number: self.logs[number].decided)
        lives = tuple(self.member(state, node) for node in range(len(self.racks)))
        if problem := self.problem(longest, lives, tuple(its.held for its in state.nodes)):
            raise Broken(problem)

    def _problem(self, longest: int, lives: tuple[Member, ...], held: tuple[int, ...]) -> str:
        """Of the longest list of decisions that anybody knows who lives."""
        shot = self.logs[longest]
        if lost := self._left_out(shot.records[: shot.decided]).intersection(lives):
            return f"a lineage began without {name(min(lost))}, which lives"
        committed = self.log(longest).committed
        here = [member for member in lives if member in committed.members]
        holds = any(has >= 0 for member, has in zip(lives, held, strict=True) if member in here)
        if committed.begun and quorum(set(here), committed.voters) and not holds:
            return "bytes: a quorum of the roster lives, and no rack of it has version 0"
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
