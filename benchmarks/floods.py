"""benchmarks.floods: commits per second of a job under a flood. Prints one JSON object.

    python -m benchmarks.floods --repeats 3 --save

Two racks on loopback train by sleeping `step-ms` per step and merge every `gap` steps, once without
and once with a key. One process that has no key floods rack 0, which coordinates, as fast as it
can:

garbage     frames of 300 bytes that are no message, over 4 connections of ZeroMQ
handshakes  connections of CURVE with keys of its own, 50 open at a time
half-open   connections to the sideband and to the lane that say nothing, 200 open at a time

Each flood also hits a bystander: a process of its own with the same sideband and lane, which has no
part in the job. What a job loses then is what a busy machine costs; the rest is the flood. The
phases take turns in every repeat: no flood, then each flood at the bystander and at the job.

`measured` is, of all floods with and without a key, the least median of the commits per second of
a job under a flood to those with the same flood at the bystander. `cpu` is what rack 0's process
used, in cores; `floods_per_second` what was thrown: frames or connections.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from benchmarks._common import (
    LOOPBACK,
    Goal,
    RackArgs,
    limit,
    read_options,
    report,
    spreads,
    with_options,
)
from benchmarks._work import JOB, Job, every_gap, run_racks, work
from mend.tools.keys_command import create
from mend.tools.ports import free_ports
from mend.transport.bulk_client import BulkLane
from mend.transport.security import Secrets
from mend.transport.zmq import ZmqSideband
from mend.types import Peer

GOAL_TEXT = ">= 0.9 of the commits with the flood at a bystander"
GOAL = Goal(GOAL_TEXT, 0.9, "of the commits with the flood beside it", better="higher")
SECRET = bytes(range(32))
FRAME_BYTES, CONNECTIONS, OPEN_MAX, KNOCKING_MAX = 300, 4, 200, 50
SETTLE_S = 0.5
TOKEN = b"benchmarks.flood"

KINDS = ("commits_per_second", "cpu", "floods_per_second")

Ports = tuple[int, int]
"""(port of a sideband, port of a lane)."""
Figures = dict[str, dict[str, list[float]]]
"""Kind of figure -> phase -> its value in every repeat."""


def main() -> None:
    options = read_options("floods", __doc__, OPTIONS)
    found: dict[str, Figures] = {
        keys: {kind: defaultdict(list) for kind in KINDS}
        for keys in ("without a key", "with a key")
    }
    with tempfile.TemporaryDirectory() as folder:
        create(Path(folder) / "key", (SECRET,))
        for _ in range(options.repeats):
            for keys, figures in zip(("", f"{folder}/key"), found.values(), strict=True):
                _job(options, keys, figures)
    ratios = {
        f"{flood}, {keys}": [
            there / max(beside, 1 / options.seconds)  # none at all counts as one
            for there, beside in zip(
                figures["commits_per_second"][f"{flood} at the job"],
                figures["commits_per_second"][f"{flood} at a bystander"],
                strict=True,
            )
        ]
        for keys, figures in found.items()
        for flood in options.floods.split(",")
    }
    worst = min(ratios.values(), key=statistics.median)
    quiet = found["without a key"]["commits_per_second"]["none"]
    plain = limit("commits without any flood", "1/s", quiet, 2)
    more = {
        "ratios": spreads(ratios, 2),
        **{
            keys: {kind: spreads(phases, 2) for kind, phases in figures.items()}
            for keys, figures in found.items()
        },
    }
    report("floods", GOAL, worst, options, plain, more)


# ------------------------------------------------------------------ the job and its bystander


def _job(options: argparse.Namespace, keys: str, figures: Figures) -> None:
    """Run all phases of one job."""
    lane, *beside = free_ports(3)
    fork = get_context("forkserver")
    ours, theirs = fork.Pipe()
    args = (theirs, tuple(beside), bool(keys))
    bystander = fork.Process(target=_bystander, args=args, daemon=True)
    bystander.start()
    try:
        with run_racks(_rack, with_options(options, keys=keys, lane=lane)) as job:
            targets = {"a bystander": tuple(beside), "the job": (job.racks.ports[0], lane)}
            job.must(lambda seen: seen.commits >= 4, "merges are made")
            ours.recv()
            _measure(job, options.seconds, None, None, "none", figures)
            for flood in options.floods.split(","):
                for where, ports in targets.items():
                    _measure(job, options.seconds, flood, ports, f"{flood} at {where}", figures)
            job.end()
    finally:
        ours.close()
        bystander.join(5)


def _rack(args: RackArgs) -> None:
    options = args.options
    settings: dict[str, Any] = every_gap(options)
    if args.rack == 0:
        settings["data_ports"] = f"{options.lane}-{options.lane}"
    if options.keys:
        settings["key_file"] = options.keys
    work(args, options.step_ms, **settings)


def _measure(
    job: Job, seconds: float, flood: str | None, ports: Ports | None, phase: str, figures: Figures
) -> None:
    fork = get_context("forkserver")
    ours, theirs = fork.Pipe()
    attacker = None
    if flood is not None:
        attacker = fork.Process(target=_attack, args=(theirs, flood, ports), daemon=True)
        attacker.start()
        ours.recv()
    job.run(SETTLE_S)
    pid, began = job.racks.pid(0), len(job.seen)
    cpu_s, since_s = _cpu_seconds(pid), time.monotonic()
    job.run(seconds)
    took_s = time.monotonic() - since_s
    figures["cpu"][phase].append((_cpu_seconds(pid) - cpu_s) / took_s)
    before = max(seen.commits for seen in job.seen[:began])
    commits = max((seen.commits for seen in job.seen[began:]), default=before) - before
    figures["commits_per_second"][phase].append(commits / took_s)
    if attacker is not None:
        ours.send("end")
        figures["floods_per_second"][phase].append(ours.recv())
        attacker.join(5)


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process and all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _bystander(pipe: Connection, ports: Ports, keys: bool) -> None:
    async def live() -> None:
        me = Peer(0, 0)
        secrets = Secrets([SECRET], me) if keys else None
        sideband = ZmqSideband(f"tcp://{LOOPBACK}:{ports[0]}", secrets=secrets)
        lane = BulkLane(LOOPBACK, (ports[1], ports[1]), token=TOKEN, secrets=secrets)
        hearing = asyncio.create_task(_hear(sideband))
        pipe.send("listens")
        with contextlib.suppress(EOFError):
            await asyncio.to_thread(pipe.recv)
        hearing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hearing
        lane.close()
        sideband.close()

    asyncio.run(live())


async def _hear(sideband: ZmqSideband) -> None:
    while True:
        await sideband.receive()


# ------------------------------------------------------------------ floods


def _attack(pipe: Connection, flood: str, ports: Ports) -> None:
    stop = threading.Event()
    count = [0]
    thread = threading.Thread(target=FLOODS[flood], args=(ports, stop, count))
    thread.start()
    pipe.send("begun")
    since_s = time.monotonic()
    pipe.recv()
    stop.set()
    thread.join()
    pipe.send(count[0] / (time.monotonic() - since_s))


def _garbage(ports: Ports, stop: threading.Event, count: list[int]) -> None:
    context = zmq.Context()
    dealers = [context.socket(zmq.DEALER) for _ in range(CONNECTIONS)]
    poller = zmq.Poller()
    for dealer in dealers:
        dealer.connect(f"tcp://{LOOPBACK}:{ports[0]}")
        poller.register(dealer, zmq.POLLOUT)
    frame = random.Random(0).randbytes(FRAME_BYTES)
    while not stop.is_set():
        for dealer, _ in poller.poll(100):
            with contextlib.suppress(zmq.Again):
                for _ in range(100):
                    dealer.send(frame, zmq.DONTWAIT)
                    count[0] += 1
    context.destroy(linger=0)


def _handshakes(ports: Ports, stop: threading.Event, count: list[int]) -> None:
    context = zmq.Context()
    server = Secrets([SECRET]).own.server().public  # as if it were known: without it nothing begins
    public, secret = zmq.curve_keypair()
    knocking: deque[zmq.Socket[bytes]] = deque()
    while not stop.is_set():
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, server)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://{LOOPBACK}:{ports[0]}")
        knocking.append(dealer)
        count[0] += 1
        if len(knocking) >= KNOCKING_MAX:
            knocking.popleft().close()
    context.destroy(linger=0)


def _half_open(ports: Ports, stop: threading.Event, count: list[int]) -> None:
    held: deque[socket.socket] = deque()
    while not stop.is_set():
        for port in ports:
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((LOOPBACK, port), 0.2))
                count[0] += 1
            while len(held) > OPEN_MAX:
                held.popleft().close()
    for sock in held:
        sock.close()


FLOODS: dict[str, Callable[[Ports, threading.Event, list[int]], None]] = {
    "garbage": _garbage,
    "handshakes": _handshakes,
    "half-open": _half_open,
}

OPTIONS = {
    "repeats": (3, "of both jobs"),
    "seconds": (4.0, "of a phase"),
    **JOB,
    "step_ms": (10.0, "of training"),
    "floods": (FLOODS, "floods to make"),
}


if __name__ == "__main__":
    main()
