"""Rows of the benchmarks that hivemind 1.1.12 can do."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from typing import Any

import hivemind
import torch
from hivemind.utils import get_dht_time

from benchmarks._common import RackArgs, Racks, noise
from benchmarks.outer_sync import against_gloo, gloo_of, time_turn
from benchmarks.peers import Found

REPEATS_MAX = 5
ROUND_S = 120.0
AHEAD_S = 3.0
"""Matchmaking is over by then; it is not part of what is timed."""


def outer_sync(asked: dict[str, Any]) -> Found:
    """One averaging of the whole model, against gloo's all_reduce by turns."""
    numel = asked.get("numel", 50_331_648)
    repeats = min(asked.get("repeats", 15), REPEATS_MAX)
    options = argparse.Namespace(numel=numel, repeats=repeats)
    job = Racks(_averaging, options, 2, parents=True)
    address = job.start(0).recv()
    job.start(1)
    for pipe in job.pipes.values():
        pipe.send(address)
    *_, times = against_gloo([pipe.recv() for pipe in job.pipes.values()], "sync")
    return Found(times, "x gloo", "average only: no outer step, no digest; matchmaking not timed")


def _averaging(args: RackArgs) -> None:
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # its parts cannot be pickled
    numel = args.options.numel
    if args.rack == 0:
        dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        args.pipe.send([str(address) for address in dht.get_visible_maddrs()])
    peers = args.pipe.recv()
    if args.rack == 1:
        dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=peers)
    averager = hivemind.DecentralizedAverager(
        [noise(numel, 11 + args.rack)], dht, prefix="benchmark", target_group_size=2,
        min_group_size=2, start=True,
    )  # fmt: skip
    group, buffer = gloo_of(args), torch.ones(numel)
    found: dict[str, list[float]] = {"gloo": [], "sync": []}
    for repeat in range(args.options.repeats + 1):
        when = get_dht_time() + AHEAD_S
        control = averager.step(
            wait=False, scheduled_time=when, require_trigger=True, timeout=ROUND_S, gather=None
        )
        time.sleep(2 * AHEAD_S)

        def average(control: Any = control) -> None:
            control.allow_allreduce()
            control.result(ROUND_S)

        for name, turn in (("gloo", lambda: group.allreduce([buffer]).wait()), ("sync", average)):
            taken_s, _ = time_turn(group, turn)
            if repeat:
                found[name].append(taken_s)
    args.pipe.send(found)
    args.pipe.recv()


ROWS = {"outer_sync": outer_sync}
