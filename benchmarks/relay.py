"""benchmarks.relay: a payload pulled over loopback, directly and through a rack's leader. Prints
one JSON object.

    python -m benchmarks.relay --megabytes 256 --repeats 9

Reader, leader and holder are processes of their own. The reader fetches with a key, so that the
leader carries sealed bytes, as BulkLane does it; the two ways take turns in every repeat.

`measured` is the CPU time of the leader, all threads, in seconds per GB carried. `of_direct` is the
time of the direct pull / that of the carried one: below 1 where the three processes share cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

from benchmarks._common import Goal, limit, ratios, read_options, report, spread, spreads
from mend.transport.bulk_client import BulkLane, checksum_of
from mend.transport.security import Secrets
from mend.types import Address, Member, offer_key

GOAL = Goal("<= 1 s of the leader's CPU per GB carried", 1.0, "s/GB", better="lower")
KEY = offer_key(Member(0, 1), 1, 0, 1)
LEADER, HOLDER = b"token of rank 0.", b"token of rank 1."
OPTIONS = {
    "megabytes": (256, "payload in 10^6 bytes"),
    "repeats": (9, "turns that both ways take"),
}


def lane(token: bytes, port: int = 0) -> BulkLane:
    ports = (port, port) if port else None
    secrets = Secrets([bytes(range(32))])
    return BulkLane("127.0.0.1", ports, token=token, secrets=secrets, job=LEADER)


def main() -> None:
    options = read_options("relay", __doc__, OPTIONS)
    size = options.megabytes * 1_000_000
    with contextlib.ExitStack() as stack:
        holder, leader = (stack.enter_context(process(hold, size)) for hold in (_hold, _lead))
        far, checksum = holder.recv()
        leader.send(far)
        measured = asyncio.run(_measure(leader, far, checksum, size, options.repeats))
    seconds, cpu_s = measured
    speeds = {name: [size / s / 1e9 for s in each] for name, each in seconds.items()}
    more = {
        "of_direct": spread(ratios(seconds["direct"], seconds["carried"])),
        "gigabytes_per_second": spreads(speeds),
    }
    plain = limit("the direct pull", "GB/s", speeds["direct"])
    report("relay", GOAL, [s / size * 1e9 for s in cpu_s], options, plain, more)


@contextlib.contextmanager
def process(target: Callable[[Connection, int], None], size: int) -> Iterator[Connection]:
    """A pipe to a process that ends with the block."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    running = spawn.Process(target=target, args=(theirs, size), daemon=True)
    running.start()
    try:
        yield ours
        ours.send(None)
    finally:
        running.join(10)


def _hold(pipe: Connection, size: int) -> None:
    data = memoryview(random.Random(0).randbytes(1_000_000) * (size // 1_000_000))
    with contextlib.closing(lane(HOLDER)) as made:
        made.serve(KEY, data)
        pipe.send((made.address, checksum_of(data)))
        pipe.recv()


def _lead(pipe: Connection, _: int) -> None:
    """Answers with the CPU time of this process so far, and the bytes carried."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with contextlib.closing(lane(LEADER, port)) as made:
        made.relay({HOLDER: Address(*pipe.recv())})
        pipe.send(made.address)
        while pipe.recv() is not None:
            pipe.send((time.process_time(), made.bytes_relayed))


async def _measure(
    leader: Connection, far: Address, checksum: str, size: int, repeats: int
) -> tuple[dict[str, list[float]], list[float]]:
    """The first round warms up and is not counted."""
    at = {"direct": Address(*far), "carried": Address(*leader.recv())}
    into = memoryview(bytearray(b"x") * size)
    seconds: dict[str, list[float]] = {name: [] for name in at}
    cpu_s = []
    with contextlib.closing(lane(HOLDER)) as reader:
        for _ in range(repeats + 1):
            for name, address in at.items():
                leader.send("cpu")
                cpu_before, carried_before = leader.recv()
                started = time.perf_counter()
                await reader.fetch([address], KEY, checksum, into)
                seconds[name].append(time.perf_counter() - started)
                if name == "carried":
                    carried = 0
                    while carried < size:  # it counts bytes behind the send that they leave with
                        leader.send("cpu")
                        cpu_after, carried_after = leader.recv()
                        carried = carried_after - carried_before
                    cpu_s.append(cpu_after - cpu_before)
    return {name: each[1:] for name, each in seconds.items()}, cpu_s[1:]


if __name__ == "__main__":
    main()
