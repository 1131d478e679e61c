"""Decisions in an explored job: candidacies, promises, orders, accepts.

The rules are those of the real Acceptor and Proposer; this module delivers the messages.
"""

from __future__ import annotations

from mend.consensus.ballots import ballot_of, number_of
from mend_lab.sim.model_check.state import (
    NOBODY,
    NONE,
    Action,
    Facts,
    State,
    Term,
    put_node,
    put_term,
)


class Deciding(Facts):
    """Steps about votes. A step returns None if it is impossible, or changes nothing."""

    def ballots(self, state: State, node: int) -> list[int]:
        """For which it may stand: any number from its own next to one above all there are, as it
        has heard of some of them. Who stands or leads goes on until there is a higher one."""
        if state.used.stands >= self.bounds.ballots or self.bounds.candidate not in (NOBODY, node):
            return []
        its, vote = state.nodes[node], self.vote(state, node)
        log = self.parts.log(vote.log)
        if self.members[node] not in log.appended.voters or log.committed.over:
            return []
        own = self.parts.proposers[its.proposer].ballot if its.proposer >= 0 else 0
        highest = max(
            [term.ballot for term in state.terms]
            + [self.vote(state, n).promised for n, it in enumerate(state.nodes) if it.acceptor >= 0]
        )
        if own and highest <= own:
            return []
        low, top = number_of(max(vote.promised, own)), number_of(highest)
        me = self.members[node]
        return [ballot_of(number, *me) for number in range(low + 1, max(low, top) + 2)]

    def _stand(self, state: State, action: Action) -> State:
        node, ballot = action.who, action.at
        proposer = self.parts.stand(state.nodes[node].acceptor, ballot)
        terms = [*self.end_terms(state, node), Term(ballot, node)]
        used = state.used._replace(stands=state.used.stands + 1)
        after = state._replace(terms=tuple(sorted(terms)), used=used)
        return put_node(after, node, state.nodes[node]._replace(proposer=proposer))

    def _take_over(self, state: State, action: Action) -> State | None:
        """To stand and to win at once. Without changes of the roster it is the same as any time
        between: nothing that a candidate knows from before decides whom it must ask."""
        after = self._stand(state, action)
        place = next(i for i, t in enumerate(after.terms) if t[:2] == (action.at, action.who))
        return self._win(after, Action("win", action.who, place, action.nodes))

    def end_terms(self, state: State, node: int) -> list[Term]:
        """The terms when the one this node owns is over: what it has sent is all there will be."""
        terms = []
        for term in state.terms:
            shot = self.active(state, term) if term.owner == node else None
            if shot is not None:
                orders = shot.log if shot.leading else NOBODY
                term = Term(term.ballot, node, orders, term.gather)
            terms.append(term)
        return terms

    def _win(self, state: State, action: Action) -> State | None:
        """These promise, and the candidate hears of it. Votes whose promise nobody needs
        count as slow, so no promise is given but here, and by who dies of it."""
        place, term = action.at, state.terms[action.at]
        owner, late = state.nodes[term.owner], dict(term.late)
        promises, after = [], state
        for node in action.nodes:
            acceptor = late.get(node)
            if acceptor is None:
                acceptor = self.parts.prepare(state.nodes[node].acceptor, term.ballot)
                after = self.move_on(after, node, acceptor)
                after = put_node(after, node, state.nodes[node]._replace(acceptor=acceptor))
            promises.append((self.members[node], acceptor))
        number = self.parts.win(owner.proposer, tuple(promises))
        if number == owner.proposer:
            return None
        after = put_term(after, place, after.terms[place]._replace(late=()))
        after = put_node(after, term.owner, after.nodes[term.owner]._replace(proposer=number))
        return self.agree(after, self.parts.proposers[number].log)

    def _learn(self, state: State, action: Action) -> State | None:
        (node,) = action.nodes
        owner, acceptor = state.nodes[action.who], state.nodes[node].acceptor
        number = self.parts.learn(owner.proposer, self.members[node], acceptor)
        return put_node(state, action.who, owner._replace(proposer=number))

    def move_on(self, state: State, node: int, number: int) -> State:
        """The vote becomes `number` (DEAD: it is lost): what it has last accepted in the ballot
        that it leaves may still be under way."""
        old = self.vote(state, node)
        if number >= 0 and self.parts.voters[number].promised == old.promised:
            return state
        for place, term in enumerate(state.terms):
            if term.ballot != old.accepted:
                continue
            shot = self.active(state, term)
            if shot is not None and shot.leading:
                late = {
                    **dict(term.late),
                    node: self.parts.acceptor_state(state.nodes[node].acceptor),
                }
                state = put_term(state, place, term._replace(late=tuple(sorted(late.items()))))
        return state

    def orders(self, state: State, term: Term) -> int:
        shot = self.active(state, term)
        if shot is None:
            return term.orders
        return shot.log if shot.leading else NOBODY

    def _count(self, state: State, action: Action) -> State | None:
        """The coordinator hears of all that was accepted; later, if this does not happen now."""
        term, owner = state.terms[action.at], state.nodes[action.who]
        heard = [(self.members[node], acceptor_state) for node, acceptor_state in term.late]
        for member, its in zip(self.members, state.nodes, strict=True):
            if its.acceptor >= 0:
                heard.append((member, self.parts.acceptor_state(its.acceptor)))
        number = self.parts.count(owner.proposer, tuple(heard))
        if number == owner.proposer:
            return None
        log = self.parts.proposers[number].log
        state = self.agree(state, log)
        if self.parts.log(log).committed.versions[0] >= term.gather[0] > 0:
            state = put_term(state, action.at, term._replace(gather=NONE, results=()))
        return put_node(state, action.who, owner._replace(proposer=number))

    def propose(self, state: State, term: Term, record: int) -> State:
        owner = state.nodes[term.owner]
        number = self.parts.propose(owner.proposer, record)
        state = self.agree(state, self.parts.proposers[number].log)
        return put_node(state, term.owner, owner._replace(proposer=number))
