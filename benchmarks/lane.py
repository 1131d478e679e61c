"""benchmarks.lane: a payload pulled over loopback, with and without keys, against raw sockets; and
the cost of keys per core and per start. Prints one JSON object.

    python -m benchmarks.lane --megabytes 512 --repeats 15

The holder is a process of its own; the reader fetches into memory that is allocated and touched.
Variants take turns in every repeat, so that a disturbance of the machine meets all of them:

raw            one connection, sendall / recv_into of the same buffer, no checksum
raw_streams    the same over as many connections as the lane uses, one thread each
lane           BulkLane.fetch with the checksum of the whole payload (what offers use)
lane_unchecked BulkLane.fetch where the caller verifies the content (chunks are still checked)
sealed         as `lane`, with keys: AES-256-GCM in place of a checksum per chunk
authenticated  the same without encrypt_payloads: the seals alone (GMAC)

`measured` is the median over repeats of raw time / lane time. The lane uses several connections, so
it can be faster than one raw one; `of_raw_streams` is the stricter figure. `sealed_of_lane` is the
time of `lane` / that of `sealed`. `seal` and `open`, and without encryption `sign` and `check`, are
what one core does of each alone, by CPU time of the thread, in pieces as the lane makes them; the
goal of 1.5 GB/s is held against the slower of the first two. `start_ms` is what a leader does once:
reading the key file, deriving its keys and those of 64 racks that may connect, with the packages
loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks._common import Goal, limit, ratios, read_options, report, spread, spreads
from mend.config.keyfile import read_secrets
from mend.tools.keys_command import create
from mend.transport.bulk_client import STREAMS, BulkLane, checksum_of
from mend.transport.bulk_link import PIECE_BYTES
from mend.transport.security import RANDOM_BYTES, TAG_BYTES, Secret, Secrets
from mend.types import Address, Member, Peer, offer_key

GOAL_TEXT = ">= 0.9 of one raw socket's speed; a core seals, opens 1.5 GB/s"
GOAL = Goal(GOAL_TEXT, 0.90, "x one raw socket", better="higher")
CORE_GOAL_GB = 1.5
KEY = offer_key(Member(0, 1), 0, 0, 1)
TOKEN = b"benchmarks.lane!"
SECRET = bytes(range(32))
OPTIONS = {
    "megabytes": (512, "payload in 10^6 bytes"),
    "repeats": (15, "turns that every variant takes"),
}

Seconds = dict[str, list[float]]
"""Variant -> of every repeat."""


def main() -> None:
    options = read_options("lane", __doc__, OPTIONS)
    size = options.megabytes * 1_000_000
    seconds, core = _measured(size, options.repeats), _core(options.repeats)
    slower = min(statistics.median(core[name]) for name in ("seal", "open"))
    of_raw = ratios(seconds["raw"], seconds["lane"])
    speeds = {name: [size / s / 1e9 for s in each] for name, each in seconds.items()}
    plain = limit("one raw socket", "GB/s", speeds["raw"])
    more = {
        "of_raw_streams": spread(ratios(seconds["raw_streams"], seconds["lane"])),
        "sealed_of_lane": spread(ratios(seconds["lane"], seconds["sealed"])),
        "gigabytes_per_second": spreads(speeds),
        "one_core_gigabytes_per_second": spreads(core),
        "start_ms": spread(_starts(options.repeats)),
        "streams": STREAMS,
    }
    report("lane", GOAL, of_raw, options, plain, more, also=slower >= CORE_GOAL_GB)


def _lanes() -> dict[str, BulkLane]:
    secrets = {"lane": None, "sealed": Secrets([SECRET])}
    secrets["authenticated"] = Secrets([SECRET], conceal=False)
    return {
        name: BulkLane("127.0.0.1", None, token=TOKEN, secrets=each)
        for name, each in secrets.items()
    }


# ---------------------------------------------------------------------- pulls


def _measured(size: int, repeats: int) -> Seconds:
    """A process of its own serves `size` bytes until it is told to end."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    holder = spawn.Process(target=_hold, args=(theirs, size), daemon=True)
    holder.start()
    try:
        seconds = asyncio.run(_measure(ours, size, repeats))
        ours.send("end")
    finally:
        holder.join(5)
    return seconds


def _hold(pipe: Connection, size: int) -> None:
    """The other process: serves one buffer by all lanes and by raw sockets until told to end."""
    block = random.Random(0).randbytes(1_000_000)
    data = memoryview(block * (size // len(block)))
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
        lanes = _lanes()
        for lane in lanes.values():
            lane.serve(KEY, data)
        threading.Thread(target=accept, daemon=True).start()
        addresses = {name: lane.address for name, lane in lanes.items()}
        pipe.send((addresses, listener.getsockname()[1], checksum_of(data)))
        await asyncio.to_thread(pipe.recv)
        for lane in lanes.values():
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


async def _measure(pipe: Connection, size: int, repeats: int) -> Seconds:
    """The first round warms up and is not counted."""
    addresses, raw_port, checksum = pipe.recv()
    into = memoryview(bytearray(b"x") * size)
    lanes = _lanes()
    fetches = [(name, name, checksum) for name in lanes]
    fetches.insert(1, ("lane_unchecked", "lane", ""))
    socks = [socket.create_connection(("127.0.0.1", raw_port)) for _ in range(STREAMS)]
    seconds: Seconds = {}
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
            for name, by, check in fetches:
                started = time.perf_counter()
                await lanes[by].fetch([Address(*addresses[by])], KEY, check, into)
                seconds.setdefault(name, []).append(time.perf_counter() - started)
                assert checksum_of(into) == checksum, name
    for sock in socks:
        sock.close()
    for lane in lanes.values():
        lane.close()
    return {name: each[1:] for name, each in seconds.items()}


# ---------------------------------------------------------------------- keys alone


def _core(repeats: int) -> dict[str, list[float]]:
    """GB/s of sealing and opening, and of the same without encryption, one thread."""
    reader, holder = bytes(RANDOM_BYTES), bytes(RANDOM_BYTES)
    seal, _ = Secret(SECRET).lane(TOKEN, reader, holder)
    unseal, _ = Secret(SECRET).lane(TOKEN, reader, holder)
    plain = memoryview(bytearray(random.Random(0).randbytes(PIECE_BYTES)))
    sealed = [memoryview(bytearray(PIECE_BYTES + TAG_BYTES)) for _ in range(64)]
    back, empty = memoryview(bytearray(PIECE_BYTES)), memoryview(bytearray())
    tags = {id(piece): piece[:TAG_BYTES] for piece in sealed}
    jobs: dict[str, Callable[[memoryview], object]] = {
        "seal": lambda piece: seal.seal(plain, b"", piece),
        "open": lambda piece: unseal.open(piece, b"", back),
        "sign": lambda piece: seal.seal(b"", plain, tags[id(piece)]),
        "check": lambda piece: unseal.open(tags[id(piece)], plain, empty),
    }
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            started = time.thread_time()
            for piece in sealed:
                job(piece)
            passed_s = time.thread_time() - started
            found[name].append(len(sealed) * PIECE_BYTES / passed_s / 1e9)
    return found


def _starts(repeats: int) -> list[float]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "key"
        create(path, (SECRET,))
        for _ in range(repeats):
            started = time.perf_counter()
            secrets = Secrets(read_secrets(path), Peer(0, 0))
            secrets.own.server()
            secrets.guests(ranks=8)
            found.append(1000 * (time.perf_counter() - started))
    return found


if __name__ == "__main__":
    main()
