"""Well-formed lies told to machines in the middle of a job, by strangers and by those they trust.

A stranger cannot know an incarnation, each is drawn from 2^62, nor the lineage of a log, a hash
over those of its first members. Whatever a stranger says, what is written and decided stays as it
is, to the byte. The trusted sender of a message may say anything
that fits its type: nothing may be raised, and what is decided is never taken back or replaced.
"""

from __future__ import annotations

import pickle
import random
import struct
import traceback
from typing import Any

from msgspec.structs import replace

from mend.coordination import wire
from mend.coordination.acceptor_host import WitnessFollower
from mend.coordination.coordinator import Coordinator
from mend.coordination.events import Connect, Effect, Heard, Send, Tick
from mend.coordination.messages import Envelope, Hello
from mend.coordination.rank import RankMachine
from mend.errors import WireError
from mend.types import Peer
from tests.fuzz.harness import Target
from tests.fuzz.jobs import JOB, Snapshot, lives, snapshots
from tests.fuzz.mutate import joined, parts_of, tree_mutated
from tests.fuzz.shapes import frame_of, tree_in, tree_of

STRANGER, TRUSTED = 0, 1

_HEAD = struct.Struct("!HB")
"""Number of the snapshot, who speaks; frames follow."""

SERIAL = 2**61
"""Newer than anything that was heard before."""

CONTRADICTS = "stops: contradicts the log"
"""Intended: a record that contradicts the log is a bug of its writer, and stops the reader. What
the writer hears is no record, and never stops it."""

REPEATED = "repeats what its receivers refuse"
"""Intended: the limits of fields are checked by the receiver, so who believes a lie is refused."""


def log_of(machine: Any) -> Any:
    """None: a learner, which keeps no log."""
    if isinstance(machine, RankMachine):
        return None
    return machine.follower.acceptor.log if isinstance(machine, WitnessFollower) else machine.log


def written(machine: Any) -> tuple[object, ...]:
    """All that a machine has been told for good."""
    log = log_of(machine)
    if log is None:
        return (machine.decided, repr(machine.folded))
    return (log.last, log.decided, log.chain(log.last), repr(log.committed), repr(log.appended))


def decided(machine: Any) -> tuple[int, object]:
    """How far the log is decided here, and what names all of it so far."""
    log = log_of(machine)
    if log is None:
        return (machine.decided, tuple(machine.folded.versions))
    return (log.decided, log.chain(log.decided))


def begun(machine: Any) -> bool:
    log = log_of(machine)
    return bool(machine.folded.begun if log is None else log.appended.begun)


class Machines(Target):
    """Up to four messages to one machine in the middle of a job, each followed by a tick."""

    name, inputs = "machines", 100_000

    def __init__(self, seed: int) -> None:
        self.snapshots = snapshots()

    def example(self, rng: random.Random) -> bytes:
        number = rng.randrange(len(self.snapshots))
        who = STRANGER if rng.random() < 0.4 else TRUSTED
        lies = [lie(rng, self.snapshots[number]) for _ in range(rng.choice((1, 1, 2, 4)))]
        return _HEAD.pack(number, who) + joined(lies)

    def take(self, data: bytes) -> str:
        number, who = _HEAD.unpack_from(data)
        snapshot, events = self.snapshots[number], []
        for frame in parts_of(data[_HEAD.size :]):
            try:
                event = heard(snapshot, wire.decode(frame), who, len(events))
            except WireError:
                continue
            if event is not None:
                events.append(event)
        if not events:
            return "not a message, or not its kind"
        return _strange(snapshot, events) if who == STRANGER else _trusted(snapshot, events)


def _strange(snapshot: Snapshot, events: list[Heard]) -> str:
    """As if nothing had been said, and only time had passed."""
    machine, spared = snapshot.machine(), snapshot.machine()
    for at, event in enumerate(events):
        if isinstance(event.body, Hello) and not begun(machine):
            return _unbegun(machine, event, snapshot.now_ns)
        now_ns = snapshot.now_ns + at
        _sendable(machine.handle(event, now_ns) + machine.handle(Tick(), now_ns))
        spared.handle(Tick(), now_ns)
        spared.handle(Tick(), now_ns)
    assert written(machine) == written(spared), "a stranger has changed what is written"
    return "from a stranger"


def _unbegun(machine: Any, event: Heard, now_ns: int) -> str:
    """Before the log begins, a stranger is who it waits for."""
    _sendable(machine.handle(event, now_ns) + machine.handle(Tick(), now_ns))
    return "a hello, before the log begins"


def _trusted(snapshot: Snapshot, events: list[Heard]) -> str:
    machine = snapshot.machine()
    for at, event in enumerate(events):
        index, name = decided(machine)
        try:
            effects = machine.handle(event, snapshot.now_ns + at)
            effects += machine.handle(Tick(), snapshot.now_ns + at)
        except AssertionError as error:
            if _contradicts(error) and not isinstance(machine, Coordinator):
                return CONTRADICTS
            raise
        _goes_on_from(machine, index, name)
        try:
            _sendable(effects)
        except WireError:
            return REPEATED
    return "accepted"


def _goes_on_from(machine: Any, index: int, name: object) -> None:
    """What was decided is so still. A coordinator that was deposed knows what its own voter does,
    and learns the rest again."""
    if isinstance(machine, Coordinator) and not machine.proposer.leading:
        return
    after, again = decided(machine)
    assert after >= index, f"{index} records were decided, now {after}"
    log = log_of(machine)
    if log is None:
        assert isinstance(again, tuple)
        assert isinstance(name, tuple)
        assert all(new >= old for new, old in zip(again, name, strict=False)), "a version fell"
    elif log.reaches(index):
        assert log.chain(index) == name, "what was decided is another record now"


def lie(rng: random.Random, snapshot: Snapshot) -> bytes:
    """What the machine heard or would hear next, with changes; or a message that nobody said."""
    if rng.random() < 0.8:
        frames = snapshot.coming if rng.random() < 0.7 else snapshot.heard or snapshot.coming
        tree = tree_in(rng.choice(frames))
        return frame_of(tree_mutated(rng, tree) if rng.random() < 0.9 else tree)
    _, *rest = tree_of(rng, rng.choice(list(snapshot.senders)))
    return frame_of([JOB, *rest])


def heard(snapshot: Snapshot, envelope: Envelope, who: int, number: int = 0) -> Heard | None:
    """What reaches the machine. None: nobody that it trusts says such things."""
    body: Any = envelope.body
    if hasattr(body, "serial"):
        body = replace(body, serial=SERIAL + number)
    if who == STRANGER:
        return Heard(Peer(envelope.rack, envelope.rank), *strange(envelope.incarnation, body))
    sender = snapshot.senders.get(type(body))
    return Heard(*sender, body) if sender is not None else None


def strange(life: int, body: Any) -> tuple[int, Any]:
    """Incarnation and body without anything that only members know."""
    life = life if life not in lives() else life ^ 1
    guessed = {"lineage": "ab" * 32, "to": life}
    known = {name: guess for name, guess in guessed.items() if hasattr(body, name)}
    return life, replace(body, **known)


def _sendable(effects: list[Effect]) -> None:
    """What a machine says is what its peers can read."""
    for effect in effects:
        if isinstance(effect, Send):
            wire.decode(wire.encode(Envelope("sim", 0, 0, 0, effect.body)))


def _contradicts(error: AssertionError) -> bool:
    """Raised by the fold of the log."""
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if not frame.filename.endswith("mend/errors.py")][-1]
    return last.filename.endswith("consensus/log.py") and last.name in ("take", "_end")


LIES = 1500
"""Messages of one siege."""

LIE_BYTES_MAX = 16 << 10

GROWTH_BYTES_MAX = 256 << 10
"""What a machine may grow by, pickled, under a siege of strangers."""

PEERS_MAX = 128
"""Whom it may open connections to meanwhile: sockets are few."""


class Sieges(Target):
    """Thousands of messages of strangers, one after another, to the same machine.

    An input is the number of a snapshot and the seed of what is said.
    """

    name, inputs = "sieges", 400

    _HEAD = struct.Struct("!HQ")

    def __init__(self, seed: int) -> None:
        self.snapshots = snapshots()

    def example(self, rng: random.Random) -> bytes:
        return self._HEAD.pack(rng.randrange(len(self.snapshots)), rng.getrandbits(64))

    def take(self, data: bytes) -> str:
        number, seed = self._HEAD.unpack(data)
        snapshot, rng = self.snapshots[number], random.Random(seed)
        machine = snapshot.machine()
        kinds = list(snapshot.senders)
        lies = [lie(rng, snapshot) for _ in range(LIES // 10)]
        lies += [frame_of(tree_of(rng, rng.choice(kinds))) for _ in range(LIES // 10)]
        lies = [frame for frame in lies if len(frame) <= LIE_BYTES_MAX]
        size, peers = len(snapshot.pickled), set()
        for at in range(LIES):
            try:
                envelope = wire.decode(lies[at % len(lies)])
            except WireError:
                continue
            envelope = replace(
                envelope, incarnation=rng.getrandbits(62), rack=rng.randrange(65_536)
            )
            event = heard(snapshot, _in_its_own_name(rng, envelope), STRANGER)
            assert event is not None
            effects = machine.handle(event, snapshot.now_ns + at)
            peers |= {effect.peer for effect in effects if isinstance(effect, Connect)}
        grown = len(pickle.dumps(machine)) - size
        assert grown <= GROWTH_BYTES_MAX, f"{type(machine).__name__} has grown by {grown} bytes"
        assert len(peers) <= PEERS_MAX, f"{type(machine).__name__} connects to {len(peers)} peers"
        return "accepted"


def _in_its_own_name(rng: random.Random, envelope: Envelope) -> Envelope:
    """A hello has the sender's rack and life inside, too: every one is somebody else."""
    if not isinstance(envelope.body, Hello):
        return envelope
    hello = envelope.body
    rack = rng.choice((envelope.rack, rng.randrange(4), hello.seat.member.rack))
    member = type(hello.seat.member)(rack, envelope.incarnation)
    body = replace(hello, seat=replace(hello.seat, member=member))
    return replace(envelope, rack=rack % 65_536, body=body)
