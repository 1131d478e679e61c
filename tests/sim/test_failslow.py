"""A simulated rack that becomes slow is named, and no other; a replay comes to the same verdict."""

from __future__ import annotations

from typing import Any

import pytest

from mend.coordination.slow import OWN_PAST, PEERS
from mend.engine.features.micro_benchmark import MicroBenchmark
from mend.types import MS, SECOND
from mend_lab.sim import World
from mend_lab.sim.scenario import Fault, Scenario, calm
from tests.noted import pairs
from tests.sim.runs import assert_replays, noted, run_with_verdicts

ONSET, RELIEF, CAUSE = "fail-slow", "fail-slow-over", "fail-slow-cause"
LINK_ONSET, LINK_RELIEF = "slow-link", "slow-link-over"
STEP_NS = 50 * MS
BEGINS_NS, ENDS_NS = 5 * SECOND, 12 * SECOND
SLOWER = 3
STEPS = 240


def slowed(racks: int, faults: tuple[Fault, ...], **more: Any) -> Scenario:
    return calm(
        racks=racks, steps=STEPS, step_ns=STEP_NS, period_steps=16, overlap_steps=4, faults=faults,
        **more,
    )  # fmt: skip


def onsets(world: World, kind: str = ONSET) -> list[tuple[int, object, object]]:
    """(who says it, rack, against), in the order of processes."""
    return [(p.me.rack, f["slow_rack"], f.get("against")) for p, f, _ in noted(world, kind)]


def verdicts(world: World) -> dict[int, set[tuple[int, bool]]]:
    """Rack -> the verdicts that its status has shown at any time."""
    return run_with_verdicts(world, lambda v: [(v.rack, v.own_past)])


def test_a_rack_that_becomes_slow_is_named_by_itself_and_shown_to_all() -> None:
    world = World(slowed(2, (Fault("slow_rack", BEGINS_NS, ENDS_NS, 1, amount=SLOWER),)))
    shown = verdicts(world)
    assert onsets(world) == [(1, 1, OWN_PAST)], "two racks have no peers"
    assert onsets(world, RELIEF) == [(1, 1, OWN_PAST)]
    assert shown == {0: {(1, True)}, 1: {(1, True)}}
    (fields,) = [f for p in world.processes() for kind, f in pairs(p.notes) if kind == ONSET]
    begins = BEGINS_NS // STEP_NS
    assert begins - 5 <= int(str(fields["since_step"])) <= begins + 2
    assert int(str(fields["step"])) <= begins + 20, "the tokens of a step are 1 to 5 here"
    assert float(str(fields["ratio"])) > 2


def test_a_rack_that_is_slow_from_the_start_is_named_by_its_peers() -> None:
    world = World(slowed(3, (Fault("slow_rack", 0, 1 << 62, 2, amount=SLOWER),)))
    shown = verdicts(world)
    assert {(rack, against) for _, rack, against in onsets(world)} == {(2, PEERS)}
    assert all(verdicts == {(2, False)} for verdicts in shown.values())


def test_equal_racks_are_not_named() -> None:
    world = World(slowed(3, ()))
    assert set().union(*verdicts(world).values()) == set()
    assert onsets(world) == []


@pytest.mark.slow
def test_the_same_seed_and_a_replay_come_to_the_same_verdicts() -> None:
    faults = (Fault("slow_rack", BEGINS_NS, ENDS_NS, 1, amount=SLOWER),)
    worlds = [World(slowed(3, faults), record=record) for record in (True, False)]
    for world in worlds:
        world.run()
    notes = [
        [[note for note in pairs(p.notes) if note[0] in (ONSET, RELIEF)] for p in world.processes()]
        for world in worlds
    ]
    assert notes[0] == notes[1]
    assert any(notes[0])
    assert_replays(worlds[0])


def test_a_verdict_is_validated_and_shown_with_its_cause_to_all() -> None:
    """In the simulator a slow rack computes slowly; the links are as they were."""
    faults = (Fault("slow_rack", BEGINS_NS, ENDS_NS, 1, amount=SLOWER),)
    world = World(slowed(3, faults, validates=True), record=True)
    by_rack = run_with_verdicts(world, lambda v: [(v.rack, v.cause)] * v.own_past)
    shown = set().union(*by_rack.values())
    (about,) = [
        fields for p in world.processes() for kind, fields in pairs(p.notes) if kind == CAUSE
    ]
    assert (about["slow_rack"], about["slow_rank"], about["cause"]) == (1, 0, "compute")
    assert about["gemm_ratio"] == SLOWER
    lanes = about["lane_ratios"]
    assert isinstance(lanes, dict)
    assert sorted(lanes) == ["0", "2"]
    assert shown == {(1, ""), (1, "compute")}
    assert_replays(world)


def test_a_link_that_becomes_slow_is_named_though_no_step_takes_longer() -> None:
    """By the ranks at its ends, to all; a replay comes to the same verdicts."""
    faults = (Fault("slow_link", BEGINS_NS, ENDS_NS, 0, 1, amount=90 * MS),)
    scenario = calm(
        racks=2, steps=240, step_ns=STEP_NS, period_steps=8, overlap_steps=4, delay_ns=30 * MS,
        fragments=2, faults=faults,
    )  # fmt: skip
    world = World(scenario, record=True)
    shown = run_with_verdicts(world, lambda v: [(v.rack, v.link_to, v.of_link)])
    for kind in (LINK_ONSET, LINK_RELIEF):
        ends = [(p.me.rack, f["from_rack"], f["to_rack"]) for p, f, _ in noted(world, kind)]
        assert sorted(ends) == [(0, 1, 0), (1, 0, 1)], kind  # type: ignore[type-var]
    assert onsets(world) == [], "every step takes what it took"
    links = {(0, 1, True), (1, 0, True)}
    assert shown == dict.fromkeys(range(2), links)
    assert_replays(world)


def test_nothing_is_measured_where_verdicts_are_not_validated() -> None:
    faults = (Fault("slow_rack", BEGINS_NS, ENDS_NS, 1, amount=SLOWER),)
    world = World(slowed(2, faults))
    world.run()
    assert onsets(world)
    assert not onsets(world, CAUSE)
    features = [p.trainer.trainer.features for p in world.processes() if p.trainer is not None]
    assert not any(isinstance(each, MicroBenchmark) for own in features for each in own)
