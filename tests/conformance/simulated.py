"""The lane and the sideband of simulated processes, under the names of the real ones.

The clock of the simulated network moves only while somebody waits for a result.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Sequence

from mend.coordination.messages import Message, Partial, RankReport
from mend.errors import TransportError
from mend.types import Address, Extent, Member, Meter, Peer
from mend_lab.sim.loop import Loop
from mend_lab.sim.network import Network
from mend_lab.sim.process import Process
from mend_lab.sim.scenario import FOR_EVER, calm

END_NS = FOR_EVER - 1


class Site:
    """A network without faults, and its processes."""

    def __init__(self) -> None:
        self.loop, self.rng = Loop(), random.Random(1)
        self.network = Network(self.loop, calm(), self.rng)
        self.network.broken.scenario = self.network.scenario
        self._racks = itertools.count()

    def process(self, rack: int = -1) -> Process:
        """`rack` -1: one that nobody has."""
        rack = next(self._racks) if rack < 0 else rack
        member = Member(rack, self.rng.getrandbits(62))
        return Process(Peer(rack, 0), member, self.network, self.loop, self.rng)


class SimulatedLane:
    """A process's pulls. It counts no bytes, and nothing in a simulated process cancels a pull."""

    def __init__(self, site: Site) -> None:
        self._site, self._process = site, site.process()
        site.network.enter(self._process)
        self.serve, self.drop = self._process.serve, self._process.drop

    @property
    def address(self) -> Address:
        return self._process.lane

    async def fetch(
        self,
        holders: Sequence[Address],
        key: bytes,
        checksum: str,
        into: memoryview,
        extent: Extent | None = None,
        meter: Meter | None = None,
    ) -> None:
        ends: list[Exception | None] = []
        self._process.fetch(holders, key, checksum, into, ends.append, extent, meter)
        await asyncio.sleep(0)  # others begin theirs
        if not self._site.loop.run(lambda: bool(ends), END_NS):
            raise TransportError("the process of this lane is gone")
        if ends[0] is not None:
            raise ends[0]

    def close(self) -> None:
        self._process.stopped = True
        self._site.network.leave(self._process)


def _message(frame: bytes) -> Message:
    """A state of a rank with this in it."""
    partials = (Partial(0, 1, 1, frame),)
    return RankReport(1, 1, 1, 1, (), (), (), (), partials, False, False, False)


class SimulatedSideband:
    """A process's messages. A host's `send` does not say what becomes of a frame; here it does as
    far as the contract asks."""

    def __init__(self, site: Site, address: str = "") -> None:
        rack = int(address.removeprefix("tcp://sim:").partition("-")[0]) if address else -1
        self._site, self._process = site, site.process(rack)
        self._frames, self._closed = deque[bytes](), False
        self._process.start(self)

    @property
    def address(self) -> str:
        return self._process.address

    def connect(self, peer: Peer, address: str) -> None:
        self._process.connect(peer, address)

    def send(self, peer: Peer, frame: bytes) -> bool:
        self._process.send(peer, _message(frame))
        return peer in self._process.peers

    async def receive(self) -> bytes:
        while not self._frames:
            if self._closed:
                raise TransportError("it is closed")
            self._site.loop.run(lambda: bool(self._frames), END_NS)
            await asyncio.sleep(0)  # somebody else may send
        return self._frames.popleft()

    # -------------------------------------------------------------- as machines of the process

    def heard(self, peer: Peer, incarnation: int, body: Message) -> None:
        assert isinstance(body, RankReport)
        self._frames.append(body.partials[0].blob)

    def deadline_ns(self) -> None:
        return None

    def close(self) -> None:
        self._closed = True
        self._process.stop()
