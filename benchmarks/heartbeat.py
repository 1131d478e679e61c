"""benchmarks.heartbeat: how long a rank is silent while it merges. Prints one JSON object.

    python -m benchmarks.heartbeat --numel 100000000 --members 4 --merges 8

A process with a rank's own parts (IoLoop, RankMachine, ConcurrentOuterStep, Numerics) reports
every 100 ms, as always; this process listens in place of the rank's leader, and notes when frames
arrive. Meanwhile the rank merges `members` payloads of `numel` fp32 elements on its worker, again
and again: first with nothing else to do, then while its main thread multiplies matrices, as
training would.

`measured` is the largest gap between two frames during any merge, in milliseconds: silence is what
the others judge a rack by. `gaps_ms` gives the largest gap of each merge, by what else was going
on; `idle` is the rank at rest. Less memory than the payloads need makes the payloads smaller, and
says so.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from benchmarks._common import (
    Goal,
    RackArgs,
    limit,
    noise,
    proc_bytes,
    racks,
    read_options,
    report,
    spread,
    spreads,
)
from mend.codec import CODECS
from mend.coordination import events as ev
from mend.coordination.machines import Machines
from mend.coordination.rank import RankMachine, RankOptions
from mend.engine.compute.buffers import Spare
from mend.engine.compute.numerics import Numerics
from mend.engine.io.io_loop import IoLoop, IoLoopOptions
from mend.engine.loop.concurrent_outer_step import ConcurrentOuterStep
from mend.engine.loop.store import Payload
from mend.engine.state.published_state import PublishedState
from mend.merge import MERGES
from mend.outer import OUTERS
from mend.status.event_log import EventLog
from mend.transport.zmq import ZmqSideband
from mend.types import MS, SECOND, Member, Owned, Peer, Span

GOAL = Goal("< 150 ms", 150.0, "ms", measure="max", digits=1)
HEARTBEAT_MS = 100
SHARE_OF_MEMORY = 0.5
PHASES = ("idle", "merging", "merging and training")
OPTIONS = {
    "numel": (100_000_000, "fp32 elements"),
    "members": (4, "payloads of a merge"),
    "merges": (8, "of each kind"),
    "momentum": (0.0, "of the outer step; with any there is state"),
}


def main() -> None:
    options = read_options("heartbeat", __doc__, OPTIONS)
    asked, bytes_each = options.numel, 4 * (options.members + 4)
    available = proc_bytes("meminfo", "MemAvailable")
    options.numel = min(asked, int(available * SHARE_OF_MEMORY) // bytes_each)
    heard, spans = asyncio.run(_listen(options))
    gaps = {
        phase: [_largest_gap_ms(heard, start, end) for name, start, end in spans if name == phase]
        for phase in PHASES
    }
    busy = gaps["merging"] + gaps["merging and training"]
    more: dict[str, object] = {
        "gaps_ms": spreads(gaps, 1),
        "merge_s": spread(
            [(end - start) / SECOND for name, start, end in spans if name != "idle"], 2
        ),
    }
    if options.numel < asked:
        more["reduced"] = f"{asked} elements asked for, memory allows {options.numel}"
    plain = limit("largest gap of the rank at rest", "ms", gaps["idle"], 1)
    report("heartbeat", GOAL, busy, options, plain, more)


def _largest_gap_ms(heard: list[int], start: int, end: int) -> float:
    """Return the largest gap from the last frame before `start` to the first one after `end`."""
    before = [at for at in heard if at <= start][-1:]
    after = [at for at in heard if at >= end][:1]
    inside = [at for at in heard if start < at < end]
    return max(b - a for a, b in pairwise([*before, *inside, *after])) / MS


# ------------------------------------------------------------------ the listener


async def _listen(options: argparse.Namespace) -> tuple[list[int], list[tuple[str, int, int]]]:
    """(arrival of every frame, (what went on, from, to)), monotonic nanoseconds."""
    sideband = ZmqSideband("tcp://127.0.0.1:0")
    heard: list[int] = []

    async def note() -> None:
        while True:
            await sideband.receive()
            heard.append(time.monotonic_ns())

    listening = asyncio.create_task(note())
    options.leader = sideband.address
    try:
        with racks(_rank, options, count=1) as pipes:
            spans = await asyncio.to_thread(pipes[0].recv)
            await asyncio.sleep(3 * HEARTBEAT_MS / 1e3)  # the frame after the last merge
            pipes[0].send("end")
    finally:
        listening.cancel()
        sideband.close()
        del options.leader
    return heard, spans


# ------------------------------------------------------------------ the rank


class Watched(ConcurrentOuterStep):
    """Notes when a merge is done."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.merged = threading.Event()

    def tell(self, event: ev.Event) -> None:
        super().tell(event)
        if isinstance(event, ev.Merged):
            assert not event.error, event.error
            self.merged.set()


@dataclass
class Stand:
    """The rank under test and its way to the listener."""

    io_loop: IoLoop
    rank: Watched
    members: tuple[tuple[Member, int], ...]

    def merge(self) -> None:
        count = len(self.members)
        weights = (0.5 ** (count - 1), *(0.5**m for m in range(1, count)))
        self.rank.merged.clear()
        effect = ev.Merge(0, 1, 1, self.members, weights, verify=False)
        self.io_loop.call(lambda: self.rank._queue.perform(effect, self.rank.rank_machine))


def _rank(args: RackArgs) -> None:
    torch.set_num_threads(1)
    options = args.options
    stand = _stand(options)
    spans: list[tuple[str, int, int]] = []
    factor = torch.ones(512, 512)
    time.sleep(0.5)  # the connection is made
    stand.merge()  # memory is touched
    stand.rank.merged.wait()
    for phase in PHASES * options.merges:
        start = time.monotonic_ns()
        if phase == "idle":
            time.sleep(4 * HEARTBEAT_MS / 1e3)
        else:
            stand.merge()
            while not stand.rank.merged.is_set():
                if phase == "merging":
                    stand.rank.merged.wait()
                else:
                    torch.mm(factor, factor)
        spans.append((phase, start, time.monotonic_ns()))
    args.pipe.send(spans)
    args.pipe.recv()
    stand.io_loop.close()
    stand.rank.store.rules[0].numerics.close()


def _stand(options: Any) -> Stand:
    """A rank of a rack whose leader is the listener; it never hears an order."""
    me, member, numel = Peer(0, 1), Member(0, 1), options.numel
    outer = OUTERS["nesterov"](1.0, options.momentum)
    numerics = Numerics(CODECS["float32"](), MERGES["mean"](), outer, 1, spare=Spare(1))
    genesis = numerics.genesis(noise(numel, 1))
    lane = "127.0.0.1"
    listen = IoLoopOptions(f"tcp://{lane}:0", lane, "", None, 10 * SECOND)
    io_loop = IoLoop(me, member, "benchmark", listen, EventLog({"rack": 0, "rank": 1}, None))
    rank_machine = RankMachine(
        me, member, RankOptions(HEARTBEAT_MS * MS, ranks=2), (genesis.digest,)
    )
    rank = Watched(
        me, member, Machines(rank_machine), [Owned((Span(0, numel),), numel)], [genesis],
        numerics, PublishedState(1), io_loop,
    )  # fmt: skip
    members = tuple((Member(rack, 1), 1) for rack in range(options.members))
    for number, (who, seq) in enumerate(members):
        payload = numerics.codec.encode(noise(numel, 10 + number) * 1e-3)
        rank.store.payloads[who, 0, seq] = Payload(payload, "")
    io_loop.call(lambda: io_loop.connect(Peer(0, 0), options.leader))
    io_loop.attach(rank)
    io_loop.call(rank.tick)
    return Stand(io_loop, rank, members)


if __name__ == "__main__":
    main()
