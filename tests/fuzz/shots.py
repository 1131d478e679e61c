"""Whole simulated jobs that strangers shoot at: they end as if nobody had."""

from __future__ import annotations

import dataclasses
import random
import struct
from typing import Any

import torch
from msgspec.structs import replace

from mend.coordination import wire
from mend.coordination.messages import Envelope
from mend.errors import WireError
from mend_lab.sim import Scenario, World, draw
from tests.fuzz.harness import Target
from tests.fuzz.jobs import lives
from tests.fuzz.mutate import tree_mutated
from tests.fuzz.shapes import frame_of, tree_in, tree_of

SHOTS_PER_FRAME = 0.5
"""Of strangers, for every frame of the job; none before the log has begun, see `machines`."""

_SEED = struct.Struct("!HQ")


PERIODS = 4
"""Of a job, at most: several inputs say more than one long job."""


def quiet(seed: int) -> Scenario:
    """In lockstep what is decided does not depend on when anything arrives."""
    drawn = draw(seed)
    steps = tuple(min(each, PERIODS * drawn.period_steps) for each in drawn.steps)
    return dataclasses.replace(
        drawn, steps=steps, lockstep=True, faults=(), non_finite=(), loss=0.0, duplicate=0.0
    )


class Shots(Target):
    """An input is the seed of a job and the seed of what is shot at it."""

    name, inputs = "shots", 300

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self._spared: dict[int, object] = {}

    def example(self, rng: random.Random) -> bytes:
        return _SEED.pack(rng.randrange(40), rng.getrandbits(64))

    def take(self, data: bytes) -> str:
        job, seed = _SEED.unpack(data)
        if job not in self._spared:
            self._spared[job] = _decided(World(quiet(job)))
        world = World(quiet(job))
        Shooter(world, random.Random(seed))
        assert _decided(world) == self._spared[job], "the job has ended otherwise"
        return "accepted"


class Shooter:
    """Stands beside the network: for a frame that is sent, a lie about it may be sent, too."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.network, self.rng = world.network, rng
        self._send = world.network.send
        world.network.send = self.send

    def send(self, sender: int, address: str, envelope: Envelope, kind: str) -> None:
        self._send(sender, address, envelope, kind)
        target = self.network.where.get(address)
        if target is None or self.rng.random() >= SHOTS_PER_FRAME or not _begun(target.host):
            return
        shot = self._shot(envelope)
        if shot is not None:
            target.receive(shot)

    def _shot(self, envelope: Envelope) -> Envelope | None:
        rng = self.rng
        tree = tree_in(wire.encode(envelope))
        tree = tree_mutated(rng, tree) if rng.random() < 0.7 else tree_of(rng, type(envelope.body))
        try:
            shot = wire.decode(frame_of(tree))
        except WireError:
            return None
        body: Any = shot.body
        if hasattr(body, "serial"):
            body = replace(body, serial=2**61)
        life = rng.getrandbits(61) | 1 << 61
        rack = envelope.rack if rng.random() < 0.8 else shot.rack
        rank = envelope.rank if rng.random() < 0.8 else shot.rank
        return replace(shot, rack=rack, rank=rank, incarnation=life - (life in lives()), body=body)


def _begun(host: Any) -> bool:
    """Whether all machines of a process have read the log's first record."""
    if not hasattr(host, "rank_machine"):
        return bool(host.coordinator.log.appended.begun)
    logs = [each.log for each in (host.leader, host.coordinator) if each is not None]
    return bool(host.rank_machine.folded.begun) and all(log.appended.begun for log in logs)


def _decided(world: World) -> object:
    report = world.run()
    assert not report.problems, report.problems
    commits = world.checkers.commits.values()
    return sorted((c.fragment, c.version, str(c.members), str(c.digests)) for c in commits)
