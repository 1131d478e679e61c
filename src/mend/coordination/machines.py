"""Builds all machines of one process from plain values.

Live and simulated processes build theirs here and nowhere else, so the `ProcessSpec` in the header
of a tape is everything that they were built from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from mend.consensus.acceptor import Acceptor
from mend.consensus.log import RECORDS_KEPT, Log
from mend.consensus.proposer import Proposer
from mend.coordination.acceptor_host import Follower, WitnessFollower
from mend.coordination.awake import AwakeClock, Sleep
from mend.coordination.coordinator import Coordinator, CoordinatorOptions
from mend.coordination.events import Machine
from mend.coordination.fragment_replica import RankOptions
from mend.coordination.leader import Leader, LeaderOptions
from mend.coordination.messages import (
    Challenge,
    Hello,
    Message,
    Orders,
    Prepare,
    RankOrders,
    RankReport,
    Refusal,
    Report,
    Retire,
    Vote,
)
from mend.coordination.rank import RankMachine
from mend.types import Member, Peer

RANK_MACHINE, LEADER, COORDINATOR, FOLLOWER = "rank", "leader", "coordinator", "follower"
"""Names of the machines on a tape."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    options: RankOptions
    own_digests: tuple[str, ...]
    own_versions: tuple[int, ...] = ()
    """Versions of `own_digests`; empty: 0 for every fragment."""


@dataclass(frozen=True, slots=True)
class LeaderSpec:
    hello: Hello
    coordinator: Peer
    options: LeaderOptions
    started_ns: int
    coordinator_address: str = ""


@dataclass(frozen=True, slots=True)
class CoordinatorSpec:
    job: str
    options: CoordinatorOptions


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What the machines of one process are built from. None: it has no such machine. A process
    without a rank machine is the witness."""

    me: Peer
    member: Member
    rank_machine: RankSpec | None = None
    leader: LeaderSpec | None = None
    coordinator: CoordinatorSpec | None = None
    records_kept: int = RECORDS_KEPT


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of one process. The coordinator shares the vote of its process with the leader
    or the follower."""

    rank_machine: RankMachine | None = None
    leader: Leader | None = None
    coordinator: Coordinator | None = None
    follower: WitnessFollower | None = None

    def named(self) -> dict[str, Machine]:
        """The machines of this process, by their names on a tape."""
        machines: dict[str, Machine | None] = {
            RANK_MACHINE: self.rank_machine,
            LEADER: self.leader,
            COORDINATOR: self.coordinator,
            FOLLOWER: self.follower,
        }
        return {name: machine for name, machine in machines.items() if machine is not None}

    def receivers(self, body: Message) -> list[Machine]:
        """The machines of a rank's process that receive this message. The coordinator comes first,
        so that it learns before the leader that its ballot is over."""
        receivers: list[Machine | None] = []
        match body:
            case RankOrders():
                receivers = [self.rank_machine]
            case RankReport() | Refusal() | Challenge():
                receivers = [self.leader]
            case Orders() | Prepare():
                receivers = [self.coordinator, self.leader]
            case Hello() | Report() | Vote() | Retire():
                receivers = [self.coordinator]
            case _:
                assert_never(body)
        return [machine for machine in receivers if machine is not None]


def machines_of(spec: ProcessSpec) -> Machines:
    """Build the machines of one process."""
    me, member, acceptor = spec.me, spec.member, Acceptor(Log(spec.records_kept))
    rank_machine = leader = coordinator = follower = clock = None
    if (of := spec.rank_machine) is not None:
        rank_machine = RankMachine(me, member, of.options, of.own_digests, of.own_versions)
    if (by := spec.leader) is not None:
        at = by.coordinator_address
        clock = AwakeClock(by.options.heartbeat_ns)
        leader = Leader(
            by.hello, by.coordinator, by.options, by.started_ns, at, acceptor, clock=clock
        )
    if (it := spec.coordinator) is not None:
        clock = clock or AwakeClock(it.options.heartbeat_ns)
        proposer = Proposer(Log(spec.records_kept))
        coordinator = Coordinator(me, member, it.job, it.options, acceptor, proposer, clock=clock)
        if leader is None:
            voter = Follower(member, acceptor, me, it.options.detect_ns)
            follower = WitnessFollower(voter, Sleep(clock))
    return Machines(rank_machine, leader, coordinator, follower)
