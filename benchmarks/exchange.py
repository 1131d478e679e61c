"""benchmarks.exchange: one blocking outer step of several racks over a shaped link, as a mesh and
sharded, against a gloo all-reduce of the same bytes. Prints one JSON object.

    python -m benchmarks.exchange --racks 4 --numel 5000000 --repeats 5

Every rack is a process in a network namespace of its own (docs/internals/links.md; root on Linux).
In turns, `passes` times: gloo's all_reduce (sum, fp32) of `numel` elements, then steps of mend that
capture the whole model, exchange it, merge, digest, decide by quorum and apply (lockstep, one
fragment, no overlap), as a mesh and sharded. The time of a turn is from when the last rack begins
until the last has ended, of all three: no rack can have a sum before the last has brought its
numbers. Without iperf3, `--unmeasured`: gloo's time shows the rate of the link.

Without the right to make namespaces, in a user namespace where the kernel allows them and
/dev/net/tun is there:

    unshare -Urnm sh -c 'mount -t tmpfs none /run && python -m benchmarks.exchange --unmeasured'

Where it does not, `--paced`: racks on loopback, and mend's lane keeps to the rate by itself, in and
out, with the round-trip time as a delay of each pull; its small messages are not slowed. gloo is
not run: in its place is the time that a ring needs at least, 2 (R - 1) / R payloads at the rate and
2 (R - 1) ways, without headers.

`measured` is the median over repeats of sharded / the median of gloo. `payloads` is what a rack
receives in a round, in payloads: `of_lane` is counted by mend at its sockets, `of_interface` by the
kernel, all protocols and headers. In a mesh it is R - 1, sharded 2 (R - 1) / R. `digests` must be
one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

import mend
from benchmarks._common import LOOPBACK, Flat, Goal, limit, noise, read_options, report, spreads
from mend.tools.links import Link, links
from mend.transport.bulk_link import HolderEnd, ReaderEnd
from mend.transport.bulk_wire import read_exactly

GOAL = Goal("<= 1.15 x gloo's all_reduce", 1.15, "x gloo")
PIECE_BYTES = 16 << 10
"""Sent and taken at once by a paced lane."""
TURNS = ("gloo", "mesh", "sharded")
PORT, GLOO_PORT = 21_900, 29_400
END_S = 240.0
COUNTER = Path("/sys/class/net/mend0/statistics/rx_bytes")
OPTIONS = {
    "racks": (4, "processes"),
    "numel": (5_000_000, "fp32 elements; 5000000 are 20 MB"),
    "repeats": (5, "rounds of each"),
    "passes": (1, "of all in turns"),
    "unmeasured": (False, "do not measure the link first"),
    "link": ("100mbit,2ms", "of a rack"),
    "paced": (False, "no namespaces; see above"),
    # of a rack's own process
    "rack": (-1, ""),
    "turn": ("", ""),
    "hosts": ("", ""),
}


def main() -> None:
    options = read_options("exchange", __doc__, OPTIONS)
    if options.rack >= 0:
        torch.set_num_threads(1)
        print(json.dumps(_gloo(options) if options.turn == "gloo" else _mend(options)))
        return
    turns: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.passes):
        for turn in TURNS:
            results = _run_turn(options, turn)
            for one, more in zip(turns.setdefault(turn, results), results, strict=True):
                assert one.get("digest") == more.get("digest"), "equal rounds have equal results"
                for key in ("spans", "lane", "interface") if one is not more else ():
                    one[key] += more[key]
    times = {
        turn: [_turn_s(spans) for spans in zip(*(one["spans"] for one in found), strict=True)]
        for turn, found in turns.items()
    }
    raw = statistics.median(times["gloo"])
    of_gloo = [each / raw for each in times["sharded"]]
    digests = {one["digest"] for turn in TURNS[1:] for one in turns[turn]}
    base = "a ring at the rate, computed" if options.paced else "gloo all_reduce"
    plain = limit(base, "s", times["gloo"])
    more = {
        "seconds": spreads(times),
        "payloads": {turn: _payloads(options, found) for turn, found in turns.items()},
        "digests": len(digests),
    }
    report("exchange", GOAL, of_gloo, options, plain, more, also=len(digests) == 1)


def _run_turn(options: argparse.Namespace, turn: str) -> list[dict[str, Any]]:
    """The result of every rack in a turn."""
    link, measure = Link.parse(options.link), not options.unmeasured
    if options.paced and turn == "gloo":
        # Least time of a ring of the racks to sum fp32, in 2 (R - 1) turns of 1 / R.
        share_s = 32 * options.numel / options.racks / link.rate_bits + link.rtt_ms / 2000
        span = (0.0, 2 * (options.racks - 1) * share_s)
        return [{"spans": [span] * options.repeats, "lane": 0, "interface": 0}]
    if options.paced:
        return _start_racks(options, turn, [((), LOOPBACK)] * options.racks)
    with links(link, racks=options.racks, witness=False, measure=measure) as net:
        return _start_racks(options, turn, [(site.prefix, site.host) for site in net.racks])


def _start_racks(
    options: argparse.Namespace, turn: str, sites: Sequence[tuple[Sequence[str], str]]
) -> list[dict[str, Any]]:
    """The result of every rack, each at its site: (prefix of its command, host)."""
    names = ("racks", "numel", "repeats", "link")
    asked = [f"--{name}={getattr(options, name)}" for name in names]
    asked += ["--paced"] if options.paced else []
    hosts = ",".join(host for _, host in sites)
    started = [
        subprocess.Popen(
            [*prefix, sys.executable, "-m", "benchmarks.exchange", *asked,
             f"--rack={rack}", f"--turn={turn}", f"--hosts={hosts}"],
            stdout=subprocess.PIPE,
        )
        for rack, (prefix, _) in enumerate(sites)
    ]  # fmt: skip
    try:
        outputs = [child.communicate(timeout=END_S)[0] for child in started]
    finally:
        for child in started:
            child.kill()
            child.wait()
    return [json.loads(output) for output in outputs]


class Pace:
    """One direction of a rack: bytes wait until the rate allows them."""

    def __init__(self, rate_bits: int) -> None:
        self._rate_bits, self._free_s, self._lock = rate_bits, 0.0, threading.Lock()

    def wait(self, size: int) -> None:
        with self._lock:
            start_s = max(time.monotonic(), self._free_s)
            self._free_s = start_s + 8 * size / self._rate_bits
            until_s = self._free_s
        time.sleep(max(0.0, until_s - time.monotonic()))


def _pace(rate_bits: int) -> None:
    """Hold the payloads of this process's lane to the rate, all connections together."""
    out, into = Pace(rate_bits), Pace(rate_bits)

    def send(self: HolderEnd, first: bytes | memoryview, second: bytes | memoryview) -> None:
        self.sock.sendall(first)
        whole = memoryview(second)
        for start in range(0, len(whole), PIECE_BYTES):
            piece = whole[start : start + PIECE_BYTES]
            out.wait(len(piece))
            self.sock.sendall(piece)

    def read(self: ReaderEnd, key: bytes, offset: int, digest: bytes, whole: memoryview) -> bool:
        for start in range(0, len(whole), PIECE_BYTES):
            piece = whole[start : start + PIECE_BYTES]
            into.wait(len(piece))
            read_exactly(self.sock, piece)
        return bool(xxhash.xxh3_128_digest(whole) == digest)

    HolderEnd._send = send  # type: ignore[method-assign]
    ReaderEnd.body = read  # type: ignore[method-assign]


def _turn_s(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds of one turn; by rack (begun, ended), of the one clock of this machine."""
    return max(ended for _, ended in spans) - max(begun for begun, _ in spans)


def _payloads(options: argparse.Namespace, found: list[dict[str, Any]]) -> dict[str, float]:
    """The most that a rack received in a round, on average."""
    payload = 4 * options.numel * options.repeats * options.passes
    kinds = ("lane", "interface")
    return {f"of_{k}": round(max(one[k] for one in found) / payload, 4) for k in kinds}


def _gloo(options: argparse.Namespace) -> dict[str, Any]:
    hosts, rack = options.hosts.split(","), options.rack
    store = dist.TCPStore(hosts[0], GLOO_PORT, options.racks, is_master=rack == 0)
    device = dist.ProcessGroupGloo.create_device(hostname=hosts[rack])
    made = dist.ProcessGroupGloo._Options()
    made._devices, made._timeout = [device], timedelta(seconds=END_S)
    group = dist.ProcessGroupGloo(store, rack, options.racks, made)
    buffer_N = torch.ones(options.numel)
    group.allreduce([torch.ones(1024)]).wait()
    before, spans = _received(), []
    for _ in range(options.repeats):
        group.barrier().wait()
        begun_s = time.monotonic()
        group.allreduce([buffer_N]).wait()
        spans.append((begun_s, time.monotonic()))
    received = _received() - before
    group.barrier().wait()
    return {"spans": spans, "lane": received, "interface": received}


def _mend(options: argparse.Namespace) -> dict[str, Any]:
    hosts, rack = options.hosts.split(","), options.rack
    link = Link.parse(options.link)
    if options.paced:
        _pace(link.rate_bits)
    model = Flat(options.numel, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = mend.MendConfig(
        rack=rack,
        racks=options.racks,
        sideband_peers=tuple(f"tcp://{host}:{PORT + r}" for r, host in enumerate(hosts)),
        insecure=True,
        fragments=1,
        sync_period_steps=1,
        overlap_steps=0,
        outer_optimizer_momentum=0.0,
        lockstep=True,
        exchange_plan=options.turn,
        simulated_merge_delay_ms=link.rtt_ms if options.paced else 0,
    )
    runtime = mend.mend_init(model, config, optimizer)
    assert runtime is not None, "every process is a rank"
    spans, before = list[tuple[float, float]](), (0, 0)
    (parameter,) = model.parameters()
    for step in range(options.repeats + 1):
        parameter.grad = noise(options.numel, 1000 * rack + step)
        runtime.count_tokens(1 + rack)
        begun_s = time.monotonic()
        optimizer.step()
        spans.append((begun_s, time.monotonic()))
        if step == 0:  # all are there, and connections are open
            before = (runtime.status().bytes_received, _received())
    after = (runtime.status().bytes_received, _received())
    digest = runtime.status().anchor_digest
    mend.mend_shutdown(model)
    found = zip(("lane", "interface"), before, after, strict=True)
    return {"spans": spans[1:], "digest": digest} | {k: b - a for k, a, b in found}


def _received() -> int:
    return int(COUNTER.read_text()) if COUNTER.exists() else 0


if __name__ == "__main__":
    main()
