"""One process, one vote: which machines it has, and that they share it."""

from __future__ import annotations

from mend.protocol.booth import WitnessBooth
from mend.protocol.coordinator import Coordinator, CoordinatorOptions
from mend.protocol.director import Director
from mend.protocol.leader import LeaderOptions
from mend.protocol.machines import CoordinatorParts, LeaderParts, LearnerParts, Parts, machines_of
from mend.protocol.shelf import LearnerOptions
from mend.terms import SECOND, WITNESS, Peer
from tests.unit.protocol.nouns import DETECT_NS, HEARTBEAT_NS, digest, hello, member

LEARNER = LearnerParts(LearnerOptions(HEARTBEAT_NS, 2), (digest(0),))
LEADER = LeaderParts(
    hello(1), Peer(WITNESS, 0), LeaderOptions(HEARTBEAT_NS, DETECT_NS, 9 * SECOND), SECOND
)
COORDINATOR = CoordinatorParts("job", CoordinatorOptions(2, HEARTBEAT_NS, DETECT_NS, first=False))


def test_the_leaders_process_votes_once_whatever_it_does() -> None:
    """A coordinator that had a vote of its own could promise itself what its rack promised
    another."""
    made = machines_of(Parts(Peer(1, 0), member(1), LEARNER, LEADER, COORDINATOR))
    assert made.leader is not None
    assert type(made.coordinator) is Coordinator
    assert made.coordinator.voter is made.leader.voter is made.leader.booth.voter
    assert made.booth is None, "the leader answers for it"
    assert list(made.named()) == ["learner", "leader", "coordinator"]


def test_a_witness_answers_with_a_booth_that_shares_its_coordinators_vote() -> None:
    made = machines_of(Parts(Peer(WITNESS, 0), member(WITNESS), coordinator=COORDINATOR))
    assert isinstance(made.booth, WitnessBooth)
    assert made.coordinator is not None
    assert made.booth.booth.voter is made.coordinator.voter
    assert list(made.named()) == ["coordinator", "booth"]


def test_other_ranks_only_learn() -> None:
    made = machines_of(Parts(Peer(1, 1), member(1), LEARNER))
    assert list(made.named()) == ["learner"]


def test_a_script_makes_the_coordinator_one_that_follows_it() -> None:
    scripted = CoordinatorParts("job", COORDINATOR.options, (), scripted=True)
    made = machines_of(Parts(Peer(WITNESS, 0), member(WITNESS), coordinator=scripted))
    assert type(made.coordinator) is Director
