"""Units of data in simulated jobs with faults: none is merged twice, and none is lost."""

from __future__ import annotations

import dataclasses

import pytest

from mend.consensus.log import LogState
from mend.consensus.records import Grant
from mend.errors import GaveUp
from mend.types import SECOND, Peer
from mend_lab.sim import World, draw, problems_of
from mend_lab.sim.scenario import FOR_EVER, Fault, Scenario
from tests.noted import pairs
from tests.planting import Edit
from tests.sim.bugs import Bug, planted
from tests.sim.runs import assert_replays


def with_units(seed: int, units: int = 100_000) -> Scenario:
    """A drawn job whose scripts take two units per step, and end with their steps."""
    scenario = draw(seed)
    mode = "carry" if scenario.apply_mode == "overwrite" else scenario.apply_mode
    return dataclasses.replace(scenario, units=units, unit_batch=2, apply_mode=mode)


@pytest.mark.parametrize("seed", range(90))
def test_drawn_job_with_units_has_no_problem(seed: int) -> None:
    assert problems_of(with_units(seed)) == []


SMALL = Scenario(
    seed=3, racks=3, steps=(400,) * 3, step_ns=(20_000_000, 30_000_000, 50_000_000), units=1000,
    unit_batch=4, shutdown_ns=60 * SECOND,
)  # fmt: skip
"""Its scripts end with the data."""


def counted(scenario: Scenario) -> tuple[World, list[int]]:
    """The job after its end, and how many units are done, open and free in its log."""
    world = World(scenario, record=True)
    assert world.run().problems == []
    state = LogState()
    for record in world.checkers.agreement.records[1:]:
        assert record is not None
        state.take(record)
    units = state.units
    assert units is not None
    return world, [units.done, units.open, sum(count for _, count in units.free), units.again]


def test_all_units_are_done_at_the_end_of_a_calm_job() -> None:
    world, counts = counted(SMALL)
    assert counts == [1000, 0, 0, 0]
    assert_replays(world)
    taken = world.checkers.units.taken
    per_rack = {member.rack: len(units) for member, units in taken.items()}
    assert per_rack[0] > per_rack[1] > per_rack[2], "a faster rack takes more"
    ends = [training.trained_ns for training in world.trainings.values()]
    assert max(ends) - min(ends) < 2 * SECOND, "and all end together"


@pytest.mark.parametrize("kind", ["restart", "crash"])
def test_units_of_a_killed_rack_are_done_by_others(kind: str) -> None:
    """One that stays away loses its seat; the others wait for that at the end of their data."""
    end_ns = FOR_EVER if kind == "crash" else 5 * SECOND
    faults = (Fault(kind, SECOND, end_ns, 2),)
    world, counts = counted(dataclasses.replace(SMALL, faults=faults))
    assert counts[:3] == [1000, 0, 0]
    assert counts[3] > 0
    assert_replays(world)


@pytest.mark.parametrize("ranks", [1, 2])
def test_data_ends_while_a_rack_waits_for_the_state_of_one_that_waits_for_data(ranks: int) -> None:
    """Rack 1 returns when nothing is left for it but the rows that it had; rack 0 takes these, and
    makes no step more at which it could give its state."""
    back = (Fault("restart", 3 * SECOND // 2, 23 * SECOND // 10, 1),)
    world, counts = counted(
        dataclasses.replace(
            SMALL, racks=2, ranks=ranks, steps=(400,) * 2, step_ns=(20_000_000, 50_000_000),
            units=356, carries=True, faults=back,
        )
    )  # fmt: skip
    assert counts[:3] == [356, 0, 0]
    notes = [note for process in world.processes() for note in pairs(process.notes)]
    why = [str(fields["reason"]) for kind, fields in notes if kind == "state-fresh"]
    assert ["it leaves the job" in each for each in why] == [True] * ranks, why
    assert max(each.ended_ns for each in world.trainings.values()) < 6 * SECOND
    assert_replays(world)


def test_in_lockstep_one_record_gives_out_all_units() -> None:
    scenario = dataclasses.replace(SMALL, lockstep=True)
    world, counts = counted(scenario)
    assert counts == [1000, 0, 0, 0]
    grants = [r for r in world.checkers.agreement.records if isinstance(r, Grant) and r.shares]
    spans = [[span for _, (span,) in grant.shares] for grant in grants]
    assert spans == [[(0, 334), (334, 333), (667, 333)]]


def test_data_that_ends_without_a_quorum_ends_in_gave_up() -> None:
    """Rack 0 votes and is dead; nothing can be given out."""
    dead = (Fault("crash", SECOND, FOR_EVER, 0),)
    scenario = dataclasses.replace(
        SMALL, racks=2, steps=(400,) * 2, step_ns=(30_000_000,) * 2, witness=False, faults=dead
    )
    world = World(scenario)
    world.run()
    assert isinstance(world.trainings[Peer(1, 0)].failure, GaveUp)


PLANTED = (
    Bug(
        "kept",
        "units stay free when they are given",
        (Edit("consensus.units:give", "without(free, spans)", "free"),),
    ),
    Bug(
        "any",
        "a unit is done once any fragment has its work",
        (Edit("consensus.records:UnitBook.done", "min(positions[-1][1] for positions in "
              "self.merged)", "max(positions[-1][1] for positions in self.merged)"),),
    ),
    Bug(
        "taken",
        "an offer names all units that the rack has got",
        (Edit("engine.trainer.trainer_rounds:TrainerRounds._countable", "self.units",
              "self.units + (self.units > 0)"),),
    ),
    Bug(
        "lost",
        "a rack that dies gives nothing back",
        (Edit("consensus.units:seat", "b if b.member in members else replace(b, seated=False)",
              "b"),),
    ),
)  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_planted_bug_of_the_units_is_found(bug: Bug) -> None:
    restart = (Fault("restart", SECOND, 6 * SECOND // 5, 2),)
    scenario = dataclasses.replace(SMALL, faults=restart)
    with planted(bug):
        problems = problems_of(scenario)
    assert problems
    assert problems[0].startswith("I11"), problems
