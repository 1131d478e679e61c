"""A checker that never speaks proves nothing: each is shown a history that is false."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from mend.consensus.records import Commit, Drop
from mend.coordination import rank_reports
from mend.coordination.rank_reports import Aggregate
from mend.engine.loop.store import Payload
from mend.events.kinds import LeftAlone
from mend.types import MS, SECOND, WITNESS, Member, Peer
from mend_lab.sim import World
from mend_lab.sim.agreement import Agreement, is_held, is_quorum


def problems(world: World) -> str:
    return "\n".join(world.run().problems)


def at(world: World, seconds: float, job: Callable[[], None]) -> None:
    world.loop.at(int(seconds * SECOND), job)


def voter_log(world: World, rack: int) -> object:
    process = world.trainings[Peer(rack, 0)].process
    replicas = world.checkers.agreement.replicas[id(process)][1]
    return next(replica.owner for replica in replicas if replica.votes).log


def test_the_rules_are_those_of_the_protocol() -> None:
    assert is_quorum({0, 1}, {0, 1, 2})
    assert is_quorum({0}, {0, 1})
    assert not is_quorum({1}, {0, 1})
    assert is_quorum({1, WITNESS}, {0, 1, WITNESS})
    assert not is_quorum(set(), set())
    assert is_held({0, 1}, {0, 1, WITNESS})
    assert not is_held({0}, {0, 1, WITNESS}), "1 and the witness are a quorum without it"


def test_a_replica_with_another_decided_record_is_seen() -> None:
    world = World()

    def forge() -> None:
        log = voter_log(world, 1)
        index = log.decided  # type: ignore[attr-defined]
        log._chains[index] = "0" * 64  # type: ignore[attr-defined]

    at(world, 0.9, forge)
    assert "I1: Peer(rack=1, rank=0) has another decided record" in problems(world)


def test_a_decision_that_is_undone_is_seen() -> None:
    world = World()
    process = world.trainings[Peer(1, 0)].process

    def undo() -> None:
        voter_log(world, 1).decided -= 1  # type: ignore[attr-defined]
        world.checkers.agreement.check(process)

    at(world, 0.9, undo)
    assert "undid decisions" in problems(world)


@pytest.mark.parametrize(
    ("asked", "said"),
    [("_votes", "with the votes [1] of [0, 1, 65535]"),
     ("_holders", "held by [1] of [0, 1, 65535] only")],
)  # fmt: skip
def test_decision_without_votes_or_holders_is_seen(
    asked: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Agreement, asked, lambda *_, **__: {1})
    assert said in problems(World())


def test_the_loss_of_all_copies_is_seen() -> None:
    world = World()

    def lose() -> None:
        for training in world.trainings.values():
            training.rank.store.anchors.clear()
            training.rank.store.tentative.clear()
        world.checkers.agreement.check_survivors()

    at(world, 0.9, lose)
    text = problems(world)
    assert "I4: version" in text
    assert "is lost: [0, 1, 65535] live and are a quorum" in text


def test_an_offer_that_ends_twice_is_seen() -> None:
    world = World()
    assert not world.run().problems
    agreement = world.checkers.agreement
    commit = next(record for record in agreement.records if isinstance(record, Commit))
    agreement._end_offers(replace(commit, version=99))
    assert "ends in versions 1 and 99" in world.checkers.problems[0]
    assert world.checkers.problems[0].startswith("I3")


def test_a_rank_that_acts_on_what_nobody_decided_is_seen() -> None:
    world = World()
    process = world.trainings[Peer(0, 0)].process
    at(world, 0.9, lambda: world.checkers.agreement.check_record(process, Drop(0, (), "invented")))
    assert "I1: Peer(rack=0, rank=0) acts on Drop" in problems(world)


def test_bits_that_differ_are_seen() -> None:
    world = World()
    world.checkers.bits[(0, 1, 1)] = "the digest of another rack"
    assert "I1: Peer(rack=0, rank=0) has other bits of fragment 1 version 1" in problems(world)


def test_an_update_that_is_lost_is_seen() -> None:
    world = World()

    def lose() -> None:
        with torch.no_grad():
            world.trainings[Peer(0, 0)].parameters[0].add_(0.01)

    at(world, 1.01, lose)
    assert "I2: Peer(rack=0, rank=0): the ledger of fragment" in problems(world)


def test_tokens_that_are_lost_are_seen() -> None:
    world = World()

    def lose() -> None:
        world.trainings[Peer(0, 0)].trainer.ledger.merged += 1

    at(world, 1.01, lose)
    assert "I2: Peer(rack=0, rank=0): Ledger(merged=" in problems(world)


def test_a_training_thread_that_waits_too_long_is_seen() -> None:
    world = World()
    stalls = world.trainings[Peer(0, 0)].stalls
    at(world, 1.01, lambda: stalls.append((3 * SECOND, SECOND)))
    assert "I5: Peer(rack=0, rank=0) waited 3.00 s in one outage" in problems(world)


@pytest.mark.parametrize("pause_s", [2.5, 6])
def test_a_pause_excuses_who_left_alone_only_if_nobody_waits_so_long(pause_s: float) -> None:
    """All train equally long; at its end a rack waits 4 s."""
    world = World(k=2, witness=False, pauses=((1, 20, int(pause_s * SECOND)),))
    process = world.trainings[Peer(0, 0)].process
    at(world, 1.0, lambda: process.note(LeftAlone((), 0.0)))
    assert ("left alone though a quorum was there" in problems(world)) == (pause_s < 4)


def test_a_queue_without_end_is_seen() -> None:
    world = World()
    rank = world.trainings[Peer(0, 0)].rank

    def fill() -> None:
        for seq in range(1000, 1100):
            rank.store.payloads[rank.member, 0, seq] = Payload(torch.empty(0), "")

    at(world, 1.01, fill)
    assert "I6: Peer(rack=0, rank=0) keeps" in problems(world)


def test_a_wrong_bit_that_is_read_as_a_message_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from mend.coordination import wire

    monkeypatch.setattr(wire.zlib, "crc32", lambda body: 0)  # type: ignore[attr-defined]
    text = problems(World(shutdown_ns=30 * SECOND).flip(0, 90, frames=True, until=1.0))
    assert "with bit" in text
    assert "flipped was read" in text


def test_a_rack_that_does_not_end_is_seen() -> None:
    world = World()
    training = world.trainings[Peer(1, 0)]
    at(world, 0.9, lambda: setattr(training, "_advance", lambda answer: None))
    text = problems(world)
    assert "I4: " in text
    assert "rack 1 rank 0" in text
    assert "did not end" in text


def test_a_quorum_that_does_not_converge_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is broken any more, but the offers of rack 0 do not get out."""
    of_ranks = rank_reports.aggregate

    def silent(member: Member, *of: Any) -> Aggregate:
        found = of_ranks(member, *of)
        return dataclasses.replace(found, offers=()) if member.rack == 0 else found

    monkeypatch.setattr(rank_reports, "aggregate", silent)
    world = World(shutdown_ns=10 * SECOND, step_ns=50 * MS, k=2).cut(0, 1, until=0.01).heal(at=0.1)
    text = problems(world)
    assert "left alone though a quorum was there" in text or "ended with open offers" in text
