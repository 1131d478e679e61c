"""Every way in which a small job can begin; and bugs planted there, each of which is found."""

from __future__ import annotations

import pytest

from mend.coordination.acceptor_host import Follower
from mend_lab.sim.model_check import explore as search
from mend_lab.sim.model_check.founding import Bounds, ModelWorld, explore, play
from tests.sim.planted import Plant, replaced, rewritten

BEGUN = (
    "rack 0 gets orders 1", "rack 1 gets orders 1", "rack 2 gets orders 1",
    "rack 0 appends Genesis", "rack 0 gets orders 2", "rack 1 gets orders 2",
    "rack 2 gets orders 2", *(f"rack 0 hears what rack {rack} has accepted" for rack in range(3)),
    "rack 1 gets orders 3",
)  # fmt: skip
"""Of three racks, two know that the job has begun, and rack 2 has accepted it."""


@pytest.mark.parametrize(
    ("bounds", "states"),
    [
        (Bounds(restarts=0, founds=0, stands=1, commits=1), 8_000),
        (Bounds(restarts=1, founds=0, stands=1, commits=0), 2_000),
    ],
    ids=["nobody dies", "one is started again"],
)
def test_a_job_begins_once_whatever_happens(bounds: Bounds, states: int) -> None:
    found = explore(ModelWorld(bounds))
    assert found.broken == "", "\n".join(found.trace)
    assert found.complete
    assert found.progress.states > states


PLANTS: dict[str, tuple[Plant, Bounds, tuple[str, ...], str]] = {
    "a majority begins": (
        rewritten("consensus.proposer:Proposer.decide", "index == 0", "False"),
        Bounds(racks=3, restarts=1, founds=0, stands=0, commits=0),
        BEGUN[:5],
        "two jobs",
    ),
    "late words of the dead are followed by who has voted for another beginning": (
        replaced(Follower, "_outlived", lambda self, sender, orders: False),
        Bounds(restarts=2, founds=0, stands=0, commits=0),
        (),
        "two jobs",
    ),
    "any promise is undone by orders of a job that lives": (
        rewritten(
            "coordination.acceptor_host:Follower._joins",
            "self.acceptor.promised = self.pledged",
            "self.acceptor.promised = 0",
        ),
        Bounds(racks=3, restarts=0, founds=0, stands=1, commits=1),
        (
            *BEGUN,
            "rack 0 appends a commit",
            "rack 1 stands",
            "rack 2 is asked for ballot 2.1 by rack 1",
            "rack 1 is asked for ballot 2.1 by rack 1 behind a silence",
        ),
        "agreement",
    ),
}


@pytest.mark.parametrize("bug", PLANTS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, bounds, behind, what = PLANTS[bug]
    assert explore(ModelWorld(bounds), limit=2_000, behind=behind).broken == ""
    plant(monkeypatch)
    found = explore(ModelWorld(bounds), limit=60_000, behind=behind)
    assert found.broken.startswith(what)
    assert found.trace[-1].endswith(found.broken)


def test_play_of_an_impossible_action_is_refused() -> None:
    with pytest.raises(ValueError, match="'rack 1 appends Genesis': it cannot happen"):
        play(ModelWorld(Bounds()), ["rack 1 appends Genesis"])


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "REPORT_STATES", 50)
    told: list[int] = []
    found = explore(ModelWorld(Bounds()), lambda progress: told.append(progress.states), limit=120)
    assert told == [50, 100]
    assert not found.complete
