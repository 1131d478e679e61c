"""benchmarks.sideband: what heartbeats cost. Prints one JSON object.

    python -m benchmarks.sideband --seconds 10 --peers 8
    python -m benchmarks.sideband --spread-out
    python -m benchmarks.sideband --keys

One process sends a frame to each peer every interval and hears one from each as often: its answer,
as racks answer orders, or with `--spread-out` a frame in a phase of the peer's own. The peers live
in another process, outside of what is measured. CPU time is of the whole process, libzmq's own
thread and the event loop included, user and system, by getrusage.

`measured` is the median over the runs of CPU seconds per second, in percent of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import resource
import statistics
from multiprocessing.connection import Connection

from benchmarks._common import arguments, report, spread
from mend.transport.security import Secrets
from mend.transport.zmq import Received, ZmqSideband
from mend.types import Peer

GOAL_PCT = 1.0
ANY_PORT = "tcp://127.0.0.1:0"
MEASURED = Peer(0, 0)


def main() -> None:
    options = _options()
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    args = (theirs, options.peers, options.interval_ms / 1000, options.frame_bytes, options.keys)
    args = (*args, options.spread_out)
    others = spawn.Process(target=_others, args=args, daemon=True)
    others.start()
    try:
        shares, rates = asyncio.run(_measure(ours, options))
        ours.send("end")
    finally:
        others.join(5)
    report(
        "sideband",
        goal=f"<= {GOAL_PCT:g} % of one core",
        values=shares,
        passed=statistics.median(shares) <= GOAL_PCT,
        options=options,
        unit="% of a core",
        beside=None,
        more={"heard_per_second": spread(rates, 1)},
        digits=2,
    )


def _options() -> argparse.Namespace:
    parser = arguments("sideband", __doc__)
    parser.add_argument("--keys", action="store_true", help="encrypt and authenticate (CURVE)")
    parser.add_argument(
        "--spread-out", action="store_true", help="peers beat by themselves, phases spread evenly"
    )
    parser.add_argument("--peers", type=int, default=8, help="peers to talk to (default 8)")
    parser.add_argument(
        "--interval-ms", type=int, default=100, help="time between two heartbeats (default 100)"
    )
    parser.add_argument(
        "--frame-bytes", type=int, default=300, help="size of a heartbeat (default 300)"
    )
    parser.add_argument("--seconds", type=int, default=10, help="length of a run (default 10)")
    parser.add_argument("--runs", type=int, default=3, help="runs one after another (default 3)")
    return parser.parse_args()


async def _beat(sideband: ZmqSideband, peers: list[Peer], every_s: float, size: int) -> None:
    loop, frame = asyncio.get_running_loop(), bytes(size)
    due = loop.time()
    while True:
        for peer in peers:
            sideband.send(peer, frame)
        due += every_s
        await asyncio.sleep(due - loop.time())


def _listen(sideband: ZmqSideband, heard: list[int]) -> None:
    """As a rank's process does."""

    def take(_: Received) -> None:
        heard[0] += 1

    sideband.hear(take)


def _answer(sideband: ZmqSideband, size: int) -> None:
    """A frame to the measured process for each of its own, as leaders do."""
    frame = bytes(size)

    def take(_: Received) -> None:
        sideband.send(MEASURED, frame)

    sideband.hear(take)


def _sideband(me: Peer, keys: bool) -> ZmqSideband:
    return ZmqSideband(ANY_PORT, secrets=Secrets([bytes(32)], me) if keys else None)


def _others(
    pipe: Connection, peers: int, every_s: float, size: int, keys: bool, spread_out: bool
) -> None:
    """The other process: all peers, each with a sideband of its own."""

    async def live() -> None:
        sidebands = [_sideband(Peer(number + 1, 0), keys) for number in range(peers)]
        pipe.send([sideband.address for sideband in sidebands])
        measured = await asyncio.to_thread(pipe.recv)
        tasks = []
        for sideband in sidebands:
            sideband.connect(MEASURED, measured)
            if spread_out:
                _listen(sideband, [0])
                tasks.append(asyncio.create_task(_beat(sideband, [MEASURED], every_s, size)))
                await asyncio.sleep(every_s / peers)
            else:
                _answer(sideband, size)
        await asyncio.to_thread(pipe.recv)
        await _ended(tasks)
        for sideband in sidebands:
            sideband.close()

    asyncio.run(live())


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


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
    heard = [0]
    _listen(sideband, heard)
    beating = _beat(sideband, peers, options.interval_ms / 1000, options.frame_bytes)
    tasks = [asyncio.create_task(beating)]
    await asyncio.sleep(1)  # everybody is connected
    loop, shares, rates = asyncio.get_running_loop(), [], []
    for _ in range(options.runs):
        cpu_s, since_s, heard_before = _cpu_seconds(), loop.time(), heard[0]
        await asyncio.sleep(options.seconds)
        took_s = loop.time() - since_s
        shares.append(100 * (_cpu_seconds() - cpu_s) / took_s)
        rates.append((heard[0] - heard_before) / took_s)
    await _ended(tasks)
    sideband.close()
    return shares, rates


if __name__ == "__main__":
    main()
