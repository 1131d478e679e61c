"""Message handling of an acceptor: which coordinator it follows, how it answers candidates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from mend.consensus.acceptor import Acceptor
from mend.consensus.ballots import NUMBER_MAX, number_of, owner_of
from mend.consensus.log import LogState, log_state_of
from mend.consensus.records import Seat, Snapshot
from mend.coordination.awake import AwakeClock, Sleep
from mend.coordination.events import CommonEffect, Connect, Effect, Event, Heard, Note, Send
from mend.coordination.messages import Orders, Prepare, Vote
from mend.events.kinds import ProtocolFault
from mend.types import SECOND, WITNESS, Member, Peer


class _Effects(Protocol):
    """A list of effects, of a leader or of the witness."""

    def append(self, effect: CommonEffect, /) -> None: ...


@dataclass
class Follower:
    """The acceptor of one member and the coordinator that it follows. `coordinator`: the followed
    peer; at first the job's founder."""

    member: Member
    acceptor: Acceptor
    coordinator: Peer
    detect_ns: int
    orders_ns: int | None = None
    lives_ns: int | None = None
    """When the last orders of a job with decided records arrived."""
    life: int | None = None
    """Incarnation of the coordinator. It may change before the first record, when the coordinator
    may be restarted."""
    founds: bool = False
    """Whether the newest orders came from a founder, of a job in which nothing is decided."""
    pledged: int = 0
    """Ballot promised to a candidate before this voter knew of any decision."""
    heard: tuple[int, int] = (0, 0)
    """(ballot, serial) of the newest orders."""

    def discount(self, slept_ns: int) -> None:
        """This process slept for `slept_ns` and could hear nothing meanwhile."""
        if self.orders_ns is not None:
            self.orders_ns += slept_ns
        if self.lives_ns is not None:
            self.lives_ns += slept_ns

    def addressed(self, peer: Peer, orders: Orders) -> bool:
        """Whether the orders are for this member and this job, and come from the owner of their
        ballot."""
        log = self.acceptor.log
        for_member = orders.to == self.member.incarnation
        from_owner = peer == Peer(owner_of(orders.ballot), 0)
        same_job = not log.appended.begun or log.continues(orders.lineage, orders.prev)
        return for_member and from_owner and (same_job or self._strayed(orders))

    def _joins(self, sender: Member, orders: Orders, now_ns: int) -> bool:
        """Whether to follow these orders. A member that hears of a running job joins it despite
        promises to a founder, and ignores founders from then on. False: the orders are a founder's,
        or of members that are dead."""
        if orders.decided > 0:
            if self._outlived(sender, orders):
                return False
            self.lives_ns = now_ns
            if not self.acceptor.log.committed.begun and orders.ballot < self.acceptor.promised:
                self.acceptor.start_over()
                self.acceptor.promised = self.pledged
            return True
        return self.lives_ns is None or now_ns - self.lives_ns >= self.detect_ns

    def _outlived(self, sender: Member, orders: Orders) -> bool:
        """Whether the orders are stale: they were delayed until every rack had answered another
        founder. This voter has accepted a first record in which the sender's rack has another
        incarnation, and its vote for that record may be counted at any time. Orders that continue
        from that same record are not stale."""
        log = self.acceptor.log
        if log.committed.begun or not log.appended.begun or sender in log.appended.members:
            return False
        if orders.prev == 0:
            return orders.records[:1] != (log.record(1),)
        names = {name for _, name in orders.snapshot.lineages} if orders.snapshot else set[str]()
        return log.lineage not in names | {orders.lineage}

    def homeless(self) -> bool:
        """Whether no decided roster that it has read has had a seat for this member."""
        committed = self.acceptor.log.committed
        return self.member not in committed.members and self.member not in committed.former

    def _may_start_over(self) -> bool:
        """Whether it may discard its log and read another one from the beginning: it has no seat in
        this one, whose end is not decided. The log of an ended job is kept."""
        return self.homeless() and not self.acceptor.log.committed.over

    def _strayed(self, orders: Orders) -> bool:
        """Whether the job whose log it reads without a seat has moved to a lineage that this log
        does not know, or the founder of another job asks about it. Then it reads that log from the
        beginning."""
        log = self.acceptor.log
        asked = orders.decided == 0 and log.committed.begun
        strange = asked or not log.knows(orders.lineage)
        return log.appended.begun and self._may_start_over() and strange

    def follow(
        self, peer: Peer, incarnation: int, orders: Orders, now_ns: int, effects: _Effects
    ) -> bool:
        """Append the new part of the log. Returns whether these are the newest orders. A
        coordinator whose ballot is over gets an answer that shows it."""
        if not self._joins(Member(peer.rack, incarnation), orders, now_ns):
            return False
        if orders.ballot < self.acceptor.promised:
            effects.append(Send(peer, self.vote(max(orders.serial, self.heard[1]))))
            return False
        if self._strayed(orders):
            self.acceptor.start_over()
        if incarnation != self.life and not self.acceptor.log.appended.begun:
            self.heard = (0, 0)
        if orders.ballot > self.heard[0]:
            self.heard = (orders.ballot, 0)
        self.life, self.orders_ns, self.coordinator = incarnation, now_ns, peer
        self.founds = orders.decided == 0
        if orders.serial <= self.heard[1]:
            return False
        self.heard = (orders.ballot, orders.serial)
        if not self.acceptor.append(
            orders.ballot,
            orders.prev,
            orders.chain,
            orders.records,
            orders.last,
            orders.decided,
            orders.snapshot,
        ):
            detail = f"{peer} contradicts what is decided, after record {orders.prev}"
            effects.append(Note(ProtocolFault(detail)))
        return True

    def asked(self, peer: Peer, prepare: Prepare, now_ns: int) -> Vote | None:
        """The answer to a candidate. None: the request belongs to another job, or is malformed.

        A voter that hears its coordinator makes no promise to other members: a rack that was cut
        off must not depose, on its return, the coordinator that all others follow. Only the
        coordinator itself may stand again.

        A candidate knows that the first record is decided. A voter with an empty log may have
        accepted that record and then discarded it for the next founder. It cannot have discarded
        anything else, because any later record shows that the first is decided. So it promises, and
        ignores founders for a while. A voter that never had a seat in its log discards it for a
        candidate of another lineage, which has a seat for it and cannot begin that lineage without
        it.
        """
        number = number_of(prepare.ballot)
        if not 0 < number < NUMBER_MAX or peer != Peer(owner_of(prepare.ballot), 0):
            return None
        strange = not self.acceptor.log.continues(prepare.lineage, prepare.after)
        both_begun = prepare.after > 0 and self.acceptor.log.committed.begun
        if strange and both_begun and self._may_start_over():
            self.acceptor.start_over()
        log = self.acceptor.log
        empty = log.last == 0 and prepare.after > 0
        if not empty and (strange or not log.appended.begun):
            return None
        hears = self.orders_ns is not None and now_ns - self.orders_ns < self.detect_ns
        if empty:
            self.lives_ns = now_ns
        may = not hears or self.founds or peer == self.coordinator
        if may and self.acceptor.prepare(prepare.ballot) and not log.committed.begun:
            self.pledged = prepare.ballot
        return self.vote(prepare.serial, prepare.after)

    def vote(self, serial: int, after: int | None = None) -> Vote:
        """A vote. `serial`: that of the message it answers."""
        return Vote(serial, self.acceptor.log.lineage, self.acceptor.acceptor_state(after), ())


def ways_to_leaders(log: LogState, rack: int) -> list[CommonEffect]:
    """Connections from `rack` to all other leaders, any of which may become the coordinator."""
    return [
        Connect(Peer(other, 0), seat.address)
        for other, seat in sorted(log.seats.items())
        if other != rack
    ]


@dataclass
class WitnessFollower:
    """The machine of a voter without a rack: the witness."""

    follower: Follower
    sleep: Sleep = field(default_factory=lambda: Sleep(AwakeClock(SECOND)))
    ways: tuple[Seat, ...] = ()
    """Seats whose leaders it is connected to."""

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        effects: list[CommonEffect] = []
        if slept_ns := self.sleep.take(now_ns):
            self.follower.discount(slept_ns)
        match event:
            case Heard(peer, incarnation, Orders() as orders) if self.follower.addressed(
                peer, orders
            ):
                if self.follower.follow(peer, incarnation, orders, now_ns, effects):
                    self._connect(self.follower.acceptor.log.appended, effects)
                    effects.append(Send(peer, self.follower.vote(orders.serial)))
            case Heard(peer, _, Orders(snapshot=Snapshot() as snapshot) as orders) if (
                self.follower.homeless() and peer == Peer(owner_of(orders.ballot), 0)
            ):
                # For its former life: the answer shows the coordinator that it was restarted.
                self._connect(state := log_state_of(snapshot), effects)
                if state.over:  # no more orders come, because no member gets a seat any more
                    self.follower.acceptor.log.install(snapshot)
                effects.append(Send(peer, self.follower.vote(orders.serial)))
            case Heard(peer, _, Prepare() as prepare):
                vote = self.follower.asked(peer, prepare, now_ns)
                if vote is not None:
                    if self.follower.homeless() and prepare.address is not None:
                        effects.append(Connect(peer, prepare.address))
                    effects.append(Send(peer, vote))
        return [*effects]

    def _connect(self, log: LogState, effects: list[CommonEffect]) -> None:
        seats = tuple(log.seats[rack] for rack in sorted(log.seats))
        if seats != self.ways:
            self.ways = seats
            effects += ways_to_leaders(log, WITNESS)

    def deadline_ns(self) -> int | None:
        """None: it only answers."""
        return None
