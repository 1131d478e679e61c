"""A scenario that breaks is made small without losing what it breaks."""

from __future__ import annotations

import pytest

from mend.consensus import log
from mend.types import MS, SECOND
from mend_lab.sim import Fault, Scenario, World, draw, problems_of, shrink
from mend_lab.sim.shrink import simpler

BIG = next(
    scenario
    for scenario in map(draw, range(1000))
    if scenario.racks == 4
    and scenario.witness
    and len(scenario.faults) > 3
    and all(fault.kind != "cut" for fault in scenario.faults)
)


def breaks_if_cut(scenario: Scenario) -> list[str]:
    """Stands for a run in which one cut alone is to blame, with two racks or more."""
    broken = any(fault.kind == "cut" for fault in scenario.faults)
    return ["I3: an offer is merged twice"] if broken else []


def test_only_what_is_to_blame_is_left() -> None:
    scenario = BIG.without(faults=(*BIG.faults, Fault("cut", 333_333_333, 4 * SECOND, 0, 1)))
    small = shrink(scenario, run=breaks_if_cut)
    assert [fault.kind for fault in small.faults] == ["cut"]
    assert small.racks == 2
    assert not small.witness
    assert (small.ranks, small.fragments, small.loss, small.jitter_ns) == (1, 1, 0.0, 0)
    assert small.faults[0].begin_ns == 300 * MS
    assert small.faults[0].end_ns - small.faults[0].begin_ns <= 100 * MS
    assert max(small.steps) == 2
    assert breaks_if_cut(small)


def test_another_invariant_is_another_bug() -> None:
    def run(scenario: Scenario) -> list[str]:
        return ["I3: twice"] if scenario.racks > 2 else ["I1: other bits"]

    assert shrink(BIG, run=run).racks == 3


def test_scenario_without_problems_is_not_shrunk() -> None:
    assert shrink(BIG, run=lambda scenario: []) == BIG


def test_shrinking_gives_up_in_time() -> None:
    runs: list[Scenario] = []

    def run(scenario: Scenario) -> list[str]:
        runs.append(scenario)
        return ["I1: always"]

    shrink(BIG, ["I1: always"], run=run, runs_max=10)
    assert len(runs) == 10


def test_every_step_is_a_scenario_that_can_run() -> None:
    for seed in (3, 8, 21):
        for candidate in simpler(draw(seed)):
            assert candidate != draw(seed)
            World(candidate)  # as many steps as racks, no fault of a rack that is not there
            targets = {*range(candidate.racks), 99}
            assert all({*fault.racks} <= targets for fault in candidate.faults)


def test_a_real_bug_is_shrunk_to_its_bone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a Commit is read without its last member, so that rack's tokens merge unseen."""
    fold = log.LogState._end

    def forget(self: log.LogState, fragment: int, offers: object) -> None:
        kept = list(offers)  # type: ignore[call-overload]
        fold(self, fragment, kept[:-1] if len(kept) > 1 else kept)

    monkeypatch.setattr(log.LogState, "_end", forget)
    scenario = next(s for s in map(draw, range(200)) if s.racks == 3 and problems_of(s))
    problems = problems_of(scenario)
    small = shrink(scenario, problems, runs_max=20)
    assert small.racks <= scenario.racks
    assert len(small.faults) <= len(scenario.faults)
    assert small != scenario
    kinds = {problem.partition(":")[0] for problem in problems}
    assert kinds & {problem.partition(":")[0] for problem in problems_of(small)}
