"""Decides when a member stands for coordinator. Clocks decide when to try, never who wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from mend.consensus.acceptor import Acceptor
from mend.consensus.ballots import NUMBER_MAX, ballot_of, number_of, owner_of
from mend.consensus.proposer import Proposer
from mend.coordination.acceptor_host import ways_to_leaders
from mend.coordination.admission import VISITOR
from mend.coordination.events import CommonEffect, Connect, Note, Send
from mend.coordination.messages import Challenge, Hello, Orders, Prepare, Refusal, Vote
from mend.events.kinds import StandsForElection
from mend.types import WITNESS, Member, Peer, life_of

STAGGER_HEARTBEATS = 4
"""Heartbeats between the voters' attempts, so that usually one alone stands: a little more than a
round trip."""


def challenge(hello: Hello, former: Member) -> list[CommonEffect]:
    """Ask the sender of a hello whether it is alive now, after `former` got the seat. The question
    goes to the address in the hello, because the roster may hold the address of `former`."""
    visitor = Peer(former.rack, VISITOR)
    question = Challenge(hello.seat.member.incarnation, life_of(former))
    return [Connect(visitor, hello.seat.address), Send(visitor, question)]


@dataclass
class Election:
    """The candidacy of one member. `heard_ns`: when the coordinator last sent orders, or a rival
    won promises."""

    me: Peer
    member: Member
    acceptor: Acceptor
    proposer: Proposer
    heartbeat_ns: int
    detect_ns: int
    heard_ns: int | None = None
    seen: int = 0
    """Highest ballot number heard of."""
    followed: int = 0
    """Ballot of the newest orders."""
    serial: int = 0
    sent: dict[Member, Prepare] = field(default_factory=dict)
    unaware: set[Member] = field(default_factory=set)
    """Members that sent a hello although an undecided record gives them a seat, and have reported
    no version since. Excludes members of the first record, whose hellos are in flight when it is
    written."""
    asked_ns: int = 0

    def discount(self, slept_ns: int) -> None:
        """This process slept for `slept_ns` and could hear nothing meanwhile."""
        if self.heard_ns is not None:
            self.heard_ns += slept_ns

    def heard(self, orders: Orders, now_ns: int) -> bool:
        """Handle orders of another coordinator. Returns whether this member must stop standing or
        leading."""
        number = number_of(orders.ballot)
        if orders.to != self.member.incarnation or number >= NUMBER_MAX:
            return False
        if not self.acceptor.log.continues(orders.lineage, orders.prev):
            return False
        self.see(number)
        if orders.ballot < self.acceptor.promised:
            return False
        if orders.ballot != self.proposer.ballot:
            self.heard_ns, self.followed = now_ns, orders.ballot
        # Standing for a higher ballot ends as well: not even the own vote is promised to it.
        return self.proposer.ballot not in (0, orders.ballot)

    def attest(self, sender: Member, hello: Hello | None = None) -> list[CommonEffect]:
        """A hello attests that former incarnations of its rack are over: a launcher restarts a rack
        only after its former life has ended. Two concurrent lives of a rack would become two jobs,
        which refuse each other.

        A hello must name the incarnation whose end it proves, because a hello that waited in a
        queue may come from an earlier one. Without a hello the sender must have the seat, perhaps
        by an undecided record: it got the seat through such a hello, and a member that follows a
        log sends none.
        """
        log, committed = self.acceptor.log.appended, self.acceptor.log.committed
        if hello and committed.begun and sender in log.members - committed.members:
            self.unaware.add(sender)
        if log.policy is None or sender in log.former:
            return []
        if hello and (hello.seat.member != sender or hello.policy != log.policy):
            return []
        if hello is None and log.member(sender.rack) != sender:
            return []
        effects: list[CommonEffect] = []
        lives = (m for m in log.members | committed.members if m.rack == sender.rack)
        for former in sorted(lives):
            if former in (sender, self.member):
                continue
            if hello and life_of(former) not in hello.after:
                effects += challenge(hello, former)
            elif log.policy.restart_attests:
                self.proposer.dead.add(former)
        return effects

    def meet_witness(self, member: Member, vote: Vote) -> None:
        """Attest the end of the witness's former life, since a witness sends no hello. A restarted
        witness promises this candidate: it answers a question that was asked after its former life
        had the seat, so that life is over."""
        log, committed = self.acceptor.log.appended, self.acceptor.log.committed
        known = (log.witness, committed.witness)
        former = {each for each in known if each is not None and each != member}
        answers = self.proposer.standing and vote.acceptor_state.promised == self.proposer.ballot
        if member.rack != WITNESS or not former or not answers or log.policy is None:
            return
        if log.policy.restart_attests:
            self.proposer.dead |= former
            self.proposer.returned = member if member != log.witness else None

    def retire(self, gone: Member, now_ns: int) -> bool:
        """A person attests the end of an incarnation. Returns whether that is new here. A member
        that hears a coordinator leaves the decision to it, since the coordinator knows whether the
        rack is silent."""
        log, committed = self.acceptor.log.appended, self.acceptor.log.committed
        racks = (log.members | committed.members) - {self.member, log.witness, committed.witness}
        racks |= {*log.away.values()}
        follows = self.heard_ns is not None and now_ns - self.heard_ns < self.detect_ns
        if gone not in racks or (follows and not self.proposer.leading):
            return False
        news = gone not in self.proposer.retired
        self.proposer.retired.add(gone)
        self.proposer.dead.add(gone)
        return news

    def speaks(self, member: Member) -> None:
        """A member was heard, so it is not dead."""
        self.proposer.dead.discard(member)
        self.proposer.retired.discard(member)

    def shows(self, sender: Member, versions: Sequence[int]) -> None:
        """Record the versions that a rack reports to hold."""
        if self.unaware and any(version >= 0 for version in versions):
            self.unaware.discard(sender)

    def forget(self) -> None:
        """Forget the members of a job that was given up."""
        self.unaware.clear()
        self.proposer.dead.clear()
        self.proposer.retired.clear()

    def see(self, number: int) -> None:
        if number < NUMBER_MAX:
            self.seen = max(self.seen, number)

    def lost(self, now_ns: int, *, at_once: bool) -> None:
        """A higher ballot is promised. Standing again soon makes sense only for the former
        coordinator."""
        self.heard_ns = now_ns - self.detect_ns if at_once else now_ns

    def may_stand(self) -> bool:
        """Whether this member may stand: voters may; if all voters are dead, any seated member, for
        a new lineage."""
        log, written = self.acceptor.log, self.acceptor.log.appended
        known = written.members if written.voters <= self.proposer.dead else written.voters
        may = log.committed.begun and self.member in known
        return may and not log.committed.over and not self.proposer.leading

    def due_ns(self) -> int | None:
        """When to stand, or to repeat the request for promises."""
        if not self.may_stand() or self.heard_ns is None:
            return None
        if self.proposer.standing:
            return self.asked_ns + self.heartbeat_ns
        stagger_ns = STAGGER_HEARTBEATS * self.heartbeat_ns
        return self.heard_ns + self.detect_ns + self._place() * stagger_ns

    def followed_rack(self) -> int | None:
        """The last coordinator's rack, as far as this member knows."""
        return owner_of(self.followed) if self.followed else None

    def _place(self) -> int:
        """How many members take their turn before this one: the witness, then racks ascending,
        without the coordinator that fell silent."""
        owner = self.followed_rack()
        log = self.acceptor.log.appended
        members = log.voters if self.member in log.voters else log.members
        own = (self.me.rack != WITNESS, self.member)
        return sum(m.rack != owner and (m.rack != WITNESS, m) < own for m in members)

    def move(self, now_ns: int) -> list[CommonEffect]:
        effects: list[CommonEffect] = []
        if self.proposer.standing and self.proposer.log.committed.over:
            # The other racks have continued and ended the job: there is nothing left to win.
            self.acceptor.learn(self.proposer.log)
        if not self.may_stand():
            if self.proposer.standing:
                self.proposer.step_down()
            return effects
        if self.heard_ns is None:
            self.heard_ns = now_ns
        due_ns = self.due_ns()
        if not self.proposer.standing and due_ns is not None and now_ns >= due_ns:
            number = max(self.seen, number_of(self.acceptor.promised)) + 1
            self.proposer.stand(ballot_of(number, *self.member), self.acceptor.log)
            self.sent.clear()
            silent_ms = (now_ns - self.heard_ns) // 1_000_000
            effects.append(Note(StandsForElection(number, silent_ms)))
            effects += ways_to_leaders(self.acceptor.log.appended, self.me.rack)
        if self.proposer.standing:
            self._ask(now_ns, effects)
        return effects

    def report_loss(self) -> list[CommonEffect]:
        """Refuse the remaining racks, because none of them holds the versions needed to
        continue."""
        log = self.proposer.log.appended
        dead = sorted(rack for rack in log.seats if log.seats[rack].member in self.proposer.dead)
        racks = ", ".join(f"rack {rack}" for rack in dead)
        detail = f"no live process holds the weights of the running job: {racks} died with them"
        return [
            Send(Peer(rack, 0), Refusal(log.seats[rack].member.incarnation, "lost", detail))
            for rack in sorted(log.seats.keys() - set(dead))
        ]

    def _ask(self, now_ns: int, effects: list[CommonEffect]) -> None:
        """Ask all members whose promise is needed, itself last."""
        log = self.proposer.log
        seat = log.appended.seats.get(self.me.rack)
        prepare = Prepare(
            0,
            self.proposer.ballot,
            log.lineage_at(log.decided),
            log.decided,
            seat.address if seat is not None else None,
        )
        again = now_ns >= self.asked_ns + self.heartbeat_ns
        if again:
            self.asked_ns = now_ns
            effects += self.report_loss() if self.proposer.lost else ()
        for member in sorted(self.proposer.asked()):
            if member == self.member and not self.proposer.would_win(self.member):
                continue
            if self.sent.get(member) == prepare and not again:
                continue
            self.sent[member] = prepare
            self.serial += 1
            effects.append(Send(Peer(member.rack, 0), replace(prepare, serial=self.serial)))
