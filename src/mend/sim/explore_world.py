"""sim: everything that can happen to a small job, one step at a time, with no clock at all.

Votes and the right to append are the real objects (`explore_parts`); what surrounds them is
reduced to what safety hangs on: who lives, which messages there may be, which rack holds which
version. docs/model_check.md says what is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from operator import is_
from typing import NamedTuple

from mend.protocol.epochs import attempt_of, count_of, epoch_of, number_of
from mend.protocol.messages import Commit, Genesis
from mend.protocol.quorum import hold, quorum
from mend.protocol.voter import Voter
from mend.sim.explore_parts import Parts, ProposerShot, Told, VoterShot
from mend.sim.explore_rosters import JOIN, NEVER, REMOVE, VOTE, Rosters, policy, seat
from mend.terms import WITNESS, Member

NOBODY, DEAD = -1, -2
NONE = (0, 0)
"""No gather: (version, attempt)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What is explored: all interleavings of at most so many of each.

    `epochs`: times that somebody stands for a new one, won or not. `attempts`: per version and
    epoch. `twins`: racks that are started again while their former life, cut off, still runs.
    """

    racks: int = 2
    witness: bool = True
    rounds: int = 1
    epochs: int = 2
    crashes: int = 1
    rosters: int = 0
    attempts: int = 1
    twins: int = 0


class Node(NamedTuple):
    """A member: its vote (NOBODY: not born yet, DEAD), whether it stands or leads, its bytes.
    `done`: the result of `gather` is complete, a tentative."""

    voter: int = NOBODY
    proposer: int = NOBODY
    held: int = -1
    gather: tuple[int, int] = NONE
    done: bool = False


class Term(NamedTuple):
    """Somebody who stood for an epoch. Its newest orders may arrive at any time, or never.

    `orders`: the last log of an owner that is gone. `results`: whose result was complete and is
    not any more; that it was may still be under way. `late`: votes under way of nodes that have
    died or gone on to another epoch: (node, voter) of a promise, (node, ballot) for who leads.
    """

    epoch: int
    owner: int
    orders: int = NOBODY
    gather: tuple[int, int] = NONE
    results: tuple[int, ...] = ()
    late: tuple[tuple[int, int], ...] = ()


class Used(NamedTuple):
    stands: int = 0
    crashes: int = 0
    rosters: int = 0
    twins: int = 0


class State(NamedTuple):
    """`decided`: the records that anybody ever decided."""

    nodes: tuple[Node, ...]
    terms: tuple[Term, ...]
    decided: tuple[int, ...]
    used: Used


class Action(NamedTuple):
    """`at`: the place of a term, or the epoch that is stood for. `nodes`: who else takes part."""

    what: str
    who: int
    at: int = 0
    nodes: tuple[int, ...] = ()
    change: str = ""


class Broken(Exception):
    """An invariant does not hold."""


Step = tuple[Action, State | str]
"""What happened, and what the world is now, or which invariant that breaks."""


class World:
    """`members`: every life there can be. A second one is born by the record that seats it."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds, self.parts = bounds, Parts()
        racks = range(bounds.racks)
        lives = [Member(rack, 1) for rack in racks]
        lives += [Member(WITNESS, 1)] if bounds.witness else []
        self.born = len(lives)
        lives += [Member(rack, 2) for rack in racks] if bounds.rosters > 0 else []
        self.members = tuple(lives)
        self.rosters = Rosters(self.parts, self.members)
        self.empty = self.parts.keep_voter(Voter())
        self.acts = {
            "stand": self._stand,
            "takeover": self._take_over,
            "learn": self._learn,
            "win": self._win,
            "append": self._append,
            "count": self._count,
            "gather": self._gather,
            "merge": self._merge,
            "commit": self._commit,
            "roster": self._roster,
            "copy": self._copy,
            "crash": self._crash,
        }

    def start(self) -> State:
        """Genesis is decided everywhere, and the first coordinator knows it."""
        parts, owner = self.parts, self.born - 1 if self.bounds.witness else 0
        epoch = epoch_of(1, self.members[owner].rack)
        genesis = Genesis(
            roster=tuple(seat(self.members[rack]) for rack in range(self.bounds.racks)),
            witness=Member(WITNESS, 1) if self.bounds.witness else None,
            policy=policy(self.bounds.racks),
            plan="",
            digests=(("",),),
        )
        voter = Voter()
        voter.append(epoch, 0, "", (genesis,), 1, 1)
        vote = parts.keep_voter(voter)
        founder = parts.new_proposer(parts.stand(self.empty, epoch))
        founder.found(epoch)
        founder.append(genesis)
        for member in self.members[: self.born]:
            founder.hear(member, voter.ballot())
        founder.decide()
        nodes = [Node() for _ in self.members]
        for node in range(self.born):
            nodes[node] = Node(vote, held=0 if node < self.bounds.racks else -1)
        nodes[owner] = nodes[owner]._replace(proposer=parts.keep_proposer(founder))
        decided = parts.decided(parts.voters[vote].log)
        return State(tuple(nodes), (Term(epoch, owner),), decided, Used())

    # -------------------------------------------------------------- all that can happen next

    def steps(self, state: State) -> Iterator[Step]:
        for action in self.possible(state):
            try:
                after = self.acts[action.what](state, action)
                if after is None or after == state:
                    continue
                after = self._tidy(after)
                self._keeps_bytes(after)
            except (Broken, AssertionError) as broken:
                yield action, str(broken) or repr(broken)
            else:
                if after != state:
                    yield action, after

    def possible(self, state: State) -> Iterator[Action]:
        """More than can happen: what has no effect is left out by `steps`."""
        living = [node for node, its in enumerate(state.nodes) if its.voter >= 0]
        for node in living:
            for epoch in self._epochs(state, node):
                if self.bounds.rosters > 0:
                    yield Action("stand", node, epoch)
                    continue
                for nodes in _subsets(living):
                    yield Action("takeover", node, epoch, nodes)
            if state.nodes[node].gather != NONE:
                yield Action("merge", node)
            yield Action("copy", node)
            if state.used.crashes < self.bounds.crashes:
                yield Action("crash", node, -1)
        for place, term in enumerate(state.terms):
            for node in living:
                yield Action("append", node, place)
            shot = self._active(state, term)
            if shot is not None and shot.leading:
                yield from self._of_leader(state, place, term)
            elif shot is not None:
                yield from self._of_candidate(state, place, term, shot)

    def _of_leader(self, state: State, place: int, term: Term) -> Iterator[Action]:
        yield Action("count", term.owner, place)
        yield Action("gather", term.owner, place)
        yield Action("commit", term.owner, place)
        for kind, node in self._changes(state, term):
            yield Action("roster", term.owner, place, (node,), kind)

    def _of_candidate(
        self, state: State, place: int, term: Term, shot: ProposerShot
    ) -> Iterator[Action]:
        could = [node for node, _ in term.late]
        for node, its in enumerate(state.nodes):
            if its.voter < 0:
                continue
            log = self.parts.logs[self._vote(state, node).log]
            if log.records:
                could.append(node)
            if log.decided > self.parts.logs[shot.log].decided:
                yield Action("learn", term.owner, place, (node,))
            if state.used.crashes < self.bounds.crashes and node != term.owner:
                yield Action("crash", node, place)
        for nodes in _subsets(could):
            yield Action("win", term.owner, place, nodes)

    def _active(self, state: State, term: Term) -> ProposerShot | None:
        """The proposer of a term that stands or leads."""
        number = state.nodes[term.owner].proposer
        if number < 0:
            return None
        shot = self.parts.proposers[number]
        return shot if shot.epoch == term.epoch else None

    def _vote(self, state: State, node: int) -> VoterShot:
        return self.parts.voters[state.nodes[node].voter]

    # -------------------------------------------------------------- epochs

    def _epochs(self, state: State, node: int) -> list[int]:
        """For which it may stand: any number from its own next to one above all there are, as it
        has heard of some of them. Who stands or leads goes on until there is a higher one."""
        if state.used.stands >= self.bounds.epochs:
            return []
        its, vote = state.nodes[node], self._vote(state, node)
        log = self.parts.log(vote.log)
        if self.members[node] not in log.written.voters or log.told.over:
            return []
        own = self.parts.proposers[its.proposer].epoch if its.proposer >= 0 else 0
        highest = max(
            [term.epoch for term in state.terms]
            + [self._vote(state, n).promised for n, it in enumerate(state.nodes) if it.voter >= 0]
        )
        if own and highest <= own:
            return []
        low, top = number_of(max(vote.promised, own)), number_of(highest)
        rack = self.members[node].rack
        return [epoch_of(number, rack) for number in range(low + 1, max(low, top) + 2)]

    def _stand(self, state: State, action: Action) -> State | None:
        node, epoch = action.who, action.at
        proposer = self.parts.stand(state.nodes[node].voter, epoch)
        terms = [*self._retired(state, node), Term(epoch, node)]
        used = state.used._replace(stands=state.used.stands + 1)
        after = state._replace(terms=tuple(sorted(terms)), used=used)
        return _put(after, node, state.nodes[node]._replace(proposer=proposer))

    def _take_over(self, state: State, action: Action) -> State | None:
        """To stand and to win at once. Without changes of the roster it is the same as any time
        between: nothing that a candidate knows from before decides whom it must ask."""
        after = self._stand(state, action)
        place = next(i for i, t in enumerate(after.terms) if t[:2] == (action.at, action.who))
        return self._win(after, Action("win", action.who, place, action.nodes))

    def _retired(self, state: State, node: int) -> list[Term]:
        """The terms when the one this node owns is over: what it has sent is all there will be."""
        terms = []
        for term in state.terms:
            shot = self._active(state, term) if term.owner == node else None
            if shot is not None:
                orders = shot.log if shot.leading else NOBODY
                term = Term(term.epoch, node, orders, term.gather)
            terms.append(term)
        return terms

    def _win(self, state: State, action: Action) -> State | None:
        """These promise, and the candidate hears of it. Votes whose promise is no use to anybody
        are as if they were slow, so no promise is given but here, and by who dies of it."""
        place, term = action.at, state.terms[action.at]
        owner, late = state.nodes[term.owner], dict(term.late)
        promises, after = [], state
        for node in action.nodes:
            voter = late.get(node)
            if voter is None:
                voter = self.parts.prepare(state.nodes[node].voter, term.epoch)
                after = self._moved_on(after, node, voter)
                after = _put(after, node, state.nodes[node]._replace(voter=voter))
            promises.append((self.members[node], voter))
        number = self.parts.win(owner.proposer, tuple(promises))
        if number == owner.proposer:
            return None
        after = _with(after, place, after.terms[place]._replace(late=()))
        after = _put(after, term.owner, after.nodes[term.owner]._replace(proposer=number))
        return self._decided(after, self.parts.proposers[number].log)

    def _learn(self, state: State, action: Action) -> State | None:
        (node,) = action.nodes
        owner, voter = state.nodes[action.who], state.nodes[node].voter
        number = self.parts.learn(owner.proposer, self.members[node], voter)
        return _put(state, action.who, owner._replace(proposer=number))

    def _moved_on(self, state: State, node: int, number: int) -> State:
        """The vote becomes `number` (DEAD: it is lost): what it has last accepted in the epoch that
        it leaves may still be under way."""
        old = self._vote(state, node)
        if number >= 0 and self.parts.voters[number].promised == old.promised:
            return state
        for place, term in enumerate(state.terms):
            if term.epoch != old.accepted:
                continue
            shot = self._active(state, term)
            if shot is not None and shot.leading:
                late = {**dict(term.late), node: self.parts.ballot(state.nodes[node].voter)}
                state = _with(state, place, term._replace(late=tuple(sorted(late.items()))))
        return state

    # -------------------------------------------------------------- the log

    def _orders(self, state: State, term: Term) -> int:
        shot = self._active(state, term)
        if shot is None:
            return term.orders
        return shot.log if shot.leading else NOBODY

    def _append(self, state: State, action: Action) -> State | None:
        """The newest orders of a term arrive: its log, and what is to be gathered."""
        node, term = action.who, state.terms[action.at]
        orders = self._orders(state, term)
        if orders < 0 or self.members[node] not in self.parts.addressed(orders):
            return None
        its, old = state.nodes[node], self._vote(state, node)
        number, taken = self.parts.append(its.voter, term.epoch, orders)
        if not taken:
            if old.promised <= term.epoch:
                raise Broken(f"{self.name(node)} finds a decision of its own contradicted")
            return None
        if number == its.voter and term.gather <= its.gather:
            return None
        after = self._moved_on(state, node, number)
        log = self.parts.voters[number].log
        after = self._decided(after, log, self.parts.logs[old.log].decided)
        return self._read(after, node, its._replace(voter=number), term)

    def _decided(self, state: State, log: int, before: int = 0) -> State:
        """Agreement: whatever anybody decided is decided, for ever and for all."""
        mine, all_ = self.parts.decided(log), state.decided
        if len(mine) < before:
            raise Broken(f"record {before} was decided and is not any more")
        shared = min(len(mine), len(all_))
        if mine[:shared] != all_[:shared]:
            index = next(i for i in range(shared) if mine[i] != all_[i])
            both = [self.parts.records[records[index]] for records in (all_, mine)]
            raise Broken(f"agreement: record {index + 1} is decided as {both[0]} and as {both[1]}")
        return state._replace(decided=mine) if len(mine) > len(all_) else state

    def _count(self, state: State, action: Action) -> State | None:
        """The coordinator hears of all that was accepted; later, if this does not happen now."""
        term, owner = state.terms[action.at], state.nodes[action.who]
        heard = [(self.members[node], ballot) for node, ballot in term.late]
        for member, its in zip(self.members, state.nodes, strict=True):
            if its.voter >= 0:
                heard.append((member, self.parts.ballot(its.voter)))
        number = self.parts.count(owner.proposer, tuple(heard))
        if number == owner.proposer:
            return None
        log = self.parts.proposers[number].log
        state = self._decided(state, log)
        if self.parts.log(log).told.versions[0] >= term.gather[0] > 0:
            state = _with(state, action.at, term._replace(gather=NONE, results=()))
        return _put(state, action.who, owner._replace(proposer=number))

    def _propose(self, state: State, term: Term, record: int) -> State:
        owner = state.nodes[term.owner]
        number = self.parts.propose(owner.proposer, record)
        state = self._decided(state, self.parts.proposers[number].log)
        return _put(state, term.owner, owner._replace(proposer=number))

    # -------------------------------------------------------------- bytes

    def _read(self, state: State, node: int, its: Node, term: Term) -> State:
        """A rack reads what is decided, then what it is asked to gather."""
        if its.held < 0 and its.voter >= 0 and self.members[node].rack == WITNESS:
            return _put(state, node, its)
        told = self._told(its.voter)
        if its.gather != NONE and told.version >= its.gather[0]:
            mine = its.done and told.version == its.gather[0] and told.result == result(its.gather)
            its = its._replace(held=told.version if mine else its.held, gather=NONE, done=False)
        if term.gather[0] == told.version + 1 and term.gather > its.gather:
            state = self._freed(state, node)
            its = its._replace(gather=term.gather, done=False)
        return _put(state, node, its)

    def _told(self, voter: int) -> Told:
        return self.parts.told(self.parts.decided(self.parts.voters[voter].log))

    def _freed(self, state: State, node: int) -> State:
        """A tentative is gone; that it was complete may still be under way to who asked for it."""
        its = state.nodes[node]
        if not its.done:
            return state
        terms = [
            term._replace(results=tuple(sorted({*term.results, node})))
            if term.gather == its.gather and self._active(state, term) is not None
            else term
            for term in state.terms
        ]
        return state._replace(terms=tuple(terms))

    def _gather(self, state: State, action: Action) -> State | None:
        term = state.terms[action.at]
        owner = self.parts.proposer(state.nodes[term.owner].proposer)
        version = owner.log.told.versions[0] + 1
        count = count_of(term.gather[1]) + 1 if term.gather[0] == version else 1
        may = owner.open and owner.may_append() and owner.log.last == owner.log.decided
        if not may or version > self.bounds.rounds or count > self.bounds.attempts:
            return None
        gather = (version, attempt_of(term.epoch, count))
        return _with(state, action.at, term._replace(gather=gather, results=()))

    def _merge(self, state: State, action: Action) -> State | None:
        its = state.nodes[action.who]
        if its.done or its.gather == NONE or its.held != its.gather[0] - 1:
            return None
        return _put(state, action.who, its._replace(done=True))

    def _commit(self, state: State, action: Action) -> State | None:
        term = state.terms[action.at]
        owner = self.parts.proposer(state.nodes[term.owner].proposer)
        told = owner.log.told
        may = owner.open and owner.may_append() and owner.log.last == owner.log.decided
        if not may or term.gather[0] != told.versions[0] + 1:
            return None
        complete = {
            n for n, its in enumerate(state.nodes) if its.done and its.gather == term.gather
        }
        members = {self.members[node] for node in complete.union(term.results)}
        seated = {each.member for each in told.seats.values()}
        if not hold(members & seated, told.voters):
            return None
        commit = Commit(0, term.gather[0], (), (), (result(term.gather),), "")
        state = _with(state, action.at, term._replace(results=()))
        return self._propose(state, term, self.parts.records.number(commit))

    def _copy(self, state: State, action: Action) -> State | None:
        """From any live rack that has the version."""
        its = state.nodes[action.who]
        version = self._told(its.voter).version
        donors = [n for n, other in enumerate(state.nodes) if other.voter >= 0]
        if its.held >= version or self.members[action.who].rack == WITNESS:
            return None
        if not any(state.nodes[donor].held >= version for donor in donors):
            return None
        return _put(state, action.who, its._replace(held=version))

    def _keeps_bytes(self, state: State) -> None:
        told = self.parts.told(state.decided)
        living = [
            (m, its) for m, its in zip(self.members, state.nodes, strict=True) if its.voter >= 0
        ]
        for member, its in living:
            tentative = its.done and its.gather[0] == told.version
            if member in told.seats and (
                its.held >= told.version or (tentative and result(its.gather) == told.result)
            ):
                return
        if told.seats and quorum({member for member, _ in living}, told.voters):
            raise Broken(
                f"bytes: version {told.version} is decided and a quorum of the roster lives, but "
                "none of its racks has it"
            )

    # -------------------------------------------------------------- who is there

    def _changes(self, state: State, term: Term) -> Iterator[tuple[str, int]]:
        owner = self.parts.proposer(state.nodes[term.owner].proposer)
        if state.used.rosters >= self.bounds.rosters or not owner.open:
            return
        log = owner.log.written
        if owner.log.last != owner.log.decided:
            return
        for node, member in enumerate(self.members):
            if member.rack == WITNESS:
                continue
            its, former = state.nodes[node], Member(member.rack, 1)
            if log.member(member.rack) == member:
                yield REMOVE, node
                if member.rack in log.learners and its.voter >= 0 and its.held == log.versions[0]:
                    yield VOTE, node
            elif member.incarnation > 1 and its.voter != DEAD and member not in log.former:
                alone = state.nodes[self.members.index(former)].voter == DEAD
                if alone or its.voter >= 0 or state.used.twins < self.bounds.twins:
                    yield JOIN, node

    def _roster(self, state: State, action: Action) -> State | None:
        kind, (node,) = action.change, action.nodes
        term = state.terms[action.at]
        log = self.parts.proposers[state.nodes[term.owner].proposer].log
        held = tuple(its.held for its in state.nodes)
        record = self.rosters.record(log, kind, self.members[node], held)
        if record == NEVER:
            return None
        used = state.used._replace(rosters=state.used.rosters + 1)
        if kind == JOIN and state.nodes[node].voter == NOBODY:
            former = self.members.index(Member(self.members[node].rack, 1))
            if state.nodes[former].voter >= 0:
                used = used._replace(twins=used.twins + 1)
            state = _put(state, node, Node(self.empty))
        return self._propose(state._replace(used=used), term, record)

    def _crash(self, state: State, action: Action) -> State | None:
        """At any moment; maybe right behind a promise to the candidate of term `at`."""
        node = action.who
        after = self._moved_on(self._freed(state, node), node, DEAD)
        if action.at >= 0:
            term, voter = after.terms[action.at], state.nodes[node].voter
            promised = self.parts.prepare(voter, term.epoch)
            if promised == voter or not self._begun(voter):
                return None
            late = tuple(sorted({**dict(term.late), node: promised}.items()))
            after = _with(after, action.at, term._replace(late=late))
        after = after._replace(terms=tuple(self._retired(after, node)))
        used = state.used._replace(crashes=state.used.crashes + 1)
        return self.dead(after._replace(used=used), node)

    def _begun(self, voter: int) -> bool:
        return bool(self.parts.logs[self.parts.voters[voter].log].records)

    def dead(self, state: State, node: int) -> State:
        """A crash takes all memory. What its reports said of its bytes may still be read."""
        held = state.nodes[node].held if state.used.rosters < self.bounds.rosters else -1
        return _put(state, node, Node(DEAD, held=held))

    # -------------------------------------------------------------- fewer states

    def _tidy(self, state: State) -> State:
        """Leave out messages that cannot do anything any more, so that more states are one."""
        terms: list[Term] = []
        for term in state.terms:
            shot = self._active(state, term)
            if shot is None:
                if self._matters(state, term):
                    terms.append(term)
                continue
            if shot.leading and term.late:
                decided = self.parts.logs[shot.log].decided
                late = tuple(p for p in term.late if self.parts.ballots[p[1]].last > decided)
                if late != term.late:
                    term = term._replace(late=late)
            terms.append(term)
        if len(terms) == len(state.terms) and all(map(is_, terms, state.terms)):
            return state
        return state._replace(terms=tuple(terms))

    def _matters(self, state: State, term: Term) -> bool:
        """Whether some voter would do anything about the orders of an owner that is gone."""
        if term.orders < 0:
            return False
        for node, its in enumerate(state.nodes):
            if its.voter < 0 or self.members[node] not in self.parts.addressed(term.orders):
                continue
            if self.parts.append(its.voter, term.epoch, term.orders)[0] != its.voter:
                return True
            if self._vote(state, node).promised == term.epoch and term.gather > its.gather:
                return True
        return False

    def name(self, node: int) -> str:
        member = self.members[node]
        if member.rack == WITNESS:
            return "the witness"
        return f"rack {member.rack}" + (", restarted," if member.incarnation > 1 else "")


def result(gather: tuple[int, int]) -> str:
    """Digest of a merge: another attempt may have other members, and so another result."""
    return f"{gather[0]:08x}{gather[1]:024x}"


def _subsets(nodes: list[int]) -> Iterator[tuple[int, ...]]:
    """All but the empty one."""
    for size in range(1, len(nodes) + 1):
        yield from combinations(sorted(nodes), size)


def _put(state: State, node: int, its: Node) -> State:
    nodes, terms, decided, used = state
    return State((*nodes[:node], its, *nodes[node + 1 :]), terms, decided, used)


def _with(state: State, place: int, term: Term) -> State:
    terms = state.terms
    return state._replace(terms=(*terms[:place], term, *terms[place + 1 :]))
