"""Without lockstep, and without a fault, every rack is in every round
(docs/internals/protocol.md, Capturing together). Before, racks that were out of phase merged one
by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from mend.types import MS, SECOND
from mend_lab.sim import Scenario, World
from mend_lab.sim.scenario import calm
from mend_lab.sim.story import setup
from tests.sim.bugs import NAMED, planted

STEP_NS = 20 * MS
PERIOD, FRAGMENTS, TAU = 32, 2, 8
GAP_NS = PERIOD // FRAGMENTS * STEP_NS
PERIODS = 24

WHOLE_PCT = 95
"""Of the rounds have every rack in."""

WAIT_PCT = 1
"""Of the time a training thread may wait."""


@dataclass
class Outcome:
    """`by_racks`: members of a round -> rounds. `waited`: the greatest part of its time, in %."""

    by_racks: Counter[int]
    waited: float
    steps_between: list[int]
    """Of rack 0, from one capture of a fragment to the next, in rounds that it was named in."""

    @property
    def rounds(self) -> int:
        return self.by_racks.total()

    def whole_pct(self, racks: int) -> float:
        return 100 * self.by_racks[racks] / self.rounds


def measured(scenario: Scenario) -> Outcome:
    world = World(scenario)
    report = world.run()
    assert not report.problems, "\n".join([setup(scenario), *report.problems])
    commits = sorted(world.checkers.commits.items())
    captured: dict[int, list[int]] = {}
    for (fragment, _), fields in commits:
        mine = [m.capture_step for m in fields.members if m.rack == 0]
        captured.setdefault(fragment, []).extend(mine)
    trainings = world.trainings.values()
    return Outcome(
        Counter(len(fields.members) for _, fields in commits),
        max(100 * t.trainer.stalls.total_ns / t.trained_ns for t in trainings),
        [b - a for steps in captured.values() for a, b in pairwise(steps)],
    )


def rounds_once_per_period(found: Outcome, racks: int) -> bool:
    """Not in turns, with twice the bytes. Tails are one round per fragment and rack at most."""
    due = PERIODS * FRAGMENTS
    return due - FRAGMENTS <= found.rounds <= due + FRAGMENTS * racks


def job(speeds: tuple[float, ...], **changes: Any) -> Scenario:
    """Each rack trains about as long as the others, whatever its speed."""
    step_ns = tuple(round(STEP_NS / speed) for speed in speeds)
    steps = tuple(PERIODS * PERIOD * STEP_NS // each for each in step_ns)
    fields = {
        "racks": len(speeds), "steps": steps, "step_ns": step_ns, "fragments": FRAGMENTS,
        "period_steps": PERIOD, "overlap_steps": TAU, "numel": 3, "shutdown_ns": 60 * SECOND,
    }  # fmt: skip
    return calm(**{**fields, **changes})


def out_of_phase(**changes: Any) -> Scenario:
    """Rack 1 pauses once, for half the time between two rounds."""
    pause = World(job((1.0, 1.0), **changes)).freeze(1, at=0.5, until=0.5 + GAP_NS / 2 / SECOND)
    return pause.scenario


JOBS = {
    "out of phase": out_of_phase(),
    "out of phase, racks of two ranks": out_of_phase(ranks=2),
    "out of phase, 20 ms apart": out_of_phase(delay_ns=10 * MS, overlap_steps=12),
    "speeds 1 : 1 : .7 : .5": job((1.0, 1.0, 0.7, 0.5)),
    "speeds 1 : 1 : .7 : .5, tau rising": job((1.0, 1.0, 0.7, 0.5), overlap_ramp=10),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.slow] * ("two ranks" in each)) for each in JOBS],
)
def test_every_rack_is_in_every_round_which_come_once_per_period(name: str) -> None:
    scenario = JOBS[name]
    found = measured(scenario)
    assert found.whole_pct(scenario.racks) >= WHOLE_PCT, found
    assert found.waited < WAIT_PCT, found
    assert rounds_once_per_period(found, scenario.racks), found
    whole = sum(PERIOD - TAU <= steps <= PERIOD for steps in found.steps_between)
    assert 100 * whole >= WHOLE_PCT * (len(found.steps_between) - FRAGMENTS), found


def test_a_fixed_grid_costs_twice_the_rounds() -> None:
    """The question that shows bug 40: no invariant breaks, and every rack is in. (With half a gap
    of overlap the offer of the first round is still open at the own capture, which saves it.)"""
    scenario = out_of_phase(overlap_steps=4)
    assert rounds_once_per_period(measured(scenario), racks=2)
    with planted(NAMED["40"]):
        found = measured(scenario)
    assert found.whole_pct(2) >= WHOLE_PCT, found
    assert not rounds_once_per_period(found, racks=2)
    assert found.rounds > 1.5 * PERIODS * FRAGMENTS, found


@pytest.mark.parametrize(
    "name", ["out of phase", pytest.param("speeds 1 : 1 : .7 : .5", marks=pytest.mark.slow)]
)
def test_racks_that_join_no_round_take_turns(name: str) -> None:
    """The question that shows bug 40b."""
    scenario = JOBS[name]
    with planted(NAMED["40b"]):
        found = measured(scenario)
    assert found.whole_pct(scenario.racks) < WHOLE_PCT, found


def test_the_work_of_a_straggler_is_merged_and_nobody_waits_for_it() -> None:
    found = measured(job((1.0, 1.0, 1 / 15), overlap_steps=TAU))
    assert found.by_racks[1] <= 3 * FRAGMENTS, found
    assert found.by_racks[3] > 0, found


def test_lockstep_keeps_its_grid() -> None:
    scenario = job((1.0, 0.5), lockstep=True, steps=(96, 96))
    world = World(scenario)
    assert not world.run().problems
    steps = {
        (fields.fragment, member.capture_step)
        for fields in world.checkers.commits.values()
        for member in fields.members
    }
    due = {(p, s) for s in range(16, 97, 16) for p in (0, 1) if (s // 16 - 1) % 2 == p}
    assert due <= steps
    assert steps - due == {(0, 96)}, "the tail"
