"""Every kind of fault really happens: it is felt where it bites, and the job bears it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mend.errors import Diverged
from mend.types import MS, SECOND, Peer
from mend_lab.sim import WITNESS, SimulationReport, World
from mend_lab.sim.faults import KINDS
from mend_lab.sim.process import Training
from tests.noted import pairs

LONG = {"steps": 36, "step_ns": 50 * MS, "shutdown_ns": 40 * SECOND}


Break = Callable[[World], World]

BREAKS: dict[str, Break] = {
    "cut": lambda w: w.cut(0, 1, at=0.4, until=0.9),
    "partition": lambda w: w.partition(0, WITNESS, at=0.4, until=0.9),
    "lossy": lambda w: w.lose(50, 0, 1, at=0.2, until=1.5).lose(30, at=1.0, until=1.5),
    "shuffle": lambda w: w.shuffle(0.3, at=0.2, until=1.5),
    "slow_link": lambda w: w.slow_link(0, WITNESS, 0.2, at=0.2, until=1.0),
    "freeze": lambda w: w.freeze(1, at=0.4, until=0.9),
    "slow_rack": lambda w: w.slow_rack(1, 3, at=0.2, until=1.0),
    "slow_worker": lambda w: w.slow_worker(0, 0.2, at=0.2, until=1.0),
    "flip_bytes": lambda w: w.flip(0, 60, at=0.2, until=1.5),
    "flip_frames": lambda w: w.flip(1, 50, frames=True, at=0.2, until=1.5),
    "nan": lambda w: w.spoil(2, at=0.2, until=1.5),
    "huge": lambda w: w.spoil(2, huge=True, at=0.2, until=1.5),
    "clock_jump": lambda w: w.clock(0, 1.5, at=0.7),
    "clock_drift": lambda w: w.drift(1, 10_000, at=0.1, until=1.5),
    "crash": lambda w: w.crash(2, at=0.7),
    "restart": lambda w: w.restart(2, at=0.7, until=1.2),
    "stale": lambda w: w.restart(2, at=0.7, until=1.2).stale(2, until=1.4),
    "retire": lambda w: w.crash(2, at=0.7).retire(2, at=1.2),
}


WITH = {"stale": ("restart",), "retire": ("crash",)}
"""What a kind needs to be felt."""


def run(world: World) -> SimulationReport:
    report = world.run()
    assert not report.problems, report.problems
    return report


def job() -> World:
    return World(seed=3, racks=3, **LONG)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_of_every_kind_is_felt_and_borne(kind: str) -> None:
    world = BREAKS[kind](job())
    assert {fault.kind for fault in world.scenario.faults} == {kind, *WITH.get(kind, ())}
    report = run(world.heal(at=1.6))
    assert report.felt[kind] > 0, report.felt
    felt = {name for name, count in report.felt.items() if count}
    assert felt <= {kind, *WITH.get(kind, ())}, report.felt
    assert report.commits > 5
    assert report.finished


def test_loss_and_doubles_of_the_whole_network_are_felt() -> None:
    felt = run(World(seed=3, loss=0.2, duplicate=0.2, jitter_ns=60 * MS, **LONG)).felt
    assert felt["loss"] > 20
    assert felt["duplicate"] > 20


def test_healed_faults_have_no_further_effect() -> None:
    world = World(loss=0.3).cut(0, 1).lose(90).freeze(1, at=0.5).slow_rack(0, 4).heal(at=0.7)
    report = run(world)
    assert world.broken.active == {}
    sent = world.broken.felt.copy()
    assert not world.broken.silent(0, 1)
    assert not any(world.broken.loses(0, 1) for _ in range(100))
    assert world.broken.felt == sent
    assert all(training.trainer.step == 24 for training in world.trainings.values())
    assert report.commits


def test_a_wrong_bit_in_a_payload_is_found_and_it_is_fetched_again() -> None:
    """Every second transfer from rack 0 is wrong; the others still merge what it trained."""
    world = World(seed=3, **LONG).flip(0, 50, at=0.1, until=1.5).heal(at=1.6)
    report = run(world)
    notes = [
        note for training in world.trainings.values() for note in pairs(training.process.notes)
    ]
    found = [fields["error"] for kind, fields in notes if kind in ("fetch-failed", "copy-failed")]
    assert any("ChecksumMismatch" in error for error in found), found
    merged = [m.rack for f in world.checkers.commits.values() for m in f.members]
    assert 0 in merged
    assert report.felt["flip_bytes"] > 0


@pytest.mark.parametrize(
    ("merge", "ranks"),
    [
        ("mean", 1),
        ("rda", 2),
        pytest.param("mean", 2, marks=pytest.mark.slow),
        pytest.param("rda", 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("huge", [False, True])
@pytest.mark.parametrize("lockstep", [False, True])
def test_a_rack_that_sends_no_numbers_ends_and_the_others_go_on(
    merge: str, ranks: int, huge: bool, lockstep: bool
) -> None:
    """Its own check has seen nothing and its checksums are right. Every rack was NaN one round
    later, and all of them ended in order."""
    fields = {"racks": 3, "ranks": ranks, "merge": merge, "lockstep": lockstep}
    world = World(seed=3, **fields, **LONG).spoil(1, huge=huge, at=0.7).heal(at=1.6)
    report = run(world)
    assert report.commits > 8
    for peer, training in world.trainings.items():
        if peer.rack != 1:
            assert training.failure is None
            assert training.trainer.open_tokens() == 0
            continue
        assert isinstance(training.failure, Diverged)
        assert "rack 1 has diverged: its payload holds" in str(training.failure)
    (note, *_) = [f for p in world.processes() for kind, f in pairs(p.notes) if kind == "drop"]
    assert note["racks"] == [1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rack_whose_weights_jump_ends_though_all_numbers_are_finite(ranks: int) -> None:
    """1e5 is a number like any other; beside what was merged before it is an absurd one."""
    world = World(seed=3, racks=3, ranks=ranks, steps=60, shutdown_ns=40 * SECOND)
    jumped = False

    def jump(moment: str, training: Training) -> None:
        nonlocal jumped
        if moment == "before" and training.process.me.rack == 1 and training.trainer.step == 40:
            training.parameters[0].data.add_(1e5)
            jumped = True
        world.checkers.watch(moment, training)

    for training in world.trainings.values():
        training._watch = jump
    report = world.run()
    assert jumped
    wrong = [text for text in report.problems if "which is healthy" not in text]
    assert wrong == []
    for peer, training in world.trainings.items():
        assert isinstance(training.failure, Diverged) == (peer.rack == 1)
        if peer.rack == 1:
            assert "its weights moved by" in str(training.failure)
        else:
            assert training.trainer.fragment_states[0].anchor.values.abs().max() < 10


def test_a_fault_waits_for_its_message_and_strikes_between_two_sends() -> None:
    """The witness dies right behind its fifth Orders: of one state, some racks hear, some not."""
    world = job().crash(WITNESS, after=("Orders", 5))
    heard: list[int] = []
    send = world.network.send

    def count(sender: int, address: str, envelope: object, kind: str) -> None:
        heard.append(world.loop.now_ns)
        send(sender, address, envelope, kind)  # type: ignore[arg-type]

    world.network.send = count  # type: ignore[method-assign,assignment]
    report = run(world)
    assert report.felt["crash"] == 1
    assert world.witness is not None
    assert world.witness.dead
    struck = [when_ns for when_ns, text in world.broken.struck if "crashes" in text]
    assert len(struck) == 1
    assert struck[0] in heard, "it strikes with the send, not at a time of its own"


def test_one_rank_dies_first_and_whoever_started_the_rack_ends_the_rest() -> None:
    world = World(seed=3, racks=3, ranks=2, **LONG).crash(1, rank=1, rest_s=0.5, at=0.7)
    report = run(world)
    assert report.felt["crash"] == 2
    assert world.trainings[Peer(1, 0)].process.dead
    assert world.trainings[Peer(1, 1)].process.dead
    died = [w for w, text in world.broken.struck if text == "rank 1 of rack 1 crashes"]
    assert died == [7 * SECOND // 10]


def test_a_restarted_rack_is_another_member_with_no_memory() -> None:
    world = job().restart(1, at=0.7, until=1.2)
    first = world.trainings[Peer(1, 0)]
    run(world)
    second = world.trainings[Peer(1, 0)]
    assert second is not first
    assert first.process.dead
    assert first.process in world.past
    assert second.process.member.incarnation != first.process.member.incarnation
    assert second.process.member.rack == 1


def test_clocks_go_their_own_way() -> None:
    world = World(seed=1).drift(0, 10_000, at=0.0, until=10.0).clock(1, 2.0, at=0.5)
    process = world.trainings[Peer(0, 0)].process
    jumped = world.trainings[Peer(1, 0)].process
    before, before_jump = process.now_ns(), jumped.now_ns()
    run(world)
    passed_ns = world.loop.now_ns
    gained_ns = process.now_ns() - before - passed_ns
    assert passed_ns * 0.009 < gained_ns <= passed_ns * 0.01
    assert jumped.now_ns() - before_jump - passed_ns == 2 * SECOND


def test_the_world_stops_where_a_machine_falls_over_and_says_where() -> None:
    world = World()

    def fall(peer: object, incarnation: object, body: object) -> None:
        raise AssertionError("it contradicts the log")

    host = world.trainings[Peer(0, 0)].process.host
    assert host is not None
    host.heard = fall  # type: ignore[method-assign]
    report = world.run()
    assert report.problems[0].startswith("AssertionError: it contradicts the log (test_faults.py:")
    assert not report.finished
