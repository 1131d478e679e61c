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


HALVES = (
    "rack 0 appends roster(0.1 1.1-learner 2.1)", "rack 0 gets orders", "rack 2 gets orders",
    "rack 0 hears what rack 0 has accepted", "rack 0 hears what rack 2 has accepted",
    "rack 0 appends version 1 of fragment 0 by 0,1", "rack 0 gets orders",
    "rack 0 hears what rack 0 has accepted", "rack 0 appends version 1 of fragment 1 by 0,2",
    "rack 0 gets orders", "rack 0 hears what rack 0 has accepted", "rack 0 gets orders",
    "rack 1 gets orders", "rack 2 gets orders", "rack 0 dies",
)  # fmt: skip
"""Of two fragments rack 1 lacks one's newest version and rack 2 the other's."""

WRITTEN = (
    *HALVES, "rack 2 stands", "rack 1 is asked for ballot 3.2 by rack 2 behind a silence",
    "rack 2 is asked for ballot 3.2 by rack 2 behind a silence",
    "rack 2 hears what rack 1 has accepted", "rack 2 hears what rack 2 has accepted",
)  # fmt: skip
"""Rack 2 has appended the lineage of the two."""


def two_fragments(stands: int = 2) -> Bounds:
    return Bounds(racks=3, fragments=2, merges=2, restarts=2, stands=stands)


def test_no_version_is_lost_where_each_of_two_racks_lacks_one_whatever_happens() -> None:
    """Either may die before it has copied, and be started again."""
    found = explore(ModelWorld(two_fragments(stands=1)), behind=WRITTEN)
    assert found.broken == "", "\n".join(found.trace)
    assert found.complete
    assert found.progress.states > 1_000


def test_half_of_such_a_lineage_that_decides_is_found() -> None:
    """What the rule was before: the lowest rack decides alone, without a version."""
    with planted(NAMED["45"]):
        found = explore(ModelWorld(two_fragments()), behind=WRITTEN)
    assert found.broken.startswith("bytes: a quorum of the roster lives, and no rack of it has ver")
    assert (found.progress.depth, len(found.trace)) == (4, 4)
    assert "rack 2 dies" in found.trace[-1]


def test_second_death_undoes_the_version_that_only_the_dead_rack_held() -> None:
    """What the bounds above are for does happen: rack 1 goes on, with fragment 1 from version 0."""
    world = ModelWorld(two_fragments())
    begun = (
        "rack 1 gets orders", "rack 2 dies", "rack 1 stands",
        "rack 1 is asked for ballot 4.1 by rack 1 behind a silence",
        "rack 1 hears what rack 1 has accepted", "rack 1 gets orders",
        "rack 1 hears what rack 1 has accepted",
    )  # fmt: skip
    state = play(world, [*WRITTEN, *begun])
    log = world.log(state.nodes[1].right.log)
    assert log.decided == log.last
    assert log.committed.versions == [1, 0]
    assert [member.rack for member in log.committed.voters] == [1]


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
    rack_1 = "rack 1 is asked for ballot 2.1 by rack 1 behind a silence"
    begun = (
        "rack 1 gets orders", "rack 1 stands", rack_1,
        "the witness is asked for ballot 2.1 by rack 1 behind a silence",
        "rack 1 hears what the witness has accepted", "rack 1 hears what rack 1 has accepted",
        "rack 1 gets orders", "rack 1 hears what rack 1 has accepted",
    )  # fmt: skip
    state = play(world, [*DEMOTED, "rack 0 dies", *begun])
    log = world.log(state.nodes[1].right.log).committed
    assert sorted(member.rack for member in log.members) == [1, 0xFFFF]
    assert [member.rack for member in log.voters] == [1]
