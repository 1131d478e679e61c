"""Every order of votes and messages of small jobs; and bugs planted there, each of which is found.

Where the shortest way to a bug is long, the search begins behind a part of it that is played here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from mend_lab.sim.model_check import explore
from mend_lab.sim.model_check.explore import Explorer
from mend_lab.sim.model_check.state import Bounds, State
from mend_lab.sim.model_check.world import ModelWorld
from tests.sim.planted import PLANTS

RACK_0, RACK_1, WITNESS = 0, 1, 2
"""Nodes of a job of two racks and a witness."""
RACK_1_AGAIN = 4

Move = tuple[str, int] | tuple[str, int, tuple[int, ...]]
"""What, who, and the other nodes that take part."""

LATER = (RACK_1, WITNESS)
COMMIT_OF_THE_WITNESS: tuple[Move, ...] = (
    ("gather", WITNESS), ("append", RACK_0), ("append", RACK_1), ("merge", RACK_0),
    ("merge", RACK_1), ("commit", WITNESS), ("append", WITNESS),
)  # fmt: skip
"""Both racks hold a result; only the witness has the record that says so."""


def play(world: ModelWorld, moves: tuple[Move, ...]) -> State:
    """The state behind these moves; orders are those of the newest ballot."""
    state = world.start()
    for what, who, *nodes in moves:
        found = [
            after
            for action, after in world.steps(state)
            if action[:2] == (what, who) and (not nodes or action.nodes == nodes[0])
        ]
        assert found, f"{what} {who} is not possible"
        assert isinstance(found[-1], State), found[-1]
        state = found[-1]
    return state


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(witness=False, rounds=1, ballots=1, crashes=1),
        Bounds(rounds=1, ballots=1, crashes=0),
        Bounds(rounds=0, ballots=1, crashes=0, rosters=1),
    ],
    ids=["two racks", "the witness is deposed", "the roster changes"],
)
def test_no_invariant_breaks(bounds: Bounds) -> None:
    found = Explorer(bounds).run()
    assert (found.broken, found.complete) == ("", True)
    assert found.progress.states > 1000, "a world in which nothing happens is always right"


def test_a_job_that_begins_with_a_version_has_the_states_of_one_that_begins_with_none() -> None:
    bounds = Bounds(witness=False, rounds=1, ballots=1, crashes=0)
    usual, found = (Explorer(each).run() for each in (bounds, replace(bounds, first=7)))
    assert (found.broken, found.complete) == ("", True)
    assert found.progress.states == usual.progress.states > 100


def test_everything_that_should_be_possible_happens() -> None:
    """A commit is decided, a taken-over log is decided, a rack is back and votes."""
    world = ModelWorld(Bounds(rounds=1, ballots=1, crashes=1, rosters=2))
    moves: tuple[Move, ...] = (
        ("crash", RACK_1), ("roster", WITNESS, (RACK_1_AGAIN,)), ("append", RACK_0),
        ("append", WITNESS), ("count", WITNESS), ("append", RACK_1_AGAIN), ("copy", RACK_1_AGAIN),
        ("roster", WITNESS, (RACK_1_AGAIN,)), ("append", RACK_0), ("count", WITNESS),
        ("append", RACK_1_AGAIN), ("stand", RACK_1_AGAIN),
        ("win", RACK_1_AGAIN, (RACK_0, RACK_1_AGAIN)), ("append", RACK_0), ("append", RACK_1_AGAIN),
        ("count", RACK_1_AGAIN), ("gather", RACK_1_AGAIN), ("append", RACK_0),
        ("append", RACK_1_AGAIN), ("merge", RACK_0), ("merge", RACK_1_AGAIN),
        ("commit", RACK_1_AGAIN), ("append", RACK_0), ("append", RACK_1_AGAIN),
        ("count", RACK_1_AGAIN),
    )  # fmt: skip
    try:
        state = play(world, moves)
    except AssertionError as error:
        pytest.fail(str(error))
    assert world.parts.committed(state.decided).version == 1


@dataclass(frozen=True, slots=True)
class Hunt:
    bounds: Bounds
    broken: str
    behind: tuple[Move, ...] = ()


HUNTS = {
    "1-decided-before-accepted": Hunt(Bounds(ballots=1, crashes=0), "agreement"),
    "2-accepts-of-an-older-ballot": Hunt(
        Bounds(ballots=2, crashes=0), "agreement", COMMIT_OF_THE_WITNESS
    ),
    "3-append-below-promised": Hunt(
        Bounds(ballots=1, crashes=0), "agreement", COMMIT_OF_THE_WITNESS
    ),
    "4-restarted-rack-keeps-its-vote": Hunt(
        Bounds(ballots=1, crashes=1), "agreement", COMMIT_OF_THE_WITNESS
    ),
    "5-asks-only-the-roster-it-knows": Hunt(
        Bounds(rounds=0, ballots=1, crashes=1, rosters=2),
        "agreement",
        (
            ("stand", RACK_0), ("roster", WITNESS, (RACK_1,)), ("append", RACK_0),
            ("append", RACK_1), ("count", WITNESS),
        ),
    ),
    "6-append-behind-an-undecided-roster": Hunt(
        Bounds(racks=3, witness=False, ballots=0, rosters=1), "bytes"
    ),
    "7-tie-break-on-both-halves": Hunt(Bounds(witness=False, ballots=1, crashes=0), "agreement"),
    "8-no-hold-at-commit": Hunt(Bounds(ballots=0), "bytes"),
    "9-no-hold-at-roster": Hunt(Bounds(racks=3, witness=False, ballots=0, rosters=1), "bytes"),
    "25-own-vote-counts-for-ever": Hunt(Bounds(ballots=1, crashes=0), "agreement"),
    "26-no-ballot-record-first": Hunt(
        Bounds(ballots=2, crashes=1),
        "bytes",
        (
            *COMMIT_OF_THE_WITNESS,
            ("takeover", RACK_1, (RACK_0, RACK_1)),
            ("gather", RACK_1),
            ("append", RACK_1),
        ),
    ),
    "votes-by-rack": Hunt(
        Bounds(rounds=0, ballots=1, crashes=1, rosters=1),
        "agreement",
        (("stand", RACK_0), ("crash", RACK_1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HUNTS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hunt = HUNTS[name]
    PLANTS[name](monkeypatch)
    explorer = Explorer(hunt.bounds)
    found = explorer.run(start=play(explorer.world, hunt.behind))
    assert found.broken.startswith(hunt.broken), found
    assert len(found.trace) == found.progress.depth
    assert found.broken in found.trace[-1]


DEMOTED = Bounds(racks=3, rounds=0, ballots=1, crashes=0, rosters=2, demotions=True, demoted=0)
"""Three racks and a witness, one of which has just lost its vote: two and the witness are left."""


def test_no_invariant_breaks_when_the_next_rack_loses_its_vote_too() -> None:
    """With nobody who stands; docs/internals/model_check.md has the others, which take a minute."""
    found = Explorer(replace(DEMOTED, candidate=3)).run()
    assert (found.broken, found.complete) == ("", True)
    assert found.progress.states > 500


@pytest.mark.slow
def test_a_bug_is_found_where_one_demotion_follows_another(monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS["5-asks-only-the-roster-it-knows"](monkeypatch)
    found = Explorer(replace(DEMOTED, candidate=1)).run(limit=60_000)
    assert found.broken.startswith("agreement: record 3 is decided as roster("), found


def test_the_ballot_record_already_cuts_an_old_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug 27 needs a log that goes on the old tail's way; the record that opens a ballot never
    does, and what conflicts is cut with all behind it. So it is not found, here or anywhere."""
    PLANTS["27-an-old-tail-survives"](monkeypatch)
    found = Explorer(Bounds(rounds=1, ballots=1, crashes=0)).run()
    assert (found.broken, found.complete) == ("", True)


def test_a_limit_is_told_from_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explore, "REPORT_STATES", 100)
    told: list[int] = []
    found = Explorer(Bounds()).run(lambda progress: told.append(progress.states), limit=350)
    assert (found.complete, found.broken) == (False, "")
    assert told == [100, 200, 300]


TWINS: tuple[Move, ...] = (
    ("roster", WITNESS, (RACK_1_AGAIN,)), ("append", RACK_0), ("append", WITNESS),
    ("count", WITNESS), ("append", RACK_1_AGAIN), ("copy", RACK_1_AGAIN),
    ("roster", WITNESS, (RACK_1_AGAIN,)), ("append", RACK_0), ("append", WITNESS),
    ("count", WITNESS), ("append", RACK_1_AGAIN), ("append", RACK_0), ("stand", RACK_1),
    ("stand", RACK_1_AGAIN), ("win", RACK_1, (RACK_0, WITNESS)),
    ("win", RACK_1_AGAIN, (RACK_0, WITNESS)), ("append", RACK_0), ("append", WITNESS),
    ("count", RACK_1), ("count", RACK_1_AGAIN), ("roster", RACK_1, (RACK_1_AGAIN,)),
    ("append", RACK_0), ("append", WITNESS), ("count", RACK_1),
)  # fmt: skip


def test_two_lives_of_a_rack_never_lead_the_same_ballot() -> None:
    """Rack 1 is cut off and started again elsewhere; both lives stand for the same number. The
    second that wins is promised another ballot, and the first decides nothing any more."""
    both_won = TWINS[: TWINS.index(("win", RACK_1_AGAIN, (RACK_0, WITNESS))) + 1]
    explorer = Explorer(Bounds(rounds=1, ballots=2, crashes=0, rosters=4, twins=1))
    found = explorer.run(start=play(explorer.world, both_won), limit=3000)
    assert found.broken == "", "\n".join(found.trace)
