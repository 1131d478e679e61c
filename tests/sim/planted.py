"""Bugs to plant in the deciding core, each as a change of its own code, for test_explore.py."""

from __future__ import annotations

from collections.abc import Callable, Set

import pytest

from mend.consensus import log, quorum
from mend.coordination import membership
from mend.types import Member
from mend_lab.sim.model_check import world as model_world
from mend_lab.sim.model_check.state import Node, State
from mend_lab.sim.model_check.world import ModelWorld
from tests import planting

Plant = Callable[[pytest.MonkeyPatch], None]


def rewritten(function: str, old: str, new: str) -> Plant:
    """Other code in one function; see tests/planting.py."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for found, code in planting.codes([planting.Edit(function, old, new)]):
            patch.setattr(found, "__code__", code)

    return plant


def replaced(owner: object, name: str, new: object) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, name, new)

    return plant


def _half(votes: Set[Member], voters: Set[Member]) -> bool:
    return 2 * len(votes & voters) >= len(voters)


def _by_rack(votes: Set[Member], voters: Set[Member]) -> bool:
    return quorum.quorum({m.rack for m in votes}, {m.rack for m in voters})


def _reborn(world: ModelWorld, state: State, node: int) -> State:
    """The process is back under its old name, with an empty memory and its vote."""
    nodes = list(state.nodes)
    nodes[node] = Node(world.empty, held=0 if world.members[node].rack != 0xFFFF else -1)
    return state._replace(nodes=tuple(nodes))


DECIDE, MAY_APPEND = "consensus.proposer:Proposer.decide", "consensus.proposer:Proposer.may_append"
APPEND, OPEN = "consensus.acceptor:Acceptor.append", "consensus.proposer:Proposer.open"
COUNT = "{m: b.last for m, b in self.acceptor_states.items() if b.accepted == self.ballot}"
PLANTS: dict[str, Plant] = {
    "1-decided-before-accepted": rewritten(DECIDE, "log.decide(index)", "log.decide(log.last)"),
    "2-accepts-of-an-older-ballot": rewritten(
        DECIDE, COUNT, "{m: b.last for m, b in self.acceptor_states.items()}"
    ),
    "3-append-below-promised": rewritten(APPEND, "ballot < self.promised", "ballot < 0"),
    "4-restarted-rack-keeps-its-vote": replaced(ModelWorld, "dead", _reborn),
    "5-asks-only-the-roster-it-knows": rewritten(
        "consensus.proposer:Proposer.try_lead",
        "self._rosters(adopted)",
        "self._rosters(adopted)[:1]",
    ),
    "6-append-behind-an-undecided-roster": rewritten(
        MAY_APPEND, "isinstance(record, Roster | Lineage)", "False"
    ),
    "7-tie-break-on-both-halves": replaced(log, "quorum", _half),
    "8-no-hold-at-commit": replaced(model_world, "hold", lambda holders, _: bool(holders)),
    "9-no-hold-at-roster": replaced(
        membership, "_keeps_bytes", lambda _, roster: bool(roster.members)
    ),
    "25-own-vote-counts-for-ever": rewritten(
        DECIDE,
        COUNT,
        COUNT
        + " | {m: log.last for m in self.acceptor_states if m.rack == self.ballot >> 16 & 0xFFFF}",
    ),
    "26-no-ballot-record-first": rewritten(
        OPEN, "self.leading and 0 < self.opening <= self.log.decided", "self.leading"
    ),
    "27-an-old-tail-survives": rewritten(
        APPEND, "self.log.cut(max(reached, self.log.decided))", "pass"
    ),
    "votes-by-rack": replaced(log, "quorum", _by_rack),
}
