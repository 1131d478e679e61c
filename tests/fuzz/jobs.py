"""Small simulated jobs that are listened to: real frames, and machines in the middle of them."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from mend.coordination import wire
from mend.coordination.acceptor_host import WitnessFollower
from mend.coordination.coordinator import Coordinator
from mend.coordination.events import Effect, Event, Heard
from mend.coordination.leader import Leader
from mend.coordination.messages import Envelope
from mend.coordination.rank import RankMachine
from mend.types import Peer
from mend_lab.sim import World

MACHINES: tuple[type, ...] = (RankMachine, Leader, Coordinator, WitnessFollower)

JOB = "sim"
"""What simulated jobs are called."""

SEEDS = (0, 3, 7, 23)
"""Jobs with and without witness, faults, rda, and several ranks."""

SNAPSHOT_EVERY = 60
"""Calls of one machine."""

HEARD_KEPT, COMING_KEPT = 8, 8
"""Frames that are kept with a snapshot: what this machine heard before it, and next."""


@dataclass
class Snapshot:
    """A machine in the middle of a job. `heard`: frames that it took, `coming`: those it would."""

    kind: type
    pickled: bytes
    now_ns: int
    heard: list[bytes]
    coming: list[bytes]
    senders: dict[type, tuple[Peer, int]]
    """(peer, incarnation) that this machine hears a kind of message from."""

    def machine(self) -> Any:
        return pickle.loads(self.pickled)


_HANDLED_MAX = 2000
_handled: list[tuple[str, int, Event, list[Effect]]] = []


@dataclass
class _Ear:
    calls: int = 0
    heard: list[bytes] = field(default_factory=list)
    snapshot: Snapshot | None = None
    senders: dict[type, tuple[Peer, int]] = field(default_factory=dict)


Handle = Callable[[Any, Event, int], list[Effect]]


@contextmanager
def _listening(found: list[Snapshot]) -> Iterator[None]:
    """Every machine of the process tells what it hears, and is copied now and then."""
    ears: dict[int, _Ear] = {}
    kept: list[Any] = []  # so that no identity is used twice
    before: dict[type, Handle] = {kind: kind.handle for kind in MACHINES}

    def listened(kind: type, handle: Handle) -> Handle:
        def wrapped(self: Any, event: Event, now_ns: int) -> list[Effect]:
            if id(self) not in ears:
                kept.append(self)
            ear = ears.setdefault(id(self), _Ear())
            if ear.calls % SNAPSHOT_EVERY == 0:
                copied = pickle.dumps(self)
                ear.snapshot = Snapshot(kind, copied, now_ns, ear.heard[:], [], ear.senders)
                found.append(ear.snapshot)
            ear.calls += 1
            if isinstance(event, Heard):
                peer, life = event.peer, event.incarnation
                ear.senders[type(event.body)] = (peer, life)
                frame = wire.encode(Envelope(JOB, peer.rack, peer.rank, life, event.body))
                ear.heard = [*ear.heard[1 - HEARD_KEPT :], frame]
                if ear.snapshot is not None and len(ear.snapshot.coming) < COMING_KEPT:
                    ear.snapshot.coming.append(frame)
            effects = handle(self, event, now_ns)
            if len(_handled) < _HANDLED_MAX:
                _handled.append((kind.__name__.lower(), now_ns, event, effects))
            return effects

        return wrapped

    for kind, handle in before.items():
        kind.handle = listened(kind, handle)
    try:
        yield
    finally:
        for kind, handle in before.items():
            kind.handle = handle


@functools.cache
def snapshots() -> tuple[Snapshot, ...]:
    """Of all machines of a few jobs, from their first event to their last."""
    torch.set_num_threads(1)
    found: list[Snapshot] = []
    with _listening(found):
        for seed in SEEDS:
            World(seed).run()
    return tuple(snapshot for snapshot in found if snapshot.coming)


def handled() -> list[tuple[str, int, Event, list[Effect]]]:
    """The first events of these jobs, each with its machine's name, the time and the answer."""
    assert snapshots(), "no job was listened to"
    return _handled


@functools.cache
def lives() -> frozenset[int]:
    """The incarnations of all who spoke in these jobs: what a stranger cannot guess."""
    return frozenset(wire.decode(frame).incarnation for frame in _frames())


@functools.cache
def _frames() -> tuple[bytes, ...]:
    return tuple(dict.fromkeys(f for each in snapshots() for f in each.heard + each.coming))


def frames_heard() -> list[bytes]:
    """Distinct frames of these jobs, those that are small enough to be changed often."""
    return [frame for frame in _frames() if len(frame) <= 4096]
