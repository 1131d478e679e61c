"""Rows of the benchmarks that tsugi-mend 0.1.5 can do.

It is a library of parts: there is no data plane and no whole outer step to be timed.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from tsugi_mend import MendConfig, mend_init, mend_shutdown
from tsugi_mend.compression import int8_quantize_delta, quant4_encode
from tsugi_mend.reducer import LearnerFragment, token_weighted_merge
from tsugi_mend.runtime import get_runtime
from tsugi_mend.sideband import Sideband

from benchmarks._common import noise
from benchmarks.peers import Found
from mend.tools.ports import LOOPBACK, free_ports

REPEATS = 3


def merge(asked: dict[str, Any]) -> Found:
    """Share of memcpy, counted as our row does: payloads and anchor read, anchor written. It has no
    outer step and no digest, and uses all of torch's threads; here one, as our row."""
    torch.set_num_threads(1)
    numel, shares = asked.get("numel", 100_000_000), {}
    anchor, out = noise(numel, 99), torch.empty(numel)
    for racks in asked.get("racks", [2, 4, 8]):
        parts = [LearnerFragment(f"rack-{m}", 1, [noise(numel, m)], m + 1) for m in range(racks)]
        shares[racks] = []
        for repeat in range(REPEATS + 1):
            plain_s = _seconds(lambda: out.copy_(anchor))
            merge_s = _seconds(lambda parts=parts: token_weighted_merge(parts))  # type: ignore[misc]
            if repeat:
                shares[racks].append((racks + 2) / 2 * plain_s / merge_s)
    least = min(shares.values(), key=statistics.median)
    return Found(least, "of memcpy", "mean only: no outer step, no digest", better="higher")


def hooks(asked: dict[str, Any]) -> Found:
    """step_begin + step_end, around nothing."""
    model = nn.Linear(4, 4, bias=False)
    mend_init(model, MendConfig(async_tp_enabled=False, sideband_peers=()), "rank-0")
    runtime, steps = get_runtime(model), asked.get("steps", 300)

    def block() -> None:
        for step in range(steps):
            runtime.step_begin(step)
            runtime.step_end(step)

    blocks = [_seconds(block) * 1e6 / steps for _ in range(asked.get("blocks", 300))]
    mend_shutdown(model)
    return Found(blocks, "us", "no sideband, nothing due")


def encode(asked: dict[str, Any]) -> Found:
    """int8 and int4, which are what it has; one thread."""
    torch.set_num_threads(1)
    numel = asked.get("numel", 50_000_000)
    delta = 1e-3 * noise(numel, 1)
    speeds = {
        name: [4 * numel / 1e9 / _seconds(lambda run=run: run(delta)) for _ in range(REPEATS)]  # type: ignore[misc]
        for name, run in (("int8", int8_quantize_delta), ("int4", quant4_encode))
    }
    note = ", ".join(f"{name} {statistics.median(each):.2f}" for name, each in speeds.items())
    return Found(speeds["int4"], "GB/s", f"{note}; int8 has no form to be sent", better="higher")


def sideband(asked: dict[str, Any]) -> Found:
    """CPU of a process with one sideband and so many peers, plain; the peers in another process."""
    count, every_ms = asked.get("peers", 8), asked.get("interval_ms", 100)
    ports = free_ports(count + 1)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    others = spawn.Process(target=_others, args=(theirs, ports, every_ms), daemon=True)
    others.start()
    ours.recv()

    async def measured() -> list[float]:
        band = _sideband(ports[0], ports[1:], every_ms)
        await band.start()
        await asyncio.sleep(1)
        shares = []
        for _ in range(asked.get("runs", 3)):
            began_s, cpu_s = time.perf_counter(), time.process_time()
            await asyncio.sleep(asked.get("seconds", 10))
            shares.append(100 * (time.process_time() - cpu_s) / (time.perf_counter() - began_s))
        await band.stop()
        return shares

    found = asyncio.run(measured())
    others.kill()
    return Found(found, "% of a core", "plain text, a connection per heartbeat")


def heartbeat(asked: dict[str, Any]) -> Found:
    """Largest gap at a listener while the outer step, run as it says, merges on its loop."""
    numel, members = asked.get("numel", 100_000_000), asked.get("members", 4)
    torch.set_num_threads(1)
    heard: list[float] = []
    address, listening = _listener(heard)
    own = free_ports(1)[0]
    model = nn.Linear(4, 4, bias=False)
    config = MendConfig(
        async_tp_enabled=False,
        sideband_addr=f"tcp://{LOOPBACK}:{own}",
        sideband_peers=(address,),
        sideband_heartbeat_ms=100,
        quorum_min_learners=members,
        grace_window_ms=10,
    )
    mend_init(model, config, "rank-0")
    runtime = get_runtime(model)
    parts = [LearnerFragment(f"rack-{m}", 0, [noise(numel, m)], m + 1) for m in range(members)]
    time.sleep(0.5)
    gaps = []
    for number in range(min(asked.get("merges", 8), REPEATS)):
        before = len(heard)
        for part in parts:
            part.round_id = number
        runtime.outer_step_begin(number, _provider(parts))
        while runtime.outer_step_collect() is None:
            time.sleep(0.01)
        time.sleep(0.3)
        gaps.append(1e3 * max(b - a for a, b in pairwise(heard[max(0, before - 1) :])))
    mend_shutdown(model)
    listening.set()
    return Found(gaps, "ms", "its ConcurrentOuterStep merges on the loop", measure="max")


# ------------------------------------------------------------------ parts


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _sideband(port: int, peers: list[int], every_ms: int) -> Sideband:
    addresses = tuple(f"tcp://{LOOPBACK}:{peer}" for peer in peers)
    return Sideband(f"rank-{port}", "here", f"tcp://{LOOPBACK}:{port}", addresses, every_ms, 1.0)


def _others(pipe: Connection, ports: list[int], every_ms: int) -> None:
    async def live() -> None:
        for port in ports[1:]:
            await _sideband(port, ports[:1], every_ms).start()
        pipe.send("listening")
        await asyncio.Event().wait()

    asyncio.run(live())


def _provider(parts: list[LearnerFragment]) -> Callable[[], asyncio.Queue[LearnerFragment]]:
    """The source of fragments of its outer step, with all of them at once."""

    def give() -> asyncio.Queue[LearnerFragment]:
        queue: asyncio.Queue[LearnerFragment] = asyncio.Queue()
        for part in parts:
            queue.put_nowait(part)
        return queue

    return give


def _listener(heard: list[float]) -> tuple[str, threading.Event]:
    """Notes when heartbeats arrive, in a thread of its own; they come on new connections."""
    ready, over, port = threading.Event(), threading.Event(), free_ports(1)[0]

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readline():
            heard.append(time.perf_counter())
        writer.close()

    async def listen() -> None:
        server = await asyncio.start_server(note, LOOPBACK, port)
        ready.set()
        await asyncio.to_thread(over.wait)
        server.close()

    threading.Thread(target=lambda: asyncio.run(listen()), daemon=True).start()
    ready.wait()
    return f"tcp://{LOOPBACK}:{port}", over


ROWS = {
    "merge": merge,
    "hooks": hooks,
    "encode": encode,
    "sideband": sideband,
    "heartbeat": heartbeat,
}
