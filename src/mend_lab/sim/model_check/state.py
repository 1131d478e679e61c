"""The state of an explored job, and what its members know of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple, TypeVar

from mend.consensus.acceptor import Acceptor
from mend.consensus.ballots import number_of, owner_of
from mend.consensus.records import Ballot, Commit, Lineage, Record, Roster
from mend.types import WITNESS, Member
from mend_lab.sim.model_check.parts import AcceptorShot, Committed, Parts, ProposerShot

NOBODY, DEAD = -1, -2
NONE = (0, 0)
"""No gather: (version, attempt)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of an exploration, which visits all interleavings within them.

    `ballots`: candidacies, won or lost. `attempts`: per version and ballot. `twins`: racks that are
    started again while their former life, cut off, still runs. `votes`: members whose seat or vote
    one roster changes; from two on, votes are also taken away from members that keep their seats,
    the witness among them.
    """

    racks: int = 2
    witness: bool = True
    rounds: int = 1
    ballots: int = 2
    crashes: int = 1
    rosters: int = 0
    attempts: int = 1
    twins: int = 0
    votes: int = 1
    demotions: bool = False
    """Rosters are those that `membership.next_roster` proposes, for every set of silent members;
    no rack is started again."""
    demoted: int = NOBODY
    """With `demotions`: the rack that loses its vote by the first roster, before the start."""
    candidate: int = NOBODY
    """The only node that stands; NOBODY: any node. With one ballot a job is the sum of these."""
    first: int = 0
    """Version that the job begins with, as from a checkpoint."""


class Node(NamedTuple):
    """A member. `acceptor`: its vote (NOBODY: not born yet, DEAD). `proposer`: NOBODY unless it
    stands or leads. `held`: its version. `done`: the tentative result of `gather` is complete."""

    acceptor: int = NOBODY
    proposer: int = NOBODY
    held: int = -1
    gather: tuple[int, int] = NONE
    done: bool = False


class Term(NamedTuple):
    """A candidacy for a ballot. The newest orders of its owner may arrive at any time, or never.

    `orders`: the last log of an owner that is gone. `results`: whose result was complete and is
    not any more; that it was may still be under way. `late`: votes under way of nodes that have
    died or gone on to another ballot: (node, voter) of a promise, (node, ballot) for who leads.
    """

    ballot: int
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
    """`decided`: the records that any member ever decided."""

    nodes: tuple[Node, ...]
    terms: tuple[Term, ...]
    decided: tuple[int, ...]
    used: Used


class Action(NamedTuple):
    """`at`: the place of a term, or the ballot of a candidacy. `nodes`: the other participants."""

    what: str
    who: int
    at: int = 0
    nodes: tuple[int, ...] = ()
    change: str = ""


class Broken(Exception):
    """An invariant does not hold."""


Step = tuple[Action, State | str]
"""An action with the state after it, or with the invariant that it breaks."""


S = TypeVar("S")
A = TypeVar("A")


def outcomes(
    state: S, acts: Iterable[tuple[A, Callable[[], S | None]]], settle: Callable[[S], S]
) -> Iterator[tuple[A, S | str]]:
    """Every action that changes the state, with the state after it, or the invariant that it
    breaks. `settle` removes what has no effect from a state, and raises Broken."""
    for action, act in acts:
        try:
            after = act()
            if after is None or after == state:
                continue
            after = settle(after)
        except (Broken, AssertionError) as broken:
            yield action, str(broken) or repr(broken)
        else:
            if after != state:
                yield action, after


class Facts:
    """`members`: every possible life. A second life is born by the record that seats it."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds, self.parts = bounds, Parts()
        racks = range(bounds.racks)
        lives = [Member(rack, 1) for rack in racks]
        lives += [Member(WITNESS, 1)] if bounds.witness else []
        self.born = len(lives)
        again = bounds.rosters > 0 and not bounds.demotions
        lives += [Member(rack, 2) for rack in racks] if again else []
        self.members = tuple(lives)
        self.empty = self.parts.keep_acceptor(Acceptor())

    def active(self, state: State, term: Term) -> ProposerShot | None:
        """The proposer of a term that stands or leads."""
        number = state.nodes[term.owner].proposer
        if number < 0:
            return None
        shot = self.parts.proposers[number]
        return shot if shot.ballot == term.ballot else None

    def vote(self, state: State, node: int) -> AcceptorShot:
        return self.parts.voters[state.nodes[node].acceptor]

    def committed(self, acceptor: int) -> Committed:
        return self.parts.committed(self.parts.decided(self.parts.voters[acceptor].log))

    def begun(self, acceptor: int) -> bool:
        return bool(self.parts.logs[self.parts.voters[acceptor].log].records)

    def name(self, node: int) -> str:
        member = self.members[node]
        if member.rack == WITNESS:
            return "the witness"
        return f"rack {member.rack}" + (", restarted," if member.incarnation > 1 else "")

    def agree(self, state: State, log: int, before: int = 0) -> State:
        """Agreement: whatever anybody decided is decided, for ever and for all."""
        own, all_ = self.parts.decided(log), state.decided
        if len(own) < before:
            raise Broken(f"record {before} was decided and is not any more")
        shared = min(len(own), len(all_))
        if own[:shared] != all_[:shared]:
            index = next(i for i in range(shared) if own[i] != all_[i])
            both = [word(self.parts.records[records[index]]) for records in (all_, own)]
            raise Broken(f"agreement: record {index + 1} is decided as {both[0]} and as {both[1]}")
        return state._replace(decided=own) if len(own) > len(all_) else state


def result(gather: tuple[int, int]) -> str:
    """Digest of a merge: another attempt may have other members, and so another result."""
    return f"{gather[0]:08x}{gather[1]:024x}"


def subsets(nodes: list[int]) -> Iterator[tuple[int, ...]]:
    """All but the empty one."""
    for size in range(1, len(nodes) + 1):
        yield from combinations(sorted(nodes), size)


def put_node(state: State, node: int, its: Node) -> State:
    nodes, terms, decided, used = state
    return State((*nodes[:node], its, *nodes[node + 1 :]), terms, decided, used)


def put_term(state: State, place: int, term: Term) -> State:
    terms = state.terms
    return state._replace(terms=(*terms[:place], term, *terms[place + 1 :]))


def ballot_name(ballot: int) -> str:
    rack = "w" if owner_of(ballot) == WITNESS else str(owner_of(ballot))
    return f"ballot {number_of(ballot)}.{rack}"


def word(record: Record) -> str:
    match record:
        case Commit(version=version, digests=digests):
            return f"commit({version}, {digests[0][-6:]})"
        case Ballot(ballot=ballot):
            return ballot_name(ballot).replace("ballot ", "ballot(") + ")"
        case Roster(members=members, non_voters=non_voters):
            names = [
                f"{s.member.rack}.{s.member.incarnation}"
                + ("-learner" if s.member.rack in non_voters else "")
                for s in members
            ]
            names += ["w-learner"] if WITNESS in non_voters else []
            return "roster(" + " ".join(names) + ")"
        case Lineage(members=members, non_voters=non_voters):
            return word(Roster(0, members, non_voters, None, "")).replace("roster", "lineage")
    return "genesis"
