"""Rows of the benchmarks that torchft 0.2.0 can do."""

from __future__ import annotations

import argparse
import logging
import os
import time
from datetime import timedelta
from typing import Any

os.environ.setdefault("RUST_LOG", "error")  # several lines per step otherwise

# After the line above, which it needs.
import torch
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from benchmarks._common import Flat, RackArgs, Racks, noise
from benchmarks.outer_sync import against_gloo, gloo_of, time_turn
from benchmarks.peers import Found
from mend.tools.ports import LOOPBACK

MERGES_BEFORE = 4
WAIT_S = 60.0


def outer_sync(asked: dict[str, Any]) -> Found:
    """One step of DiLoCo that exchanges the whole model, against gloo's all_reduce by turns."""
    numel, repeats = asked.get("numel", 50_331_648), asked.get("repeats", 15)
    with_lighthouse = _lighthouse(2)
    options = argparse.Namespace(numel=numel, repeats=repeats, lighthouse=with_lighthouse[1])
    results = [pipe.recv() for pipe in Racks(_syncing, options, 2).start_all()]
    *_, times = against_gloo(results, "sync")
    return Found(times, "x gloo", "DiLoCo, sync_every 1, one fragment, SGD lr 1 outside")


def kill(asked: dict[str, Any]) -> Found:
    """Two replica groups, all time-outs as they are by default; the second one is killed."""
    times = []
    for _ in range(asked.get("repeats", 5)):
        lighthouse = _lighthouse(1)
        job = Racks(_committing, _training(asked, lighthouse[1], 1.0), 2)
        job.start_all()
        for _ in range(MERGES_BEFORE):
            job.pipes[0].recv()
        killed_s, merged_s = job.kill(1), None
        while merged_s is None and job.pipes[0].poll(WAIT_S):
            at_s, _steps = job.pipes[0].recv()
            merged_s = at_s - killed_s if at_s > killed_s else None
        times.append(WAIT_S if merged_s is None else merged_s)
        job.kill(0)
        lighthouse[0].shutdown()
    return Found(times, "s", "min_replicas 1, no witness; the killed one does not coordinate")


def straggler(asked: dict[str, Any]) -> Found:
    """Three replica groups, the last one as fast as the others and so many times slower."""
    factor, gap = asked.get("factor", 15.0), asked.get("gap", 8)
    costs = []
    for _ in range(asked.get("repeats", 5)):
        alike, slow = (_pace_s(asked, each) for each in (1.0, factor))
        costs.append((slow - alike) * gap * 1e3)
    return Found(
        costs, "ms", "min_replicas 1; what became of the slow group's work is not looked at"
    )


# ------------------------------------------------------------------ parts


def _lighthouse(least: int) -> tuple[LighthouseServer, str]:
    server = LighthouseServer(bind="[::]:0", min_replicas=least)
    return server, f"http://{LOOPBACK}:{server.address().rsplit(':', 1)[1]}"


def _training(asked: dict[str, Any], lighthouse: str, factor: float) -> argparse.Namespace:
    """Options of groups that train by sleeping."""
    wanted = {"numel": 1 << 16, "gap": 8, "step_ms": 25.0}
    found = {key: asked.get(key, default) for key, default in wanted.items()}
    return argparse.Namespace(**found, lighthouse=lighthouse, factor=factor)


def _pace_s(asked: dict[str, Any], factor: float) -> float:
    """Seconds per step of the first group, from its first merge on."""
    lighthouse = _lighthouse(1)
    job = Racks(_committing, _training(asked, lighthouse[1], factor), 3)
    for pipe in job.start_all():
        pipe.recv()
    began_s, began = job.pipes[0].recv()
    ended_s, ended = began_s, began
    while ended_s - began_s < asked.get("seconds", 30.0):
        ended_s, ended = job.pipes[0].recv()
    for rack in range(3):
        job.kill(rack)
    lighthouse[0].shutdown()
    return (ended_s - began_s) / (ended - began)


def _manager(args: RackArgs, least: int) -> tuple[Manager, TCPStore]:
    logging.getLogger("torchft").setLevel(logging.ERROR)
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)), load_state_dict=None, state_dict=None,
        min_replica_size=least, use_async_quorum=False, rank=0, world_size=1, store_addr=LOOPBACK,
        store_port=store.port, lighthouse_addr=args.options.lighthouse, hostname=LOOPBACK,
        replica_id=f"rack{args.rack}", init_sync=False,
    )  # fmt: skip
    return manager, store


def _diloco(manager: Manager, model: torch.nn.Module, every: int) -> torch.optim.Optimizer:
    """An optimizer whose step trains nothing and, every so often, exchanges the model."""
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    DiLoCo(manager, [model], inner, outer, sync_every=every, use_bucketization=True).__enter__()
    return inner


def _syncing(args: RackArgs) -> None:
    torch.set_num_threads(1)
    group, buffer = gloo_of(args), torch.empty(args.options.numel)
    model = Flat(args.options.numel, 1)
    manager, _store = _manager(args, 2)
    optimizer = _diloco(manager, model, 1)
    move = noise(args.options.numel, 11 + args.rack) * 1e-3
    found: dict[str, list[float]] = {"gloo": [], "sync": []}
    turns = [("gloo", lambda: group.allreduce([buffer]).wait()), ("sync", optimizer.step)]
    for repeat in range(args.options.repeats + 1):
        model.parts[0].data.add_(move)
        buffer.fill_(1.0)
        for name, turn in turns if repeat % 2 else reversed(turns):
            taken_s, _ = time_turn(group, turn)
            if repeat:
                found[name].append(taken_s)
    assert manager.current_step() >= args.options.repeats, "torchft did not commit every step"
    args.pipe.send(found)
    args.pipe.recv()


def _committing(args: RackArgs) -> None:
    """Send when each merge was committed, and after which step."""
    torch.set_num_threads(1)
    model = Flat(args.options.numel, 1)
    manager, _store = _manager(args, 1)
    optimizer = _diloco(manager, model, args.options.gap)
    slower = args.options.factor if args.rack == 2 else 1.0
    committed = steps = 0
    while True:
        time.sleep(slower * args.options.step_ms / 1e3)
        optimizer.step()
        steps += 1
        if manager.current_step() > committed:
            committed = manager.current_step()
            args.pipe.send((time.monotonic(), steps))


ROWS = {"outer_sync": outer_sync, "straggler": straggler, "kill": kill}
