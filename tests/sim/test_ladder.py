"""A slow rack that rounds stop waiting for, by a record, and that is waited for again on relief."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mend.consensus.records import AWAITED, EVICTED, NOT_AWAITED, SMALLER, Mitigation, Roster
from mend.types import MS, SECOND
from mend_lab.sim import World
from mend_lab.sim.generate import draw
from mend_lab.sim.scenario import Fault, Scenario, calm
from mend_lab.sim.scripted_faults import scripted, together, with_slow_rack
from mend_lab.sim.world import SEAT_TIMEOUT_NS
from tests.noted import pairs
from tests.sim.bugs import NAMED, planted
from tests.sim.runs import assert_replays

STEP_NS = 50 * MS
BEGINS_NS, ENDS_NS = 3 * SECOND, 6500 * MS
SLOW, SLOWER = 1, 10


def job(**changes: Any) -> Scenario:
    """Rack 1 of three takes ten times as long for a while. The grace window is so long that rounds
    would wait for it."""
    fields: dict[str, Any] = {
        "racks": 3, "steps": (210, 160, 210), "step_ns": STEP_NS, "period_steps": 12,
        "overlap_steps": 3, "grace_ns": 20 * SECOND, "acts": True,
        "faults": (Fault("slow_rack", BEGINS_NS, ENDS_NS, SLOW, amount=SLOWER),),
    }  # fmt: skip
    return calm(**{**fields, **changes})


def moves(world: World) -> list[tuple[int, int]]:
    records = world.checkers.agreement.records
    return [(r.rack, r.stage) for r in records if isinstance(r, Mitigation)]


def without(world: World) -> int:
    """Rounds that closed without the slow rack as it was not waited for."""
    commits = world.checkers.commits.values()
    return sum(f"slow-left, without rack {SLOW}" == commit.reason for commit in commits)


def test_rounds_stop_waiting_for_a_slow_rack_and_wait_again_when_it_is_well() -> None:
    world = World(job(), record=True)
    result = world.run()
    assert result.problems == []
    assert moves(world) == [(SLOW, NOT_AWAITED), (SLOW, AWAITED)]
    assert without(world) > 3
    last = list(world.checkers.commits.values())[-6]
    assert last.closed_by == "all-in", "it is waited for again"
    assert_replays(world)


def test_slow_rack_hidden_by_the_overlap_is_not_mitigated() -> None:
    """Rounds wait within the adaptive window, which is a part of the slack: the first rung."""
    slow = (Fault("slow_rack", BEGINS_NS, ENDS_NS, SLOW, amount=2),)
    world = World(
        job(faults=slow, period_steps=24, overlap_steps=20, grace_ns=-1, steps=(120,) * 3)
    )
    world.run()
    assert moves(world) == []


def test_a_slow_rack_makes_fewer_steps_between_two_rounds_and_they_count() -> None:
    """The second rung, with nobody acting: it captures where a round is open."""
    world = World(job(acts=False, steps=(120, 80, 120)))
    assert world.run().problems == []
    commits = world.checkers.commits.values()
    steps = [{m.rack: m.steps for m in commit.members} for commit in commits]
    both = [each for each in steps if {0, SLOW} <= each.keys()]
    assert moves(world) == []
    assert without(world) == 0
    assert any(each[SLOW] * SLOWER <= 2 * each[0] for each in both)
    assert sum(each[SLOW] == each[0] for each in both) > len(both) // 4


def taken(world: World, rack: int) -> list[list[tuple[int, int]]]:
    """By rank: the step and the percent of its micro-batches, each time they change."""
    notes = [pairs(t.process.notes) for peer, t in world.trainings.items() if peer.rack == rack]
    return [
        [(about["step"], about["batch_pct"]) for kind, about in mine if kind == "local-batch"]
        for mine in notes
    ]


@pytest.mark.slow
def test_a_slow_rack_takes_fewer_micro_batches_and_rounds_wait_for_it_no_longer() -> None:
    """Where its script asks. All its work is in the rounds, and it gets them all again on
    relief."""
    world = World(job(batch=12, ranks=2, validates=True, steps=(190, 440, 190)), record=True)
    assert world.run().problems == []
    assert moves(world) == [(SLOW, SMALLER), (SLOW, AWAITED)]
    assert without(world) == 0
    first, second = taken(world, SLOW)
    assert first == second, "all ranks take them from the same step on"
    (_, fewer), (_, all_) = first
    assert all_ == 100
    assert 8 * SLOWER <= 100 * 100 // fewer <= 150 * SLOWER
    assert taken(world, 0) == [[], []]
    assert_replays(world)


def test_in_lockstep_fewer_micro_batches_bring_the_rate_of_the_rounds_back() -> None:
    """All others wait for the slow rack there; nothing else may be done about it. It makes some 60
    steps while it is slow."""
    took_ns, slow = {}, (Fault("slow_rack", BEGINS_NS, 60 * SECOND, SLOW, amount=SLOWER),)
    for batch in (0, 12):
        scenario = job(lockstep=True, batch=batch, validates=True, steps=(120,) * 3, faults=slow)
        world = World(scenario)
        assert world.run().problems == []
        assert set(moves(world)) == ({(SLOW, SMALLER)} if batch else set())
        took_ns[batch] = max(training.trained_ns for training in world.trainings.values())
    healthy_ns = 120 * STEP_NS
    assert took_ns[0] - healthy_ns > 55 * (SLOWER - 1) * STEP_NS
    assert took_ns[12] - healthy_ns < (took_ns[0] - healthy_ns) / 3


def evicting(**changes: Any) -> Scenario:
    """It is slow until it is started again, and some time longer, which its next life cannot
    know."""
    fields: dict[str, Any] = {
        "evicts": True, "validates": True, "carries": True, "restart_ns": 1500 * MS,
        "steps": (210,) * 3, "shutdown_ns": 40 * SECOND,
    }  # fmt: skip
    return job(**{**fields, **changes})


@pytest.mark.parametrize(
    "slow",
    [
        pytest.param(1, id="a rack"),
        pytest.param(0, id="the one that coordinates", marks=pytest.mark.slow),
    ],
)
def test_a_slow_rack_is_evicted_with_all_its_work_merged_and_comes_back_as_a_twin(
    slow: int,
) -> None:
    faults = (Fault("slow_rack", BEGINS_NS, 8 * SECOND, slow, amount=SLOWER),)
    world = World(evicting(ranks=1 + slow, witness=False, faults=faults), record=True)
    assert world.run().problems == []
    assert moves(world) == [(slow, NOT_AWAITED), (slow, EVICTED)], "one rung after the other"
    move = [r for r in world.checkers.agreement.records if isinstance(r, Mitigation)][-1]
    assert f"rack {slow} is slow by the compute of rank" in move.reason
    rosters = [r for r in world.checkers.agreement.records if isinstance(r, Roster)]
    left, back = rosters[0], rosters[1]
    assert left.reason == f"rack {slow} left, evicted because it is slow"
    assert [seat.member.rack for seat in back.members] == [0, 1, 2]
    former = [process for process in world.past if process.me.rack == slow]
    steps = [[f["step"] for k, f in pairs(each.notes) if k == "evicted"] for each in former]
    assert len(steps[0]) == 1
    assert steps == steps[:1] * len(former), "behind the same step on all ranks"
    twins = [t for peer, t in world.trainings.items() if peer.rack == slow]
    assert all("state-copied" in dict(pairs(t.process.notes)) for t in twins)
    assert all(t.trainer.ledger.merged for t in twins), "what it trains is merged on"
    assert_replays(world)


def test_slow_rack_of_two_is_evicted_only_with_a_witness() -> None:
    for witness in (True, False):
        world = World(evicting(racks=2, witness=witness, steps=(160, 160)))
        assert world.run().problems == []
        assert (EVICTED in {stage for _, stage in moves(world)}) == witness


@pytest.mark.slow
@pytest.mark.parametrize("retired", [False, True], ids=["in time", "by a person"])
def test_an_evicted_rack_that_nobody_starts_again_is_lost_and_another_is_evicted(
    retired: bool,
) -> None:
    """Rack 2 is slow from some time on when rack 1 is away: it must not go before that is lost."""
    second, end_ns = 2, 40 * SECOND
    faults = [
        Fault("slow_rack", BEGINS_NS, end_ns, SLOW, amount=SLOWER),
        Fault("slow_rack", 8500 * MS, end_ns, second, amount=SLOWER),
    ]
    if retired:
        faults.append(Fault("retire", 10 * SECOND, 10 * SECOND, SLOW))
    world = World(evicting(faults=tuple(faults), steps=(420,) * 3, gone=True), record=True)
    assert world.run().problems == []
    assert [r for r, stage in moves(world) if stage == EVICTED] == [SLOW, second]
    noted = [
        (kind, at_ns)
        for process in world.processes()
        for (kind, about), at_ns in zip(pairs(process.notes), process.noted_ns, strict=True)
        if kind in ("evicted-rack-lost", "slow-rack-evicted", "retired")
        and SLOW in (about.get("slow_rack"), about.get("rack"))
    ]
    (_, evicted_ns), (given_up, lost_ns) = noted
    assert given_up == ("retired" if retired else "evicted-rack-lost")
    if not retired:
        assert SEAT_TIMEOUT_NS <= lost_ns - evicted_ns <= SEAT_TIMEOUT_NS + 2 * SECOND
    rosters = [r for r in world.checkers.agreement.records if isinstance(r, Roster)]
    assert [r.retired for r in rosters if r.retired] == [(SLOW,)] * retired
    assert_replays(world)


def test_an_eviction_that_fails_is_taken_back_and_the_rack_leaves_as_any_other() -> None:
    """Nobody merges in time what it offers: the record said that it is evicted, for ever."""
    slow = Fault("slow_rack", BEGINS_NS, 60 * SECOND, SLOW, amount=SLOWER)
    world = World(evicting(shutdown_ns=0, faults=(slow,), steps=(260, 110, 260)), record=True)
    assert world.run().problems == []
    assert "eviction-failed" in {kind for p in world.processes() for kind, _ in pairs(p.notes)}
    stages = [stage for _, stage in moves(world)]
    assert stages.count(EVICTED) == 1
    assert stages[stages.index(EVICTED) + 1] == AWAITED
    rosters = [r for r in world.checkers.agreement.records if isinstance(r, Roster)]
    assert not any("evicted" in roster.reason for roster in rosters)


def test_bug_41_a_slow_rack_is_never_waited_for_again() -> None:
    with planted(NAMED["41"]):
        world = World(job())
        world.run()
    assert moves(world) == [(SLOW, NOT_AWAITED)]


@pytest.mark.parametrize("seed", range(4))
def test_the_invariants_hold_whatever_is_done_about_a_slow_rack(seed: int) -> None:
    """With faults; the checkers look at each step."""
    scenario = with_slow_rack(seed, random.Random(seed))
    assert World(scenario).run().problems == []


@pytest.mark.parametrize("seed", [7, pytest.param(13, marks=pytest.mark.slow)])
def test_the_invariants_hold_where_a_slow_rack_is_evicted_among_faults(seed: int) -> None:
    scenario = with_slow_rack(seed, random.Random(seed))
    world = World(scenario)
    assert world.run().problems == []
    assert (SLOW, EVICTED) in moves(world)


TOGETHER = {
    "a checkpoint, moments, rack 0 dies": 75,
    "slices, moments, rack 0 dies": 13,
    "slices, a checkpoint, the witness dies twice": 86,
    "nobody starts it again": 3,
    "a person retires it": 88,
}
SHORT = (3, 88)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, id=name, marks=[pytest.mark.slow] * (seed not in SHORT))
        for name, seed in TOGETHER.items()
    ],
)
def test_the_invariants_hold_where_an_eviction_meets_what_else_a_job_does(seed: int) -> None:
    scenario = together(with_slow_rack(seed, random.Random(seed)))
    world = World(scenario)
    assert world.run().problems == []
    assert EVICTED in {stage for _, stage in moves(world)}


def test_evictions_are_drawn_with_all_that_they_may_meet() -> None:
    drawn = [with_slow_rack(seed, random.Random(seed)) for seed in range(200)]
    evicting = [together(scenario) for scenario in drawn if scenario.evicts]
    assert [together(scenario) for scenario in drawn if not scenario.evicts] == [
        scenario for scenario in drawn if not scenario.evicts
    ]
    for met in (
        [s.cut_step > 0 for s in evicting],
        [s.sharded and s.racks > 2 for s in evicting],
        [bool(s.moments) for s in evicting],
        [s.gone for s in evicting],
        [any(f.kind == "restart" and f.a in (0, 99) for f in s.faults) for s in evicting],
        [s.gone and any(f.kind == "retire" for f in s.faults) for s in evicting],
        [bool(s.cut_step and s.sharded and s.moments) for s in evicting],
    ):
        assert sum(met) >= 4, f"of {len(evicting)}"


def test_drawn_scenarios_include_a_few_with_an_evicted_slow_rack() -> None:
    stories = ((seed, scripted(seed)) for seed in range(400))
    slow = [seed for seed, story in stories if story is not None and story.acts]
    assert 1 <= len(slow) <= 12
    scenario = draw(slow[0])
    assert (scenario.acts, scenario.validates) == (True, True)
