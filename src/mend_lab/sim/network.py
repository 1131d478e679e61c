"""Frames and pulls between simulated processes, with the losses, duplicates, delays, cuts and wrong
bits of `faults`."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mend.coordination import wire
from mend.coordination.messages import Envelope
from mend.errors import (
    AddressInUse,
    ChecksumMismatch,
    PayloadGone,
    PeerUnreachable,
    TransferStalled,
    WireError,
)
from mend.transport.asking import Asked, ask_around, most_telling, no_holder
from mend.transport.bulk_wire import checksum_of
from mend.transport.security import Secrets
from mend.types import MS, SECOND, Address, Extent, Meter
from mend_lab.sim.faults import Broken, target
from mend_lab.sim.loop import Loop
from mend_lab.sim.scenario import Scenario
from mend_lab.sim.scripted_faults import PULLED

if TYPE_CHECKING:
    from mend_lab.sim.process import Process

Pull = tuple[bytes, str, memoryview, Extent | None, Meter | None]
"""Key, checksum, where the bytes go, their extent, and the meter of a fetch."""

STALL_NS = 1 * SECOND
WIRE_CHECKED_ONE_IN = 8
"""One frame in so many is really encoded and decoded; for all of them it would cost too much."""

STREAMS_ONE_IN = 4
"""In one scenario of so many, states travel as patches, as they do between real processes."""

STATE_KEY = b"t"
"""What the keys of training states begin with (`training_state_key`)."""

METER_NS = 100 * MS
"""Time between two counts of the bytes of a pull that takes longer."""

INSIDE_NS = MS // 10
"""Delay between two processes of a rack."""

EARLY_FRAMES_MAX = 64
"""Frames that wait for a process at an address; the live transport keeps as many for a peer."""


def broken_waits(broken: Broken, address: str) -> bool:
    """Whether frames for the dead process at `address` wait there."""
    rack, _, _ = address.removeprefix("tcp://sim:").partition("-")
    return broken.waits(target(int(rack)))


class Network:
    """`where` maps addresses to processes; a crashed process is no longer found."""

    def __init__(
        self, loop: Loop, scenario: Scenario, rng: random.Random, broken: Broken | None = None
    ) -> None:
        self.loop, self.scenario, self.rng = loop, scenario, rng
        self.broken = broken or Broken(loop, rng)
        self.where: dict[str, Process] = {}
        self.lanes: dict[Address, Process] = {}
        self.secrets: dict[int, Secrets] = {}
        """Target -> the secrets of its newest life; empty: the job has no key."""
        self.kept: dict[str, deque[Envelope]] = {}
        """Frames that wait for the next life at an address."""
        self.frames = 0
        self.streams = scenario.seed % STREAMS_ONE_IN == 0
        self.unread = 0
        """Patches of states that had not arrived."""
        self.missed: list[str] = []
        """Frames with a wrong bit that were read as a message; there must be none."""

    def send(self, sender: int, address: str, envelope: Envelope, kind: str) -> None:
        """`kind`: the name of the message, which a fault may wait for. Frames inside a rack arrive
        after INSIDE_NS; the faults apply to frames between racks."""
        receiver = self.where.get(address)
        here = target(sender)
        if receiver is not None:
            self.frames += 1
            if self.frames % WIRE_CHECKED_ONE_IN == 0:
                envelope = wire.decode(wire.encode(envelope))
            if sender == receiver.me.rack:
                self._deliver(receiver, envelope, INSIDE_NS)
            else:
                self._send_far(here, target(receiver.me.rack), receiver, envelope)
        elif broken_waits(self.broken, address):
            self._keep(address, envelope)
        self.broken.sent(here, kind)

    def _keep(self, address: str, envelope: Envelope) -> None:
        self.kept.setdefault(address, deque(maxlen=EARLY_FRAMES_MAX)).append(envelope)

    def enter(self, process: Process) -> None:
        """A process listens, and first hears the frames that waited for its former life. Raises
        AddressInUse where that still listens."""
        if process.address in self.where:
            raise AddressInUse(
                f"sideband: {process.address} is taken. End the process that has it."
            )
        self.where[process.address] = process
        self.lanes[process.lane] = process
        for envelope in self.kept.pop(process.address, ()):
            self.broken.felt["stale"] += 1
            self._deliver(process, envelope, INSIDE_NS)

    def leave(self, process: Process) -> None:
        """A process stops listening."""
        self.where.pop(process.address, None)
        self.lanes.pop(process.lane, None)

    def _send_far(self, here: int, there: int, receiver: Process, envelope: Envelope) -> None:
        broken = self.broken
        if broken.silent(here, there) or broken.loses(here, there):
            return
        if self.secrets and self.secrets[here].named(self.secrets[there].own.name) is None:
            broken.felt["keys"] += 1  # the server's key is not one that this client has
            return
        if broken.flips("flip_frames", here) and not self._survives_a_flip(envelope):
            return
        for _ in range(2 if broken.doubles() else 1):
            self._deliver(receiver, envelope, broken.delay_ns(here, there))

    def _deliver(self, receiver: Process, envelope: Envelope, delay_ns: int) -> None:
        def arrive() -> None:
            if receiver.dead and broken_waits(self.broken, receiver.address):
                self._keep(receiver.address, envelope)
            else:
                receiver.receive(envelope)

        self.loop.at(self.loop.now_ns + delay_ns, arrive)

    def _survives_a_flip(self, envelope: Envelope) -> bool:
        """Flip one bit of the frame, which the decoder must refuse."""
        frame = bytearray(wire.encode(envelope))
        bit = self.rng.randrange(8 * len(frame))
        frame[bit // 8] ^= 1 << bit % 8
        try:
            read = wire.decode(bytes(frame))
        except WireError:
            return False
        self.missed.append(f"a {type(envelope.body).__name__} with bit {bit} flipped was read")
        return read == envelope

    def fetch(
        self,
        asker: Process,
        holders: Sequence[Address],
        key: bytes,
        checksum: str,
        into: memoryview,
        done: Callable[[Exception | None], None],
        extent: Extent | None = None,
        meter: Meter | None = None,
    ) -> None:
        """Ask the holders as the lane does; a cut link costs a stall timeout.

        A payload is compared with its checksum, a state (without a checksum) is verified by its
        reader. A slice has only the digests of its chunks, which show changes on the way.
        """
        flat = into.cast("B")
        if not flat.nbytes or not holders:
            error = no_holder(key) if flat.nbytes else None
            asker.later(0, lambda: done(error))
            return
        asking = ask_around(holders)

        def ask(asked: Asked | None) -> None:
            try:
                holder = next(asking) if asked is None else asking.send(asked)
            except StopIteration as ended:
                done(most_telling(ended.value, key) if ended.value else None)
                return
            self._attempt(asker, holder, (key, checksum, flat, extent, meter), ask)

        ask(None)

    def _attempt(
        self, asker: Process, holder: Address, pull: Pull, ended: Callable[[Asked], None]
    ) -> None:
        """Pull everything from one holder."""
        broken, here, (key, checksum, into, extent, meter) = (
            self.broken,
            target(asker.me.rack),
            pull,
        )
        process = self.lanes.get(holder)
        if process is None:
            asker.later(0, lambda: ended(Asked(PeerUnreachable("its process is gone"))))
            return
        there = target(process.me.rack)
        if broken.silent(there, here) or broken.silent(here, there) or process.frozen():
            asker.later(STALL_NS, lambda: ended(Asked(TransferStalled("no byte"))))
            return
        if self.secrets and self.secrets[there].named(self.secrets[here].own.name) is None:
            broken.felt["keys"] += 1
            asker.later(0, lambda: ended(Asked(PeerUnreachable("it has another key"))))
            return
        if key.startswith(STATE_KEY):
            broken.sent(there, PULLED)
        time_ns = INSIDE_NS
        if here != there:
            time_ns = 2 * broken.delay_ns(there, here)
        bytes_ns = len(into) * self.scenario.byte_ns
        if meter is not None and bytes_ns > METER_NS:
            self._count(asker, meter, self.loop.now_ns, bytes_ns)

        def arrive() -> None:
            live = self.lanes.get(holder) is process
            view = process.served.get(key) if live else None
            ended(self._give(view, into, checksum, extent, holder))

        asker.later(time_ns + bytes_ns, arrive)

    def _count(self, asker: Process, meter: Meter, begun_ns: int, takes_ns: int) -> None:
        """Count the bytes of a long pull as they come."""
        meter.verified = meter.size * min(self.loop.now_ns - begun_ns, takes_ns) // takes_ns
        if meter.verified < meter.size:
            asker.later(METER_NS, lambda: self._count(asker, meter, begun_ns, takes_ns))

    def _give(
        self,
        view: memoryview | None,
        into: memoryview,
        checksum: str,
        extent: Extent | None,
        holder: Address,
    ) -> Asked:
        """Copy the bytes that a holder serves, or say why not."""
        if view is None:
            return Asked(PayloadGone("gone"))
        offset, total = extent or Extent(0, len(into))
        if len(view) != total:
            return Asked(ChecksumMismatch(f"{len(view)} bytes, {total} are expected"))
        there = target(self.lanes[holder].me.rack)
        if self.broken.flips("flip_bytes", there):
            if extent is not None:  # a chunk was changed on the way
                return Asked(ChecksumMismatch("other bytes than were sent"))
            into[:] = view
            into[self.rng.randrange(len(into))] ^= 1 << self.rng.randrange(8)
        else:
            into[:] = view[offset : offset + len(into)]
        if checksum and checksum_of(into) != checksum:
            return Asked(ChecksumMismatch("other bytes than were offered"), culprit=holder)
        return Asked(None, len(into))
