"""benchmarks.sideband: the CPU time of heartbeats. Prints one JSON object.

    python -m benchmarks.sideband --seconds 10 --peers 8
    python -m benchmarks.sideband --spread-out
    python -m benchmarks.sideband --keys

One process sends a frame to each peer every interval and hears one from each as often: its answer,
as racks answer orders, or with `--spread-out` a frame in a phase of the peer's own. The peers live
in another process, which is not measured. CPU time is of the whole process, user and system,
libzmq's own thread and the event loop included.

`measured` is the median over the runs of CPU seconds per second, in percent of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import time
from multiprocessing.connection import Connection

from benchmarks._common import Goal, read_options, report, spread
from mend.transport.security import Secrets
from mend.transport.zmq import Received, ZmqSideband
from mend.types import Peer

GOAL = Goal("<= 1 % of one core", 1.0, "% of a core", digits=2)
ANY_PORT = "tcp://127.0.0.1:0"
MEASURED = Peer(0, 0)
OPTIONS = {
    "keys": (False, "encrypt and authenticate (CURVE)"),
    "spread_out": (False, "peers beat by themselves, phases spread evenly"),
    "peers": (8, "peers to talk to"),
    "interval_ms": (100, "time between two heartbeats"),
    "frame_bytes": (300, "size of a heartbeat"),
    "seconds": (10, "length of a run"),
    "runs": (3, "runs one after another"),
}


def main() -> None:
    options = read_options("sideband", __doc__, OPTIONS)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    others = spawn.Process(target=_others, args=(theirs, options), daemon=True)
    others.start()
    try:
        shares, rates = asyncio.run(_measure(ours, options))
        ours.send("end")
    finally:
        others.join(5)
    more = {"heard_per_second": spread(rates, 1)}
    report("sideband", GOAL, shares, options, None, more)


async def _beat(sideband: ZmqSideband, peers: list[Peer], options: argparse.Namespace) -> None:
    loop, frame = asyncio.get_running_loop(), bytes(options.frame_bytes)
    due = loop.time()
    while True:
        for peer in peers:
            sideband.send(peer, frame)
        due += options.interval_ms / 1000
        await asyncio.sleep(due - loop.time())


def _count(sideband: ZmqSideband) -> list[int]:
    """Count the frames heard, in the list's one element."""
    heard = [0]

    def take(_: Received) -> None:
        heard[0] += 1

    sideband.hear(take)
    return heard


def _answer(sideband: ZmqSideband, size: int) -> None:
    """A frame to the measured process for each of its own, as leaders do."""
    frame = bytes(size)
    sideband.hear(lambda _: sideband.send(MEASURED, frame))


def _sideband(me: Peer, keys: bool) -> ZmqSideband:
    return ZmqSideband(ANY_PORT, secrets=Secrets([bytes(32)], me) if keys else None)


def _others(pipe: Connection, options: argparse.Namespace) -> None:
    """The other process: all peers, each with a sideband of its own."""
    peers = [Peer(number + 1, 0) for number in range(options.peers)]

    async def live() -> None:
        sidebands = [_sideband(peer, options.keys) for peer in peers]
        pipe.send([sideband.address for sideband in sidebands])
        measured = await asyncio.to_thread(pipe.recv)
        tasks = []
        for sideband in sidebands:
            sideband.connect(MEASURED, measured)
            if options.spread_out:
                _count(sideband)
                tasks.append(asyncio.create_task(_beat(sideband, [MEASURED], options)))
                await asyncio.sleep(options.interval_ms / 1000 / len(peers))
            else:
                _answer(sideband, options.frame_bytes)
        await asyncio.to_thread(pipe.recv)
        await _cancel(tasks)
        for sideband in sidebands:
            sideband.close()

    asyncio.run(live())


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _measure(
    pipe: Connection, options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """(percent of a core, frames heard per second), of every run."""
    addresses = pipe.recv()
    sideband = _sideband(MEASURED, options.keys)
    peers = [Peer(number + 1, 0) for number in range(len(addresses))]
    for peer, address in zip(peers, addresses, strict=True):
        sideband.connect(peer, address)
    pipe.send(sideband.address)
    heard = _count(sideband)
    tasks = [asyncio.create_task(_beat(sideband, peers, options))]
    await asyncio.sleep(1)  # everybody is connected
    loop, shares, rates = asyncio.get_running_loop(), [], []
    for _ in range(options.runs):
        cpu_s, since_s, heard_before = time.process_time(), loop.time(), heard[0]
        await asyncio.sleep(options.seconds)
        took_s = loop.time() - since_s
        shares.append(100 * (time.process_time() - cpu_s) / took_s)
        rates.append((heard[0] - heard_before) / took_s)
    await _cancel(tasks)
    sideband.close()
    return shares, rates


if __name__ == "__main__":
    main()
