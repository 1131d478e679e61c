"""One process, one vote: which machines it has, and that they share it."""

from __future__ import annotations

from mend.coordination.acceptor_host import WitnessFollower
from mend.coordination.coordinator import Coordinator, CoordinatorOptions
from mend.coordination.fragment_replica import RankOptions
from mend.coordination.leader import LeaderOptions
from mend.coordination.machines import (
    CoordinatorSpec,
    LeaderSpec,
    ProcessSpec,
    RankSpec,
    machines_of,
)
from mend.types import SECOND, WITNESS, Peer
from tests.unit.coordination.nouns import DETECT_NS, HEARTBEAT_NS, digest, hello, member

RANK_MACHINE = RankSpec(RankOptions(HEARTBEAT_NS, 2), (digest(0),))
LEADER = LeaderSpec(
    hello(1), Peer(WITNESS, 0), LeaderOptions(HEARTBEAT_NS, DETECT_NS, 9 * SECOND), SECOND
)
COORDINATOR = CoordinatorSpec("job", CoordinatorOptions(2, HEARTBEAT_NS, DETECT_NS, first=False))


def test_the_leaders_process_votes_once_whatever_it_does() -> None:
    """A coordinator that had a vote of its own could promise itself what its rack promised
    another."""
    made = machines_of(ProcessSpec(Peer(1, 0), member(1), RANK_MACHINE, LEADER, COORDINATOR))
    assert type(made.coordinator) is Coordinator
    assert made.coordinator.acceptor is made.leader.acceptor is made.leader.follower.acceptor
    assert made.follower is None, "the leader answers for it"
    assert list(made.named()) == ["rank", "leader", "coordinator"]


def test_a_witness_answers_with_a_booth_that_shares_its_coordinators_vote() -> None:
    made = machines_of(ProcessSpec(Peer(WITNESS, 0), member(WITNESS), coordinator=COORDINATOR))
    assert isinstance(made.follower, WitnessFollower)
    assert made.follower.follower.acceptor is made.coordinator.acceptor
    assert list(made.named()) == ["coordinator", "follower"]


def test_other_ranks_only_learn() -> None:
    made = machines_of(ProcessSpec(Peer(1, 1), member(1), RANK_MACHINE))
    assert list(made.named()) == ["rank"]
