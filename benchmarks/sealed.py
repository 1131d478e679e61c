"""benchmarks.sealed: what keys cost a pull over loopback, and a start. Prints one JSON object.

    python -m benchmarks.sealed --megabytes 256 --repeats 15

The holder is a process of its own. Both variants take turns in every repeat, so that a disturbance
of the machine meets both:

plain          BulkLane.fetch with the checksum of the whole payload (what offers use)
sealed         the same with keys: AES-256-GCM in place of a checksum per chunk
authenticated  the same without encrypt_payloads: the seals alone (GMAC)

`measured` is the median over repeats of plain time / sealed time. `seal` and `open`, and without
encryption `sign` and `check`, are what one core does of each alone, by CPU time of the thread, in
pieces as the lane makes them; the goal of 1.5 GB/s is held against the slower of the first two.
`start_ms` is what a leader does once: reading the key file, deriving its keys and those of 64 racks
that may connect, with the packages loaded.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks._common import report, spread
from benchmarks._lanes import KEY, TOKEN, lane_options, measured, payload, speeds
from mend.config.keyfile import read_secrets
from mend.tools.keys_command import create
from mend.transport.bulk_client import BulkLane, checksum_of
from mend.transport.bulk_link import PIECE_BYTES
from mend.transport.security import RANDOM_BYTES, TAG_BYTES, Secret, Secrets
from mend.types import Address, Peer

GOAL_GB = 1.5
SECRET = bytes(range(32))


def main() -> None:
    options = lane_options("sealed", __doc__, 256)
    size = options.megabytes * 1_000_000
    seconds = measured(_hold, _measure, size, options.repeats)
    alone = _alone(options.repeats)
    slower = min(statistics.median(alone[name]) for name in ("seal", "open"))
    pairs = zip(seconds["plain"], seconds["sealed"], strict=True)
    report(
        "sealed",
        goal=f"a core seals and opens >= {GOAL_GB:g} GB/s",
        values=[plain / sealed for plain, sealed in pairs],
        passed=slower >= GOAL_GB,
        options=options,
        unit="x the plain lane",
        better="higher",
        beside=None,
        more={
            "gigabytes_per_second": speeds(size, seconds),
            "one_core_gigabytes_per_second": {n: spread(rates) for n, rates in alone.items()},
            "start_ms": spread(_starts(options.repeats)),
        },
    )


def _lanes() -> dict[str, BulkLane]:
    secrets, unconcealed = Secrets([SECRET]), Secrets([SECRET], conceal=False)
    return {
        "plain": BulkLane("127.0.0.1", None, token=TOKEN),
        "sealed": BulkLane("127.0.0.1", None, token=TOKEN, secrets=secrets),
        "authenticated": BulkLane("127.0.0.1", None, token=TOKEN, secrets=unconcealed),
    }


def _hold(pipe: Connection, size: int) -> None:
    """The other process: serves one buffer by both lanes until told to end."""
    data = payload(size)

    async def serve() -> None:
        lanes = _lanes()
        for lane in lanes.values():
            lane.serve(KEY, data)
        pipe.send(({name: lane.address for name, lane in lanes.items()}, checksum_of(data)))
        await asyncio.to_thread(pipe.recv)
        for lane in lanes.values():
            lane.close()

    asyncio.run(serve())


async def _measure(pipe: Connection, size: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of every repeat, by variant. The first round warms up and is not counted."""
    addresses, checksum = pipe.recv()
    into = memoryview(bytearray(b"x") * size)
    lanes = _lanes()
    seconds: dict[str, list[float]] = {name: [] for name in lanes}
    for _ in range(repeats + 1):
        for name, lane in lanes.items():
            started = time.perf_counter()
            await lane.fetch([Address(*addresses[name])], KEY, checksum, into)
            seconds[name].append(time.perf_counter() - started)
    for lane in lanes.values():
        lane.close()
    return {name: each[1:] for name, each in seconds.items()}


def _alone(repeats: int) -> dict[str, list[float]]:
    """GB/s of sealing and opening, and of the same without encryption, one thread."""
    reader, holder = bytes(RANDOM_BYTES), bytes(RANDOM_BYTES)
    seal, _ = Secret(SECRET).lane(TOKEN, reader, holder)
    unseal, _ = Secret(SECRET).lane(TOKEN, reader, holder)
    plain = memoryview(bytearray(random.Random(0).randbytes(PIECE_BYTES)))
    sealed = [memoryview(bytearray(PIECE_BYTES + TAG_BYTES)) for _ in range(64)]
    back, empty = memoryview(bytearray(PIECE_BYTES)), memoryview(bytearray())

    def rate(job: Callable[[memoryview], None]) -> float:
        started = time.thread_time()
        for piece in sealed:
            job(piece)
        return len(sealed) * PIECE_BYTES / (time.thread_time() - started) / 1e9

    found: dict[str, list[float]] = {name: [] for name in ("seal", "open", "sign", "check")}
    tags = {id(piece): piece[:TAG_BYTES] for piece in sealed}
    for _ in range(repeats):
        found["seal"].append(rate(lambda piece: seal.seal(plain, b"", piece)))
        found["open"].append(rate(lambda piece: unseal.open(piece, b"", back)))
        found["sign"].append(rate(lambda piece: seal.seal(b"", plain, tags[id(piece)])))
        found["check"].append(rate(lambda piece: unseal.open(tags[id(piece)], plain, empty)))
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
