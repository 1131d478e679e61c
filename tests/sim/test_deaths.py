"""One process dies, whichever: the others merge again promptly, wherever they may decide at all."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from mend.types import MS, SECOND
from mend_lab.sim import WITNESS, World, draw
from mend_lab.sim.world import DETECT_NS
from tests.noted import pairs
from tests.sim.bugs import NAMED, planted
from tests.sim.runs import noted

DIES_NS = SECOND // 2
WITHIN_NS = SECOND
JOB = {"fragments": 1, "steps": 110, "shutdown_ns": 60 * SECOND}


def decided_ns(world: World) -> list[int]:
    """Times at which the coordinators decided commits."""
    return sorted(at_ns for _, _, at_ns in noted(world, "decided"))


TABLE = [
    pytest.param(racks, witness, dies, marks=[pytest.mark.slow] * (racks > 3))
    for racks in (2, 3, 4, 5)
    for witness in (False, True)
    for dies in sorted({0, 1, racks - 1} | ({WITNESS} if witness else set()))
]
"""The lowest rack coordinates first or breaks ties, rack 1 stands next, the last one is like all
between them."""


@pytest.mark.parametrize(("racks", "witness", "dies"), TABLE)
def test_the_next_commit_comes_within_a_second_behind_detection(
    racks: int, witness: bool, dies: int
) -> None:
    """Two racks and a witness merged nothing for ten minutes after the death of either rack, three
    and a witness after that of rack 0: no result of the others met every quorum."""
    world = World(seed=3, racks=racks, witness=witness, **JOB).crash(dies, at=DIES_NS / SECOND)
    report = world.run()
    noticed_ns = DIES_NS + DETECT_NS
    after = [at for at in decided_ns(world) if at > noticed_ns]
    if (racks, witness, dies) == (2, False, 0):
        assert after == [], "rack 1 alone may decide nothing"
        return
    assert report.problems == []
    assert after[0] - noticed_ns < WITHIN_NS
    assert len(after) > 5, "and so do all others"


def lineages_ns(world: World) -> list[int]:
    return [at_ns for _, _, at_ns in noted(world, "lineage")]


def test_new_lineage_after_the_only_voter_died_waits_for_the_rack_cut_off() -> None:
    """Rack 1 is cut off, so that rack 0 votes alone, and is back when rack 0 has died and was
    started again. Its promise and the witness's are needed: either may hold what nobody else
    does. Nobody stood, as nobody had a vote."""
    world = World(seed=3, racks=2, witness=True, **JOB)
    world.partition(1, at=0.3, until=5.0).restart(0, at=3.5, until=3.8)
    report = world.run()
    assert report.problems == []
    rosters = world.checkers.agreement.rosters
    assert frozenset({0}) in [roster.voters for roster in rosters]
    (begun_ns,) = lineages_ns(world)
    assert begun_ns > 5 * SECOND, "not without rack 1"
    assert sorted(rosters[-2].voters)[:2] == [0, 1], "and all vote again"


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(rack, marks=pytest.mark.slow) for rack in (1, 2))]
)
def test_racks_that_die_one_after_the_other_leave_one_that_goes_on(first: int) -> None:
    """Three racks that vote, then two and the witness, then one; and they come back."""
    second, left = (first + 1) % 3, (first + 2) % 3
    world = World(seed=3, racks=3, witness=True, **{**JOB, "steps": 240})
    world.restart(first, at=0.5, until=13.0).restart(second, at=9.0, until=13.2)
    report = world.run()
    assert report.problems == []
    voters = [set(roster.voters) for roster in world.checkers.agreement.rosters if roster.racks]
    changes = [v for v, before in zip(voters[1:], voters, strict=False) if v != before]
    assert changes[:2] == [{second, left, 0xFFFF}, {left}]
    assert changes[-1] == {0, 1, 2}, "the witness, too, has given its vote back"
    assert len([at for at in decided_ns(world) if 11.5 * SECOND < at < 13 * SECOND]) > 2


@pytest.fixture
def two_without_a_vote(monkeypatch: pytest.MonkeyPatch) -> World:
    """Three racks and a witness, of which rack 0 votes alone. The others are back, and have read
    so, when it dies and is started again."""
    monkeypatch.setattr("mend_lab.sim.world.SEAT_TIMEOUT_NS", 60 * SECOND)
    world = World(seed=3, racks=3, witness=True, **{**JOB, "steps": 320})
    world.partition(2, at=0.5, until=12.2).partition(1, at=9.2, until=12.0)
    return world.restart(0, at=13.0, until=13.4)


def test_new_lineage_needs_promise_from_every_nonvoter(two_without_a_vote: World) -> None:
    world = two_without_a_vote
    assert world.run().problems == []
    rosters = world.checkers.agreement.rosters
    (begun_ns,) = lineages_ns(world)
    assert begun_ns > 13.4 * SECOND
    alone = [number for number, roster in enumerate(rosters) if roster.voters == {0}]
    assert set(rosters[alone[-1] + 1].racks) >= {1, 2}, "none of them is left out"


def test_a_lineage_by_one_of_them_is_found(two_without_a_vote: World) -> None:
    with planted(NAMED["35"]):
        problems = two_without_a_vote.run(first=True).problems
    assert problems
    assert "begins anew without Peer(rack=" in problems[0]


def half_each(steps: int = 80, busy_s: float = 30.0) -> World:
    """Racks 0 and 1 of four die when version 4 of both fragments is decided. Rack 3 still waits for
    an offer of fragment 0, rack 2's worker is busy with fragment 1: each of them lacks a version
    that only the other holds, for some seconds."""
    world = World(
        seed=3, racks=4, witness=False, fragments=2, steps=steps, step_ns=200 * MS, period_steps=10,
        overlap_steps=5, grace_ns=300 * MS, delay_ns=50 * MS, shutdown_ns=60 * SECOND,
    )  # fmt: skip
    world.slow_link(1, 3, 4.0, at=7.55, until=7.85)
    return world.slow_worker(2, busy_s, at=8.4, until=9.35)


def begun_with(world: World) -> list[object]:
    said = sorted((at_ns, fields["versions"]) for _, fields, at_ns in noted(world, "lineage"))
    return [tuple(versions) for _, versions in said]


@pytest.mark.parametrize(("dies", "left", "back"), [(3, (4, 3), "1"), (2, (3, 4), "0")])
def test_second_death_within_a_copy_undoes_a_version_by_name_and_all_fragments_go_on(
    dies: int, left: tuple[int, int], back: str
) -> None:
    """The lower of two racks was a quorum of the lineage, without one of its versions: that
    fragment was never merged again, and nobody said so."""
    world = half_each().restart(0, at=9.4, until=9.9).restart(1, at=9.4, until=9.9)
    report = world.restart(dies, at=13.0, until=14.0).run()
    assert report.problems == []
    assert begun_with(world) == [(4, 4), left]
    ((process, said, _),) = noted(world, "undone")
    assert process.me.rack == 5 - dies
    assert said["back"] == [f"fragment {back} from version 4 to 3"]
    assert said["dead"] == [0, 1, dies]
    ends = {
        tuple(t.anchor.version for t in of.trainer.fragment_states)
        for of in world.trainings.values()
    }
    (versions,) = ends
    assert min(versions) > 8
    assert all(of.trainer.open_tokens() == 0 for of in world.trainings.values())


def test_second_death_for_good_stops_the_merges_until_a_person_attests_it() -> None:
    world = half_each().restart(0, at=9.4, until=9.9).restart(1, at=9.4, until=9.9)
    report = world.crash(3, at=13.0).retire(3, at=18.0).run()
    assert report.problems == []
    assert begun_with(world) == [(4, 4), (4, 3)]
    after = [at for at in decided_ns(world) if at > 12 * SECOND]
    assert after[0] > 18 * SECOND
    assert len(after) > 5


def test_bug_that_half_of_such_a_lineage_decides_is_seen() -> None:
    world = half_each().restart(0, at=9.4, until=9.9).restart(1, at=9.4, until=9.9)
    with planted(NAMED["45"]):
        problems = world.restart(3, at=13.0, until=14.0).run(first=True).problems
    assert problems
    assert problems[0].startswith("I4: version 4 of fragment 1 is lost: [2] live and are a quorum")


@pytest.mark.parametrize("bug", [None, "45b"])
def test_lineage_of_racks_that_have_copied_decides_with_a_quorum_again(bug: str | None) -> None:
    """Racks 0 and 1 never come back, so that no other roster follows. Rack 3 may die later."""
    world = half_each(steps=200, busy_s=5.0).crash(0, at=9.4).crash(1, at=9.4).crash(3, at=26.0)
    world.retire(0, at=10.0).retire(1, at=10.0)
    with planted(NAMED[bug]) if bug else nullcontext():
        world.run()
    assert begun_with(world) == [(4, 4)]
    later = [at for at in decided_ns(world) if at > 29 * SECOND]
    assert bool(later) == (bug is None)


@pytest.mark.parametrize("racks", [2, 3])
@pytest.mark.parametrize("back_s", [0.05, 3.0])
def test_all_racks_die_and_the_witness_begins_one_other_job_and_says_so(
    racks: int, back_s: float
) -> None:
    """Nobody could start under that name any more. `World` asks for the rest: that every rack has
    a seat, in a job that merges all it trains."""
    world = World(seed=3, racks=racks, fragments=1, steps=60, shutdown_ns=60 * SECOND)
    for rack in range(racks):
        dies_s = 1 + rack / 5
        world.restart(rack, at=dies_s, until=dies_s + back_s)
    report = world.heal(at=8).run()
    assert report.problems == []
    assert world.witness is not None
    said = [kind for kind, _ in pairs(world.witness.notes) if kind in ("genesis", "gives-up")]
    assert said == ["genesis", "gives-up", "genesis"]
    assert all(training.trainer.open_tokens() == 0 for training in world.trainings.values())


@pytest.mark.parametrize("name", ["36", "36b"])
def test_a_bug_in_giving_up_is_seen_where_all_racks_die(name: str) -> None:
    world = World(seed=3, fragments=1, steps=60, shutdown_ns=60 * SECOND)
    for rack in range(2):
        world.restart(rack, at=1 + rack / 5, until=4 + rack / 5)
    with planted(NAMED[name]):
        assert world.heal(at=8).run(first=True).problems


@pytest.mark.parametrize("bug", ["38", None])
def test_rack_that_hears_of_a_lineage_not_decided_yet_loses_its_seat(bug: str | None) -> None:
    """In seed 13784 a lineage undoes a version while the only other rack is cut off."""
    world = World(draw(13784))
    with planted(NAMED[bug]) if bug else nullcontext():
        assert world.run().problems == []
    assert len(noted(world, "seat-lost")) == (1 if bug else 0)
