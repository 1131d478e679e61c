"""Votes that were taken, deaths, attestations: all ways in which a small job goes on from there."""

from __future__ import annotations

import pytest

from mend_lab.sim.model_check.founding import explore, play
from mend_lab.sim.model_check.lineages import Bounds, ModelWorld
from tests.sim.bugs import NAMED, planted

DEMOTED = (
    "the witness appends roster(0.1 1.1-learner w-learner)",
    "rack 0 gets orders",
    "the witness gets orders",
    "the witness hears what rack 0 has accepted",
    "the witness hears what the witness has accepted",
)
"""Rack 1 was silent, so that rack 0 votes alone."""

ALONE = (
    "rack 0 appends roster(0.1 1.1-learner)",
    "rack 0 gets orders",
    "rack 0 hears what rack 0 has accepted",
)
"""The same without a witness. Rack 1 has not heard of it."""


@pytest.mark.parametrize(
    ("bounds", "behind", "states"),
    [
        (Bounds(witness=True, restarts=1), (*DEMOTED, "rack 0 dies"), 4_000),
        (Bounds(witness=False, restarts=1), ALONE, 2_000),
    ],
    ids=["its only voter dies", "without a witness"],
)
def test_no_lineage_forgets_who_lives_whatever_happens_to_who_votes_alone(
    bounds: Bounds, behind: tuple[str, ...], states: int
) -> None:
    """A rack without a vote hears of it late or never, and says that the only voter is dead."""
    found = explore(ModelWorld(bounds), behind=behind)
    assert found.broken == "", "\n".join(found.trace)
    assert found.complete
    assert found.progress.states > states


@pytest.mark.parametrize(
    ("bug", "bounds", "behind", "what"),
    [
        ("35", Bounds(witness=True), (*DEMOTED, "rack 0 dies"), "a lineage began without the wit"),
        ("28", Bounds(witness=False), ALONE, "agreement: those that live know of two lists"),
    ],
)
def test_a_planted_bug_is_found(
    bug: str, bounds: Bounds, behind: tuple[str, ...], what: str
) -> None:
    with planted(NAMED[bug]):
        found = explore(ModelWorld(bounds), behind=behind)
    assert found.broken.startswith(what), found
    assert found.broken in found.trace[-1]


def test_a_rack_whose_vote_was_taken_goes_on_when_the_only_voter_is_started_again() -> None:
    """What the bounds above are for does happen: rack 1 and the witness begin a lineage."""
    world = ModelWorld(Bounds(witness=True))
    rack_1 = "rack 1 is asked for epoch 2.1 by rack 1 behind a silence"
    begun = (
        "rack 1 gets orders",
        "rack 1 stands",
        rack_1,
        "the witness is asked for epoch 2.1 by rack 1 behind a silence",
        "rack 1 hears what the witness has accepted",
        "rack 1 hears what rack 1 has accepted",
        "rack 1 gets orders",
        "rack 1 hears what rack 1 has accepted",
    )
    state = play(world, [*DEMOTED, "rack 0 dies", *begun])
    log = world.log(state.nodes[1].right.log).committed
    assert sorted(member.rack for member in log.members) == [1, 0xFFFF]
    assert [member.rack for member in log.voters] == [1]
