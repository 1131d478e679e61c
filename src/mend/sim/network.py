"""sim.network: frames and pulls between simulated processes.

Loses, doubles, delays and cuts as the scenario says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mend.errors import PayloadGone, PeerUnreachable, TransferStalled
from mend.protocol import wire
from mend.protocol.messages import Envelope
from mend.sim.loop import Loop
from mend.sim.scenario import WITNESS_TARGET, Scenario
from mend.terms import MS, SECOND, WITNESS, Address

if TYPE_CHECKING:
    from mend.sim.process import Process

STALL_NS = 1 * SECOND
WIRE_CHECKED_ONE_IN = 8
"""One frame in so many is really encoded and decoded; all of them would be the cost of a seed."""


def target(rack: int) -> int:
    return WITNESS_TARGET if rack == WITNESS else rack


class Network:
    """`where` maps addresses to processes; a crashed process is no longer found."""

    def __init__(self, loop: Loop, scenario: Scenario, rng: random.Random) -> None:
        self.loop, self.scenario, self.rng = loop, scenario, rng
        self.where: dict[str, Process] = {}
        self.lanes: dict[Address, Process] = {}
        self.frames = 0

    def _cut(self, a: int, b: int) -> bool:
        now_ns = self.loop.now_ns
        return any(
            fault.kind == "cut"
            and (fault.a, fault.b) == (target(a), target(b))
            and fault.begin_ns <= now_ns < fault.end_ns
            for fault in self.scenario.faults
        )

    def _slow_ns(self, a: int, b: int) -> int:
        now_ns = self.loop.now_ns
        slow = any(
            fault.kind == "slow_link"
            and {fault.a, fault.b} == {target(a), target(b)}
            and fault.begin_ns <= now_ns < fault.end_ns
            for fault in self.scenario.faults
        )
        return 300 * MS if slow else 0

    def _delay_ns(self, a: int, b: int) -> int:
        scenario = self.scenario
        if a == b:
            return 1 * MS // 10
        return scenario.delay_ns + self.rng.randint(0, scenario.jitter_ns) + self._slow_ns(a, b)

    def send(self, sender: int, address: str, envelope: Envelope) -> None:
        """Frames inside a rack arrive late at most; between racks anything may happen to them."""
        scenario, rng = self.scenario, self.rng
        receiver = self.where.get(address)
        if receiver is None:
            return
        self.frames += 1
        if self.frames % WIRE_CHECKED_ONE_IN == 0:
            envelope = wire.decode(wire.encode(envelope))
        far = sender != receiver.me.rack
        if far and (self._cut(sender, receiver.me.rack) or rng.random() < scenario.loss):
            return
        copies = 2 if far and rng.random() < scenario.duplicate else 1
        for _ in range(copies):
            self.loop.at(
                self.loop.now_ns + self._delay_ns(sender, receiver.me.rack),
                lambda: receiver.receive(envelope),
            )

    def fetch(
        self,
        asker: Process,
        holders: Sequence[Address],
        key: bytes,
        into: memoryview,
        done: Callable[[Exception | None], None],
    ) -> None:
        """Ask the holders one after another, as the lane does; a cut link costs a stall timeout."""

        def ask(position: int, last: Exception) -> None:
            if position == len(holders):
                asker.later(0, lambda: done(last))
                return
            holder = self.lanes.get(holders[position])
            if holder is None:
                asker.later(0, lambda: ask(position + 1, PeerUnreachable("its process is gone")))
                return
            there, here = holder.me.rack, asker.me.rack
            if self._cut(there, here) or self._cut(here, there) or holder.frozen():
                asker.later(STALL_NS, lambda: ask(position + 1, TransferStalled("no byte")))
                return
            time_ns = 2 * self._delay_ns(there, here) + len(into) * self.scenario.byte_ns

            def arrive() -> None:
                view = holder.served.get(key) if holders[position] in self.lanes else None
                if view is None:
                    ask(position + 1, PayloadGone("gone"))
                else:
                    into[:] = view
                    done(None)

            asker.later(time_ns, arrive)

        ask(0, PeerUnreachable("no holder"))
