"""All steps that a small job can take, one at a time, without clocks.

Acceptors and proposers are the real objects (`parts`). Their surroundings are reduced to the facts
that safety depends on: the live members, the messages under way, and the version of each rack.
docs/internals/model_check.md lists what is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import combinations
from operator import is_

from mend.consensus.acceptor import Acceptor
from mend.consensus.ballots import attempt_of, ballot_of, count_of
from mend.consensus.log import LogState
from mend.consensus.proposer import Proposer
from mend.consensus.quorum import hold, quorum
from mend.consensus.records import Commit, Genesis
from mend.types import WITNESS, Member
from mend_lab.sim.model_check.membership import (
    DEMOTE,
    JOIN,
    NEVER,
    REMOVE,
    VOTE,
    Rosters,
    policy,
    seat,
)
from mend_lab.sim.model_check.parts import ProposerShot
from mend_lab.sim.model_check.state import (
    DEAD,
    NOBODY,
    NONE,
    Action,
    Bounds,
    Broken,
    Node,
    State,
    Step,
    Term,
    Used,
    outcomes,
    put_node,
    put_term,
    result,
    subsets,
)
from mend_lab.sim.model_check.votes import Deciding


class ModelWorld(Deciding):
    """All steps, and what must hold after each."""

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self.rosters = Rosters(self.parts, self.members)
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
            "propose": self._propose,
            "copy": self._copy,
            "crash": self._crash,
        }

    def start(self) -> State:
        """The job has begun; or, with `demoted`, it has just decided its first roster, which only
        the members that had to accept it know."""
        state = self._begun()
        if self.bounds.demoted == NOBODY:
            return state
        owner, rack = self.born - 1, self.bounds.demoted
        proposed = (s for a, s in self.steps(state) if a.what == "propose")
        state = next(s for s in proposed if isinstance(s, State) and self._demotes(s, owner, rack))
        votes = [node for node in range(self.bounds.racks) if node != rack]
        for action in [*(Action("append", node) for node in votes), Action("count", owner)]:
            state = self._done(state, action)
        return state

    def _done(self, state: State, action: Action) -> State:
        after = next(s for a, s in self.steps(state) if a[:3] == action[:3])
        assert isinstance(after, State), after
        return after

    def _demotes(self, state: State, owner: int, rack: int) -> bool:
        log = self.parts.log(self.parts.proposers[state.nodes[owner].proposer].log)
        return rack in log.appended.non_voters

    def _begun(self) -> State:
        """Genesis is decided everywhere, and the first coordinator knows it."""
        parts, owner = self.parts, self.born - 1 if self.bounds.witness else 0
        ballot = ballot_of(1, *self.members[owner])
        genesis = Genesis(
            roster=tuple(seat(self.members[rack]) for rack in range(self.bounds.racks)),
            witness=Member(WITNESS, 1) if self.bounds.witness else None,
            policy=policy(self.bounds.racks),
            plan="",
            digests=(("",),),
            non_voters=(WITNESS,) if self.bounds.witness and self.bounds.racks % 2 else (),
            versions=(self.bounds.first,),
            rounds=(self.bounds.first,),
        )
        acceptor = Acceptor()
        acceptor.append(ballot, 0, "", (genesis,), 1, 1)
        vote = parts.keep_acceptor(acceptor)
        founder = parts.new_proposer(parts.stand(self.empty, ballot))
        founder.found(ballot)
        founder.append(genesis)
        for member in self.members[: self.born]:
            founder.hear(member, acceptor.acceptor_state())
        founder.decide()
        nodes = [Node() for _ in self.members]
        for node in range(self.born):
            nodes[node] = Node(vote, held=self.bounds.first if node < self.bounds.racks else -1)
        nodes[owner] = nodes[owner]._replace(proposer=parts.keep_proposer(founder))
        decided = parts.decided(parts.voters[vote].log)
        return State(tuple(nodes), (Term(ballot, owner),), decided, Used())

    def steps(self, state: State) -> Iterator[Step]:
        actions = self.possible(state)
        acts = ((action, partial(self.acts[action.what], state, action)) for action in actions)
        return outcomes(state, acts, self._settle)

    def _settle(self, state: State) -> State:
        state = self._tidy(state)
        self._keeps_bytes(state)
        return state

    def possible(self, state: State) -> Iterator[Action]:
        """A superset of the possible actions: `steps` leaves out those without an effect."""
        living = [node for node, its in enumerate(state.nodes) if its.acceptor >= 0]
        for node in living:
            yield from self._of_member(state, node, living)
        for place, term in enumerate(state.terms):
            for node in living:
                yield Action("append", node, place)
            shot = self.active(state, term)
            if shot is not None and shot.leading:
                yield from self._of_leader(state, place, term)
            elif shot is not None:
                yield from self._of_candidate(state, place, term, shot)

    def _of_member(self, state: State, node: int, living: list[int]) -> Iterator[Action]:
        for ballot in self.ballots(state, node):
            if self.bounds.rosters > 0:
                yield Action("stand", node, ballot)
                continue
            for nodes in subsets(living):
                yield Action("takeover", node, ballot, nodes)
        if state.nodes[node].gather != NONE:
            yield Action("merge", node)
        yield Action("copy", node)
        if state.used.crashes < self.bounds.crashes:
            yield Action("crash", node, -1)

    def _of_leader(self, state: State, place: int, term: Term) -> Iterator[Action]:
        yield Action("count", term.owner, place)
        yield Action("gather", term.owner, place)
        yield Action("commit", term.owner, place)
        if self.bounds.demotions:
            for number in self._proposed(state, term):
                yield Action("propose", term.owner, place, (), str(number))
            return
        for changes in self._rosters(state, term):
            kinds, nodes = zip(*changes, strict=True)
            yield Action("roster", term.owner, place, nodes, "+".join(kinds))

    def _of_candidate(
        self, state: State, place: int, term: Term, shot: ProposerShot
    ) -> Iterator[Action]:
        could = [node for node, _ in term.late]
        for node, its in enumerate(state.nodes):
            if its.acceptor < 0:
                continue
            log = self.parts.logs[self.vote(state, node).log]
            if log.records:
                could.append(node)
            if log.decided > self.parts.logs[shot.log].decided:
                yield Action("learn", term.owner, place, (node,))
            if state.used.crashes < self.bounds.crashes and node != term.owner:
                yield Action("crash", node, place)
        for nodes in subsets(could):
            yield Action("win", term.owner, place, nodes)

    def _append(self, state: State, action: Action) -> State | None:
        """The newest orders of a term arrive: its log, and what is to be gathered."""
        node, term = action.who, state.terms[action.at]
        orders = self.orders(state, term)
        if orders < 0 or self.members[node] not in self.parts.addressed(orders):
            return None
        its, old = state.nodes[node], self.vote(state, node)
        number, taken = self.parts.append(its.acceptor, term.ballot, orders)
        if not taken:
            if old.promised <= term.ballot:
                raise Broken(f"{self.name(node)} finds a decision of its own contradicted")
            return None
        if number == its.acceptor and term.gather <= its.gather:
            return None
        after = self.move_on(state, node, number)
        log = self.parts.voters[number].log
        after = self.agree(after, log, self.parts.logs[old.log].decided)
        return self._read(after, node, its._replace(acceptor=number), term)

    def _read(self, state: State, node: int, its: Node, term: Term) -> State:
        """A rack reads what is decided, then what it is asked to gather."""
        if its.held < 0 and its.acceptor >= 0 and self.members[node].rack == WITNESS:
            return put_node(state, node, its)
        committed = self.committed(its.acceptor)
        if its.gather != NONE and committed.version >= its.gather[0]:
            own = (
                its.done
                and committed.version == its.gather[0]
                and committed.result == result(its.gather)
            )
            its = its._replace(held=committed.version if own else its.held, gather=NONE, done=False)
        if term.gather[0] == committed.version + 1 and term.gather > its.gather:
            state = self._freed(state, node)
            its = its._replace(gather=term.gather, done=False)
        return put_node(state, node, its)

    def _freed(self, state: State, node: int) -> State:
        """A tentative is gone; that it was complete may still be under way to who asked for it."""
        its = state.nodes[node]
        if not its.done:
            return state
        terms = [
            term._replace(results=tuple(sorted({*term.results, node})))
            if term.gather == its.gather and self.active(state, term) is not None
            else term
            for term in state.terms
        ]
        return state._replace(terms=tuple(terms))

    def _gather(self, state: State, action: Action) -> State | None:
        term = state.terms[action.at]
        owner = self.parts.proposer(state.nodes[term.owner].proposer)
        version = owner.log.committed.versions[0] + 1
        count = count_of(term.gather[1]) + 1 if term.gather[0] == version else 1
        if (
            not may_commit(owner)
            or version > self.bounds.first + self.bounds.rounds
            or count > self.bounds.attempts
        ):
            return None
        gather = (version, attempt_of(term.ballot, count))
        return put_term(state, action.at, term._replace(gather=gather, results=()))

    def _merge(self, state: State, action: Action) -> State | None:
        its = state.nodes[action.who]
        if its.done or its.gather == NONE or its.held != its.gather[0] - 1:
            return None
        return put_node(state, action.who, its._replace(done=True))

    def _commit(self, state: State, action: Action) -> State | None:
        term = state.terms[action.at]
        owner = self.parts.proposer(state.nodes[term.owner].proposer)
        committed = owner.log.committed
        if not may_commit(owner) or term.gather[0] != committed.versions[0] + 1:
            return None
        complete = {
            n for n, its in enumerate(state.nodes) if its.done and its.gather == term.gather
        }
        members = {self.members[node] for node in complete.union(term.results)}
        seated = {each.member for each in committed.seats.values()}
        if not hold(members & seated, committed.voters):
            return None
        commit = Commit(0, term.gather[0], (), (), (result(term.gather),), "all-in")
        state = put_term(state, action.at, term._replace(results=()))
        return self.propose(state, term, self.parts.records.number(commit))

    def _copy(self, state: State, action: Action) -> State | None:
        """From any live rack that has the version."""
        its = state.nodes[action.who]
        version = self.committed(its.acceptor).version
        donors = [n for n, other in enumerate(state.nodes) if other.acceptor >= 0]
        if its.held >= version or self.members[action.who].rack == WITNESS:
            return None
        if not any(state.nodes[donor].held >= version for donor in donors):
            return None
        return put_node(state, action.who, its._replace(held=version))

    def _keeps_bytes(self, state: State) -> None:
        committed = self.parts.committed(state.decided)
        living = [
            (m, its) for m, its in zip(self.members, state.nodes, strict=True) if its.acceptor >= 0
        ]
        for member, its in living:
            tentative = its.done and its.gather[0] == committed.version
            if member in committed.seats and (
                its.held >= committed.version
                or (tentative and result(its.gather) == committed.result)
            ):
                return
        if committed.seats and quorum({member for member, _ in living}, committed.voters):
            raise Broken(
                f"bytes: version {committed.version} is decided and a quorum of the roster lives, "
                "but none of its racks has it"
            )

    def _changes(self, state: State, term: Term) -> Iterator[tuple[str, int]]:
        owner = self.parts.proposer(state.nodes[term.owner].proposer)
        if state.used.rosters >= self.bounds.rosters or not owner.open:
            return
        log = owner.log.appended
        if owner.log.last != owner.log.decided:
            return
        for node, member in enumerate(self.members):
            yield from self._votes(node, log)
            if member.rack == WITNESS:
                continue
            its, former = state.nodes[node], Member(member.rack, 1)
            if log.member(member.rack) == member:
                yield REMOVE, node
                if (
                    member.rack in log.non_voters
                    and its.acceptor >= 0
                    and its.held == log.versions[0]
                ):
                    yield VOTE, node
            elif member.incarnation > 1 and its.acceptor != DEAD and member not in log.former:
                alone = state.nodes[self.members.index(former)].acceptor == DEAD
                if alone or its.acceptor >= 0 or state.used.twins < self.bounds.twins:
                    yield JOIN, node

    def _votes(self, node: int, log: LogState) -> Iterator[tuple[str, int]]:
        """Votes that are taken from members that stay, and given back to the witness."""
        member = self.members[node]
        if self.bounds.votes < 2:
            return
        if member in log.voters:
            yield DEMOTE, node
        elif member == log.witness:
            yield VOTE, node

    def _rosters(self, state: State, term: Term) -> Iterator[tuple[tuple[str, int], ...]]:
        """One change, or as many at once as the bounds allow, each of another rack."""
        changes = list(self._changes(state, term))
        for count in range(1, self.bounds.votes + 1):
            for group in combinations(changes, count):
                racks = {self.members[node].rack for _, node in group}
                if len(racks) == count:
                    yield group

    def _proposed(self, state: State, term: Term) -> tuple[int, ...]:
        """Numbers of the rosters that the real rule proposes, for all that may be silent."""
        owner = state.nodes[term.owner].proposer
        if state.used.rosters >= self.bounds.rosters or not self.parts.proposer(owner).open:
            return ()
        shot = self.parts.proposers[owner]
        written = self.parts.logs[shot.log].records
        ready = frozenset(
            member
            for node, (member, its) in enumerate(zip(self.members, state.nodes, strict=True))
            if its.acceptor >= 0
            and self.vote(state, node).accepted == term.ballot
            and self.parts.logs[self.vote(state, node).log].records == written
        )
        return self.rosters.proposed(
            shot.log, self.members[term.owner].rack, tuple(its.held for its in state.nodes), ready
        )

    def _propose(self, state: State, action: Action) -> State:
        used = state.used._replace(rosters=state.used.rosters + 1)
        term = state.terms[action.at]
        return self.propose(state._replace(used=used), term, int(action.change))

    def _roster(self, state: State, action: Action) -> State | None:
        changes = list(zip(action.change.split("+"), action.nodes, strict=True))
        term = state.terms[action.at]
        log = self.parts.proposers[state.nodes[term.owner].proposer].log
        held = tuple(its.held for its in state.nodes)
        change = tuple((kind, self.members[node]) for kind, node in changes)
        record = self.rosters.record(log, change, held)
        if record == NEVER:
            return None
        used = state.used._replace(rosters=state.used.rosters + 1)
        for kind, node in changes:
            if kind == JOIN and state.nodes[node].acceptor == NOBODY:
                former = self.members.index(Member(self.members[node].rack, 1))
                if state.nodes[former].acceptor >= 0:
                    used = used._replace(twins=used.twins + 1)
                state = put_node(state, node, Node(self.empty))
        return self.propose(state._replace(used=used), term, record)

    def _crash(self, state: State, action: Action) -> State | None:
        """At any moment; maybe right after a promise to the candidate of term `at`."""
        node = action.who
        after = self.move_on(self._freed(state, node), node, DEAD)
        if action.at >= 0:
            term, acceptor = after.terms[action.at], state.nodes[node].acceptor
            promised = self.parts.prepare(acceptor, term.ballot)
            if promised == acceptor or not self.begun(acceptor):
                return None
            late = tuple(sorted({**dict(term.late), node: promised}.items()))
            after = put_term(after, action.at, term._replace(late=late))
        after = after._replace(terms=tuple(self.end_terms(after, node)))
        used = state.used._replace(crashes=state.used.crashes + 1)
        return self.dead(after._replace(used=used), node)

    def dead(self, state: State, node: int) -> State:
        """A crash takes all memory. What its reports said of its bytes may still be read."""
        held = state.nodes[node].held if state.used.rosters < self.bounds.rosters else -1
        return put_node(state, node, Node(DEAD, held=held))

    def _tidy(self, state: State) -> State:
        """Leave out messages that cannot do anything any more, so that more states are one."""
        terms: list[Term] = []
        for term in state.terms:
            shot = self.active(state, term)
            if shot is None:
                if self._matters(state, term):
                    terms.append(term)
                continue
            if shot.leading and term.late:
                decided = self.parts.logs[shot.log].decided
                late = tuple(
                    p for p in term.late if self.parts.acceptor_states[p[1]].last > decided
                )
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
            if its.acceptor < 0 or self.members[node] not in self.parts.addressed(term.orders):
                continue
            if self.parts.append(its.acceptor, term.ballot, term.orders)[0] != its.acceptor:
                return True
            if self.vote(state, node).promised == term.ballot and term.gather > its.gather:
                return True
        return False


def may_commit(owner: Proposer) -> bool:
    """As the coordinator asks before it moves a round: one commit of a fragment at a time."""
    busy = any(isinstance(record, Commit) for record in owner.log.undecided())
    return owner.open and owner.may_append() and not busy
