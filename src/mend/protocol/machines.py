"""protocol: all machines of one process, made from plain values.

Live, simulated and replayed processes make theirs here and nowhere else, so that the `Parts` in a
tape's header are everything that they were made from.
"""

from __future__ import annotations

from dataclasses import dataclass

from mend.protocol.booth import Booth, WitnessBooth
from mend.protocol.coordinator import Coordinator, CoordinatorOptions
from mend.protocol.director import Director
from mend.protocol.events import Machine
from mend.protocol.leader import Leader, LeaderOptions
from mend.protocol.learner import Learner
from mend.protocol.log import RECORDS_KEPT, Log
from mend.protocol.messages import Hello, Record
from mend.protocol.proposer import Proposer
from mend.protocol.shelf import LearnerOptions
from mend.protocol.voter import Voter
from mend.terms import Member, Peer

LEARNER, LEADER, COORDINATOR, BOOTH = "learner", "leader", "coordinator", "booth"
"""What a tape calls the machines."""


@dataclass(frozen=True, slots=True)
class LearnerParts:
    options: LearnerOptions
    own_digests: tuple[str, ...]
    own_versions: tuple[int, ...] = ()
    """That these are of; empty: 0."""


@dataclass(frozen=True, slots=True)
class LeaderParts:
    hello: Hello
    coordinator: Peer
    options: LeaderOptions
    started_ns: int
    coordinator_address: str = ""


@dataclass(frozen=True, slots=True)
class CoordinatorParts:
    """`scripted`: the records of `script` are decided again, and nothing else."""

    job: str
    options: CoordinatorOptions
    script: tuple[Record, ...] = ()
    scripted: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """None: the process has no such machine. One without a learner is the witness."""

    me: Peer
    member: Member
    learner: LearnerParts | None = None
    leader: LeaderParts | None = None
    coordinator: CoordinatorParts | None = None
    records_kept: int = RECORDS_KEPT


@dataclass(frozen=True, slots=True)
class Machines:
    """Leader or booth, and coordinator, share the one vote of their process."""

    learner: Learner | None
    leader: Leader | None
    coordinator: Coordinator | None
    booth: WitnessBooth | None

    def named(self) -> dict[str, Machine]:
        """Those that there are, by the names that a tape calls them."""
        found: dict[str, Machine | None] = {
            LEARNER: self.learner,
            LEADER: self.leader,
            COORDINATOR: self.coordinator,
            BOOTH: self.booth,
        }
        return {name: machine for name, machine in found.items() if machine is not None}


def machines_of(parts: Parts) -> Machines:
    """New machines, all of one process together."""
    me, member, voter = parts.me, parts.member, Voter(Log(parts.records_kept))
    learner = leader = coordinator = booth = None
    if (of := parts.learner) is not None:
        learner = Learner(me, member, of.options, of.own_digests, of.own_versions)
    if (by := parts.leader) is not None:
        at = by.coordinator_address
        leader = Leader(by.hello, by.coordinator, by.options, by.started_ns, at, voter)
    if (it := parts.coordinator) is not None:
        coordinator = (
            Director(me, member, it.job, it.options, voter, script=it.script)
            if it.scripted
            else Coordinator(
                me, member, it.job, it.options, voter, Proposer(Log(parts.records_kept))
            )
        )
        if leader is None:
            booth = WitnessBooth(Booth(member, voter, me, it.options.detect_ns))
    return Machines(learner, leader, coordinator, booth)
