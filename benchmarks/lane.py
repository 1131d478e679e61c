"""benchmarks.lane: a payload pulled over loopback, against raw sockets. Prints one JSON object.

    python -m benchmarks.lane --megabytes 512 --repeats 15

The holder is a process of its own; the reader fetches into memory that is allocated and touched.
Variants take turns in every repeat, so that a disturbance of the machine meets all of them:

raw            one connection, sendall / recv_into of the same buffer, no checksum
raw_streams    the same over as many connections as the lane uses, one thread each
lane           BulkLane.fetch with the checksum of the whole payload (what offers use)
lane_unchecked BulkLane.fetch where the caller verifies the content (chunks are still checked)

`measured` is the median over repeats of raw time / lane time. The lane uses
several connections, so it can be faster than one raw one; `of_raw_streams` is the stricter figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from benchmarks._common import limit, report, spread
from benchmarks._lanes import KEY, TOKEN, lane_options, measured, payload, speeds
from mend.transport.bulk_client import STREAMS, BulkLane, checksum_of
from mend.types import Address

GOAL = 0.90


def main() -> None:
    options = lane_options("lane", __doc__, 512)
    size = options.megabytes * 1_000_000
    seconds = measured(_hold, _measure, size, options.repeats)
    _report(options, size, seconds)


def _hold(pipe: Connection, size: int) -> None:
    """The other process: serves one buffer by lane and by raw sockets until told to end."""
    data = payload(size)
    listener = socket.create_server(("127.0.0.1", 0))

    def send_on_request(sock: socket.socket) -> None:
        with sock:
            while asked := sock.recv(16, socket.MSG_WAITALL):
                start, stop = int.from_bytes(asked[:8], "big"), int.from_bytes(asked[8:], "big")
                sock.sendall(data[start:stop])

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                args = (listener.accept()[0],)
                threading.Thread(target=send_on_request, args=args, daemon=True).start()

    async def serve() -> None:
        lane = BulkLane("127.0.0.1", None, token=TOKEN)
        lane.serve(KEY, data)
        threading.Thread(target=accept, daemon=True).start()
        pipe.send((lane.address, listener.getsockname()[1], checksum_of(data)))
        await asyncio.to_thread(pipe.recv)
        lane.close()

    asyncio.run(serve())


def _raw(sock: socket.socket, part: memoryview, start: int) -> None:
    sock.sendall(start.to_bytes(8, "big") + (start + len(part)).to_bytes(8, "big"))
    filled = 0
    while filled < len(part):
        filled += sock.recv_into(part[filled:])


def _raw_streams(pool: ThreadPoolExecutor, socks: list[socket.socket], into: memoryview) -> None:
    cuts = [len(into) * n // len(socks) for n in range(len(socks) + 1)]
    parts = zip(socks, cuts, cuts[1:], strict=False)
    work = [pool.submit(_raw, sock, into[start:stop], start) for sock, start, stop in parts]
    for each in work:
        each.result()


async def _measure(pipe: Connection, size: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of every repeat, by variant. The first round warms up and is not counted."""
    address, raw_port, checksum = pipe.recv()
    holder = Address(*address)
    into = memoryview(bytearray(b"x") * size)
    lane = BulkLane("127.0.0.1", None, token=TOKEN)
    socks = [socket.create_connection(("127.0.0.1", raw_port)) for _ in range(STREAMS)]
    seconds: dict[str, list[float]] = {}
    with ThreadPoolExecutor(STREAMS) as pool:
        blocking: dict[str, Callable[[], None]] = {
            "raw": lambda: _raw(socks[0], into, 0),
            "raw_streams": lambda: _raw_streams(pool, socks, into),
        }
        for _ in range(repeats + 1):
            for name, run in blocking.items():
                started = time.perf_counter()
                run()
                seconds.setdefault(name, []).append(time.perf_counter() - started)
            for name, check in (("lane", checksum), ("lane_unchecked", "")):
                started = time.perf_counter()
                await lane.fetch([holder], KEY, check, into)
                seconds.setdefault(name, []).append(time.perf_counter() - started)
                assert checksum_of(into) == checksum, name
    for sock in socks:
        sock.close()
    lane.close()
    return {name: each[1:] for name, each in seconds.items()}


def _report(options: argparse.Namespace, size: int, seconds: dict[str, list[float]]) -> None:
    def ratio(base: str) -> list[float]:
        pairs = zip(seconds[base], seconds["lane"], strict=True)
        return [raw / lane for raw, lane in pairs]

    report(
        "lane",
        goal=f">= {GOAL:g} of one raw socket's speed",
        values=ratio("raw"),
        passed=statistics.median(ratio("raw")) >= GOAL,
        options=options,
        unit="x one raw socket",
        better="higher",
        beside=limit("one raw socket", "GB/s", [size / each / 1e9 for each in seconds["raw"]]),
        more={
            "of_raw_streams": spread(ratio("raw_streams")),
            "gigabytes_per_second": speeds(size, seconds),
            "streams": STREAMS,
        },
    )


if __name__ == "__main__":
    main()
