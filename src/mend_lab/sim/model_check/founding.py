"""Explores every way in which a job can begin, one step at a time, without clocks.

`Follower`, `Acceptor`, `Proposer` and `Log` are the real objects. Around them a founder
(`Coordinator._try_genesis`, `_found`) and the candidates of a job that has begun act in any order.
Every message that was ever sent may arrive at any time, repeatedly or never, also after the death
of its sender. docs/internals/model_check.md lists what is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import NamedTuple

from mend.consensus.ballots import ballot_of, number_of
from mend.consensus.log import Log, witness_votes
from mend.consensus.proposer import Proposer
from mend.consensus.records import Commit, Genesis, Record, Seat
from mend.coordination.acceptor_host import Follower
from mend.coordination.messages import Orders, Prepare
from mend.types import WITNESS, Member, Peer, rack_name
from mend_lab.sim.model_check.explore import Found, Progress, Search
from mend_lab.sim.model_check.membership import policy, seat
from mend_lab.sim.model_check.parts import AcceptorShot, LogShot, ProposerShot, Snapshots
from mend_lab.sim.model_check.state import Broken, ballot_name, outcomes, word

LATER_NS = 1 << 40
"""Longer than any detection time: messages from before count as silence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """`restarts`: of all processes together. `founds`: questions of the founder after the first
    one. `stands`: candidacies. `commits`: records that leaders append after their first one.
    `lineages`: whether the survivors may begin a new lineage, with all dead lives attested."""

    racks: int = 2
    witness: bool = False
    restarts: int = 1
    founds: int = 1
    stands: int = 1
    commits: int = 1
    lineages: bool = False
    fragments: int = 1


class Ear(NamedTuple):
    """A follower without its times. `orders`, `lives`: whether it has ever heard orders, or signs
    of a living job."""

    vote: AcceptorShot
    coordinator: Peer
    orders: bool = False
    lives: bool = False
    life: int | None = None
    founds: bool = False
    pledged: int = 0
    heard: tuple[int, int] = (0, 0)


IDLE = ProposerShot(0, 0, False, 0)


class Node(NamedTuple):
    life: int
    ear: Ear
    right: ProposerShot
    held: tuple[int, ...] = ()
    """Per fragment the version that it holds; this and the rest only `lineages` reads."""
    made: frozenset[int] = frozenset()
    """Commits, by their numbers, whose results it has merged and not yet heard to be decided."""


class SentOrders(NamedTuple):
    """Orders as they were sent: a question goes to all lives of that time, a log to the members."""

    ballot: int
    serial: int
    owner: Member
    log: int
    to: tuple[Member, ...]


class SentPrepare(NamedTuple):
    """The question of a candidate."""

    ballot: int
    owner: Member
    lineage: str
    after: int


class SentVote(NamedTuple):
    """The state of an acceptor, sent to the owner of its ballot."""

    ballot: int
    sender: Member
    acceptor_state: int
    held: tuple[int, ...] = ()


class Used(NamedTuple):
    restarts: int = 0
    founds: int = 0
    stands: int = 0
    commits: int = 0
    rosters: int = 0


class State(NamedTuple):
    """`decided`: per first record, the longest list of decisions that any node ever knew."""

    nodes: tuple[Node, ...]
    orders: frozenset[SentOrders]
    prepares: frozenset[SentPrepare]
    votes: frozenset[SentVote]
    decided: frozenset[tuple[int, ...]]
    used: Used


Act = tuple[str, Callable[[], "State | None"]]
"""A sentence, and the function that carries it out; it returns None if that is impossible."""

Step = tuple[str, State | str]
"""A sentence, and the state after it, or the invariant that it breaks."""


class ModelWorld(Snapshots):
    """All steps, and what must hold after each."""

    def __init__(self, bounds: Bounds) -> None:
        super().__init__()
        self.bounds = bounds
        self.racks = [*range(bounds.racks), *([WITNESS] if bounds.witness else [])]
        self.founder = Peer(WITNESS if bounds.witness else 0, 0)
        self.logs.number(LogShot((), 0))
        self.hears: Callable[[Member, Ear, SentOrders, bool, int], Ear | None] = cache(self._hears)
        self.promises: Callable[[Member, Ear, SentPrepare, bool], tuple[Ear, int] | None]
        self.promises = cache(self._promises)
        self.counts: Callable[..., ProposerShot] = cache(self._counts)
        self.report: Callable[[AcceptorShot], int] = cache(self._report)

    def start(self) -> State:
        nodes = tuple(self._born(rack, 1) for rack in self.racks)
        empty = State(nodes, frozenset(), frozenset(), frozenset(), frozenset(), Used())
        begun = self._found_job(empty, self.racks.index(self.founder.rack))
        assert begun is not None, "nobody has a seat yet"
        return begun

    # -------------------------------------------------------------- snapshots

    def _follower(self, member: Member, ear: Ear) -> Follower:
        follower = Follower(member, self.acceptor(ear.vote), ear.coordinator, LATER_NS)
        follower.orders_ns = 0 if ear.orders else None
        follower.lives_ns = 0 if ear.lives else None
        follower.life, follower.founds, follower.pledged = ear.life, ear.founds, ear.pledged
        follower.heard = ear.heard
        return follower

    def _ear(self, follower: Follower) -> Ear:
        vote, heard = self.shot_of_acceptor(follower.acceptor), follower.heard
        orders, lives = follower.orders_ns is not None, follower.lives_ns is not None
        life, founds, pledged = follower.life, follower.founds, follower.pledged
        return Ear(vote, follower.coordinator, orders, lives, life, founds, pledged, heard)

    def _right(self, proposer: Proposer) -> ProposerShot:
        return self.shot_of_proposer(proposer, heard=True)

    def _born(self, rack: int, life: int) -> Node:
        return Node(life, Ear(AcceptorShot(0, 0, 0), self.founder), IDLE)

    def member(self, state: State, node: int) -> Member:
        return Member(self.racks[node], state.nodes[node].life)

    # -------------------------------------------------------------- single steps of real objects

    def _hears(self, me: Member, ear: Ear, sent: SentOrders, late: bool, prev: int) -> Ear | None:
        """These orders arrive; `late`: after a silence. None: they have no effect."""
        log = self.log(sent.log)
        orders = Orders(
            serial=sent.serial, to=me.incarnation, ballot=sent.ballot, lineage=log.lineage_at(prev),
            prev=prev, chain=log.chain(prev), records=log.after(prev), last=log.last,
            decided=log.decided, offers=(), proposals=(), settled=(), live=(), missing=(), why=(),
        )  # fmt: skip
        follower, peer = self._follower(me, ear), Peer(sent.owner.rack, 0)
        if not follower.addressed(peer, orders):
            return None
        follower.follow(peer, sent.owner.incarnation, orders, LATER_NS if late else 1, [])
        return self._ear(follower)

    def _promises(
        self, me: Member, ear: Ear, asked: SentPrepare, late: bool
    ) -> tuple[Ear, int] | None:
        follower = self._follower(me, ear)
        prepare = Prepare(0, asked.ballot, asked.lineage, asked.after)
        vote = follower.asked(Peer(asked.owner.rack, 0), prepare, LATER_NS if late else 1)
        return (
            None
            if vote is None
            else (self._ear(follower), self.acceptor_states.number(vote.acceptor_state))
        )

    def _report(self, vote: AcceptorShot) -> int:
        return self.acceptor_states.number(self.acceptor(vote).acceptor_state())

    def _counts(
        self,
        right: ProposerShot,
        member: Member,
        acceptor_state: int,
        dead: frozenset[Member],
        held: tuple[tuple[Member, tuple[int, ...]], ...] | None,
    ) -> ProposerShot:
        """A leader or candidate hears the state of an acceptor; one that would depose it has no
        effect here. `held`: the versions of each member; None: every member with a log has
        version 0."""
        proposer = self.proposer_of(right)
        if not proposer.hear(member, self.acceptor_states[acceptor_state]):
            return right
        if not proposer.leading:
            if held is None:
                states = proposer.acceptor_states.items()
                held = tuple((m, (0 if b.decided or b.last else -1,)) for m, b in states)
            proposer.held = dict(held)
            proposer.dead = set(dead)
            proposer.try_lead()
        if proposer.leading:
            proposer.decide()
        return self._right(proposer)

    # -------------------------------------------------------------- what can happen

    def steps(self, state: State) -> Iterator[Step]:
        return outcomes(state, self._possible(state), self._settle)

    def _settle(self, state: State) -> State:
        state = self._tidy(state)
        self._holds(state)
        return state

    def _possible(self, state: State) -> Iterator[Act]:
        orders = self._orders(state)
        for node, its in enumerate(state.nodes):
            who = self.member(state, node)
            for sent in orders:
                own = sent.owner == who and sent in state.orders  # those it hears at once
                for late, prev in product((False, True), self._prevs(its, sent)):
                    if who in sent.to and not own:
                        yield self._hear(state, node, sent, late, prev)
            for asked in sorted(state.prepares):
                for late in (False, True):
                    yield self._ask(state, node, asked, late)
            yield from self._alone(state, node)
            if its.right.ballot:
                yield from self._of_right(state, node)

    def _prevs(self, its: Node, sent: SentOrders) -> list[int]:
        """The records after which the log may be sent: those that the reader has reported, none, or
        those that are under way to it already."""
        decided, under_way = self.logs[its.ear.vote.log].decided, self.logs[sent.log].decided
        return list(dict.fromkeys((min(decided, under_way), 0, under_way)))

    def _alone(self, state: State, node: int) -> Iterator[Act]:
        """The actions of a node that need no message, as often as the bounds allow."""
        used, bounds, who = state.used, self.bounds, name(self.member(state, node))
        if used.restarts < bounds.restarts:
            yield f"{who} dies and comes back", partial(self._dies, state, node)
        if used.founds < bounds.founds and self.racks[node] == self.founder.rack:
            yield f"{who} asks anew", partial(self._anew, state, node)
        if used.stands < bounds.stands:
            yield f"{who} stands", partial(self._stand, state, node)

    def _of_right(self, state: State, node: int) -> Iterator[Act]:
        right, who = state.nodes[node].right, name(self.member(state, node))
        for vote in sorted(state.votes):
            if vote.ballot == right.ballot:
                sentence = f"{who} hears what {name(vote.sender)} has accepted or promised"
                yield sentence, partial(self._count, state, node, vote)
        if not right.leading:
            return
        log = self.logs[right.log]
        if not log.records:
            for lives in self._answers(state, right):
                yield f"{who} appends Genesis", partial(self._genesis, state, node, lives)
        elif log.decided == len(log.records) and state.used.commits < self.bounds.commits:
            yield f"{who} appends a commit", partial(self._commit, state, node)

    def _answers(self, state: State, right: ProposerShot) -> list[tuple[int, ...]]:
        """Lives of all racks that have answered in this ballot."""
        lives = [
            sorted({
                vote.sender.incarnation
                for vote in state.votes
                if vote.ballot == right.ballot
                and vote.sender.rack == rack
                and self.acceptor_states[vote.acceptor_state].promised == right.ballot
            })
            for rack in range(self.bounds.racks)
        ]  # fmt: skip
        return list(product(*lives))

    def _hear(self, state: State, node: int, sent: SentOrders, late: bool, prev: int) -> Act:
        who = self.member(state, node)
        about = f"orders {sent.serial} of {ballot_name(sent.ballot)} by {name(sent.owner)}"

        def act() -> State | None:
            its = state.nodes[node]
            ear = self.hears(who, its.ear, sent, late, prev)
            if ear is None or ear == its.ear:
                return None
            after = self._put(state, node, its._replace(ear=ear))
            return self._report_state(after, node)

        return f"{name(who)} gets {about}{' behind a silence' if late else ''}", act

    def _ask(self, state: State, node: int, asked: SentPrepare, late: bool) -> Act:
        who = self.member(state, node)

        def act() -> State | None:
            its = state.nodes[node]
            promise = self.promises(who, its.ear, asked, late)
            if promise is None:
                return None
            after = self._put(state, node, its._replace(ear=promise[0]))
            if self.acceptor_states[promise[1]].promised > asked.ballot:
                return after
            vote = SentVote(asked.ballot, who, promise[1], its.held)
            return after._replace(votes=after.votes | {vote})

        about = f"{ballot_name(asked.ballot)} by {name(asked.owner)}"
        return f"{name(who)} is asked for {about}{' behind a silence' if late else ''}", act

    def _report_state(self, state: State, node: int) -> State:
        """The node reports its acceptor's state to its coordinator."""
        its, who = state.nodes[node], self.member(state, node)
        vote = SentVote(its.ear.vote.promised, who, self.report(its.ear.vote), its.held)
        return state._replace(votes=state.votes | {vote})

    def _put(self, state: State, node: int, its: Node) -> State:
        nodes = (*state.nodes[:node], its, *state.nodes[node + 1 :])
        return self._known(state._replace(nodes=nodes), its.ear.vote.log)

    def _orders(self, state: State) -> list[SentOrders]:
        """The newest orders of all leaders, and the last ones of former leaders."""
        own = (self._orders_of(state, node) for node in range(len(self.racks)))
        return [*(sent for sent in own if sent), *sorted(state.orders)]

    def _orders_of(self, state: State, node: int) -> SentOrders | None:
        right = state.nodes[node].right
        if not right.leading:
            return None
        shot = self.logs[right.log]
        serial = 1 + len(shot.records) + shot.decided
        to = tuple(self.member(state, other) for other in range(len(self.racks)))
        if shot.records:
            to = tuple(sorted(self.log(right.log).appended.members))
        return SentOrders(right.ballot, serial, self.member(state, node), right.log, to)

    def _says(self, state: State, node: int, right: ProposerShot) -> State:
        """Store a proposer that has changed. Messages of another ballot stay under way."""
        before = state.nodes[node].right
        if before.ballot != right.ballot:
            state = self._left(state, node)
        if right.leading:
            acceptor_states = tuple(
                each
                for each in right.acceptor_states
                if self.acceptor_states[each[1]].accepted == right.ballot
            )
            right = right._replace(acceptor_states=acceptor_states)
        state = self._put(state, node, state.nodes[node]._replace(right=right))
        return self._known(state, right.log) if right.leading else state

    def _left(self, state: State, node: int) -> State:
        """End the ballot of a node: its last orders, or its question, may still arrive."""
        right, sent = state.nodes[node].right, self._orders_of(state, node)
        if sent:
            state = state._replace(orders=state.orders | {sent})
        votes = frozenset(vote for vote in state.votes if vote.ballot != right.ballot)
        state = state._replace(votes=votes)
        return self._put(state, node, state.nodes[node]._replace(right=IDLE))

    def _tidy(self, state: State) -> State:
        """A node that has promised a later ballot steps down. The questions of a leader say no more
        than its orders, and are removed."""
        for node, its in enumerate(state.nodes):
            if its.right.ballot and its.right.ballot < its.ear.vote.promised:
                state = self._left(state, node)
        leads = {its.right.ballot for its in state.nodes if its.right.leading}
        rights = {its.right.ballot for its in state.nodes}
        newest: dict[tuple[int, Member], tuple[object, ...]] = {}
        votes = sorted((self._place(vote), vote) for vote in state.votes if vote.ballot in rights)
        for place, vote in votes:
            newest[(vote.ballot, vote.sender)] = place
        kept = (vote for place, vote in votes if newest[(vote.ballot, vote.sender)] == place)
        asked = frozenset(each for each in state.prepares if each.ballot not in leads)
        return state._replace(prepares=asked, votes=frozenset(kept))

    def _place(self, vote: SentVote) -> tuple[int, int, int, tuple[int, ...]]:
        """Of two votes in one place, one has the records that the candidate asked for."""
        state = self.acceptor_states[vote.acceptor_state]
        return state.accepted, state.last, state.decided, vote.held

    def _number(self, state: State, node: int) -> int:
        ballots = [sent.ballot for sent in state.orders] + [
            asked.ballot for asked in state.prepares
        ]
        ballots += [its.right.ballot for its in state.nodes]
        own = state.nodes[node].ear.vote.promised
        return max(map(number_of, [own, *ballots]), default=0) + 1

    def _anew(self, state: State, node: int) -> State | None:
        used = state.used._replace(founds=state.used.founds + 1)
        return self._found_job(state._replace(used=used), node)

    def _found_job(self, state: State, node: int) -> State | None:
        """`Coordinator._found`: for a node without a decided seat. If it has followed a coordinator
        before, it forgets the log that it has read."""
        its, who = state.nodes[node], self.member(state, node)
        committed = self.log(its.ear.vote.log).committed
        seated = who in committed.members or who in committed.former
        if seated or self.log(its.right.log).committed.begun:
            return None
        if committed.begun:
            ear = its.ear._replace(vote=its.ear.vote._replace(log=0, accepted=0))
            state = self._put(state, node, its._replace(ear=ear))
        proposer = Proposer()
        proposer.found(ballot_of(self._number(state, node), *who))
        return self._says(state, node, self._right(proposer))

    def _genesis(self, state: State, node: int, lives: tuple[int, ...]) -> State | None:
        right = state.nodes[node].right
        witness = self.member(state, node) if self.bounds.witness else None
        votes = witness is None or witness_votes(witness, self.bounds.racks)
        seats: tuple[Seat, ...] = tuple(seat(Member(r, life)) for r, life in enumerate(lives))
        non_voters = () if votes else (WITNESS,)
        fragments = self.bounds.fragments
        settings, digests = policy(self.bounds.racks, fragments), (("",),) * fragments
        genesis = Genesis(seats, witness, settings, "", digests, 3, non_voters)
        return self._append(state, node, right, genesis)

    def _commit(self, state: State, node: int) -> State | None:
        right, used = state.nodes[node].right, state.used
        log = self.log(right.log)
        if not self.proposer_of(right).open:
            return None
        name_ = f"{right.ballot:032x}"
        commit = Commit(0, log.appended.versions[0] + 1, (), (), (name_,), "all-in")
        state = state._replace(used=used._replace(commits=used.commits + 1))
        return self._append(state, node, right, commit)

    def _append(self, state: State, node: int, right: ProposerShot, record: Record) -> State:
        proposer = self.proposer_of(right)
        proposer.append(record)
        return self._says(state, node, self._right(proposer))

    def _stand(self, state: State, node: int) -> State | None:
        """`Election.may_stand`: for a voter that knows that the job has begun."""
        its, who = state.nodes[node], self.member(state, node)
        log = self.log(its.ear.vote.log)
        if not log.committed.begun or its.right.leading or not self._may_stand(state, log, who):
            return None
        proposer = Proposer()
        proposer.stand(ballot_of(self._number(state, node), *who), log)
        asked = SentPrepare(proposer.ballot, who, log.lineage_at(log.decided), log.decided)
        used = state.used._replace(stands=state.used.stands + 1)
        state = state._replace(prepares=state.prepares | {asked}, used=used)
        return self._says(state, node, self._right(proposer))

    def _may_stand(self, state: State, log: Log, who: Member) -> bool:
        return who in log.appended.voters

    def _count(self, state: State, node: int, vote: SentVote) -> State | None:
        right = state.nodes[node].right
        dead = self._gone(state) if self.bounds.lineages else frozenset[Member]()
        held = self._held(state, right)
        after = self.counts(right, vote.sender, vote.acceptor_state, dead, held)
        return None if after == right else self._says(state, node, after)

    def _held(
        self, state: State, right: ProposerShot
    ) -> tuple[tuple[Member, tuple[int, ...]], ...] | None:
        """(member, versions) as the members have reported them to this proposer."""
        return None

    def _gone(self, state: State) -> frozenset[Member]:
        """Lives that are over."""
        return frozenset(
            Member(rack, life)
            for rack, its in zip(self.racks, state.nodes, strict=True)
            for life in range(1, its.life)
        )

    def _dies(self, state: State, node: int) -> State:
        """A node dies and is started again; a founder asks at once."""
        state = self._left(state, node)
        born = self._born(self.racks[node], state.nodes[node].life + 1)
        used = state.used._replace(restarts=state.used.restarts + 1)
        after = state._replace(
            nodes=(*state.nodes[:node], born, *state.nodes[node + 1 :]), used=used
        )
        founds = self.racks[node] == self.founder.rack
        return (self._found_job(after, node) or after) if founds else after

    # -------------------------------------------------------------- what must hold

    def _known(self, state: State, log: int) -> State:
        """Check that a job has one list of decisions for ever, unless a lineage may undo decisions
        that only the dead knew."""
        decided = self.logs[log].records[: self.logs[log].decided]
        if not decided or self.bounds.lineages:
            return state
        for known in state.decided:
            if known[0] == decided[0]:
                shared = min(len(known), len(decided))
                if known[:shared] != decided[:shared]:
                    both = [word(self.records[each[shared - 1]]) for each in (known, decided)]
                    raise Broken(
                        f"agreement: record {shared} is decided as {both[0]} and {both[1]}"
                    )
                if len(decided) <= len(known):
                    return state
                return state._replace(decided=state.decided - {known} | {decided})
        return state._replace(decided=state.decided | {decided})

    def _holds(self, state: State) -> None:
        """One name, one job: the live nodes know one decided first record, and one list."""
        lists = [self.logs[its.ear.vote.log] for its in state.nodes]
        lists += [self.logs[its.right.log] for its in state.nodes if its.right.leading]
        known = [shot.records[: shot.decided] for shot in lists if shot.decided]
        longest = max(known, key=len, default=())
        for records in known:
            if records[0] != longest[0]:
                raise Broken("two jobs: two first records are decided, and known to who lives")
            if records != longest[: len(records)]:
                raise Broken("agreement: those that live know of two lists of decisions")


def name(member: Member) -> str:
    return rack_name(member.rack) + (
        f" in life {member.incarnation}" if member.incarnation > 1 else ""
    )


def play(world: ModelWorld, sentences: Sequence[str], start: State | None = None) -> State:
    """The state after these steps; each is the first one whose sentence begins like this."""
    state = start or world.start()
    for sentence in sentences:
        states = (after for step, after in world.steps(state) if step.startswith(sentence))
        after = next(states, "it cannot happen")
        if isinstance(after, str):
            raise ValueError(f"{sentence!r}: {after}")
        state = after
    return state


def explore(
    world: ModelWorld,
    tell: Callable[[Progress], None] = lambda _: None,
    limit: int | None = None,
    behind: Sequence[str] = (),
) -> Found:
    """Explore from the start of the world, or after the sentences in `behind`. Stops after `limit`
    states, if there is a limit."""
    return Search(world.steps).search(play(world, behind), tell, limit)
