"""How jobs end: what a rank says of its end is what the log says."""

from __future__ import annotations

from typing import Any

import pytest

from mend.consensus.records import Drop, Ended
from mend.types import MS, SECOND, Member, Peer
from mend_lab.sim import World
from mend_lab.sim.process import Training
from tests.noted import pairs


def ends(world: World) -> dict[int, Training]:
    """The training of each rack, behind a run that breaks nothing."""
    report = world.run()
    assert report.problems == []
    return {peer.rack: training for peer, training in world.trainings.items()}


def replace_rack(member: Member, rack: int) -> Member:
    return Member(rack, member.incarnation)


def seconds(first: float, count: float) -> dict[str, float]:
    return {"at": first, "until": first + count}


@pytest.mark.parametrize("witness", [True, False])
@pytest.mark.parametrize(("at", "asleep"), [(1.0, 9.0), (2.0, 15.0), (2.6, 9.0)])
def test_a_rack_that_sleeps_through_the_end_is_merged_or_keeps_its_own(
    witness: bool, at: float, asleep: float
) -> None:
    """In the middle of its training, and behind it. `merged` was said with older versions."""
    steps = (60, 24) if witness else (60, 24, 60)
    options: dict[str, Any] = {"steps": steps, "racks": len(steps), "shutdown_ns": 40 * SECOND}
    world = World(seed=3, witness=witness, **options).freeze(1, **seconds(at, asleep))
    trainings = ends(world)
    others = [trainer.trainer for rack, trainer in trainings.items() if rack != 1]
    assert {trainer.outcome.word for trainer in others} == {"merged"}
    assert all(t.outcome.detail.startswith("without rack 1, silent") for t in others)
    sleeper = trainings[1].trainer
    same = sleeper.versions() == others[0].versions()
    merged = same and not sleeper.open_tokens()
    assert sleeper.outcome.word == ("merged" if merged else "kept-local")
    if not same:
        ended = ", ".join(map(str, others[0].versions()))
        assert sleeper.outcome.detail.startswith(f"the job ended at versions {ended}, this rack")


def test_coordinator_whose_link_returns_behind_the_others_last_step_is_merged() -> None:
    """Another one has taken over meanwhile, and has no report of it."""
    world = World(seed=3, racks=3, witness=False, steps=60, shutdown_ns=40 * SECOND)
    trainings = ends(world.partition(0, at=0.8, until=4.6))
    assert "takes-over" in [kind for kind, _ in pairs(trainings[1].process.notes)]
    assert [each.trainer.outcome.word for each in trainings.values()] == ["merged"] * 3
    assert not trainings[0].trainer.open_tokens()


def test_a_rack_copies_what_it_slept_through_while_another_still_serves_it() -> None:
    """The coordinator stays until every member has all that was decided."""
    world = World(seed=3, racks=3, witness=False, steps=(60, 24, 60), shutdown_ns=40 * SECOND)
    trainings = ends(world.freeze(1, **seconds(2.0, 9.0)))
    assert {each.trainer.outcome.word for each in trainings.values()} == {"merged"}
    copied = [fields for kind, fields in pairs(trainings[1].process.notes) if kind == "copied"]
    assert copied
    assert len({each.trainer.versions() for each in trainings.values()}) == 1


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))]
)
@pytest.mark.parametrize(
    "options",
    [
        {"racks": 3, "staleness_max_rounds": 0, "grace_ns": 0},
        {"racks": 3, "staleness_max_rounds": 0, "grace_ns": 0, "witness": False},
        pytest.param({"racks": 6, "staleness_max_rounds": 0}, marks=pytest.mark.slow),
    ],
)
def test_a_tail_that_was_dropped_is_captured_again(seed: int, options: dict[str, Any]) -> None:
    """One rack's last offer made another's too old. That was never made again, so in nearly every
    job one or two of three racks kept their own weights, without a reason."""
    racks = range(options["racks"])
    trainings = ends(
        World(
            seed=seed, steps=tuple(40 + 3 * rack for rack in racks),
            step_ns=tuple(10 * MS + 700_000 * rack for rack in racks), jitter_ns=20 * MS,
            shutdown_ns=30 * SECOND, **options,
        )
    )  # fmt: skip
    assert {each.trainer.outcome.word for each in trainings.values()} == {"merged"}
    assert sum(each.trainer.open_tokens() for each in trainings.values()) == 0


def test_racks_name_those_whose_last_offer_was_dropped() -> None:
    """It is alive, and the others said `merged` without a word of it."""
    training = ends(World(seed=1, racks=3))[0]
    trainer, published = training.trainer, training.rank.published
    assert trainer.outcome.detail == ""
    member = training.process.member
    published.on_decided(Drop(1, (Ended(replace_rack(member, 2), 9), Ended(member, 9)), "too old"))
    words = "the last offer of rack 2 was dropped: it is missing here"
    assert trainer._outcome_of_leaving().detail == words
    published.job.missing = (2,)
    assert words not in trainer._outcome_of_leaving().detail, "rack 2 is named already"


@pytest.mark.slow
def test_a_rack_that_lost_its_seat_begins_another_life_and_joins() -> None:
    """It trained on alone until its script ended."""
    world = World(seed=5, racks=3, steps=400, shutdown_ns=40 * SECOND)
    trainings = ends(world.freeze(2, **seconds(1.0, 13.0)))
    former = [process for process in world.past if process.me == Peer(2, 0)]
    assert len(former) == 1
    assert "seat-lost" in [kind for kind, _ in pairs(former[0].notes)]
    assert {each.trainer.outcome.word for each in trainings.values()} == {"merged"}
