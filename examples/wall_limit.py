"""Stops before a time limit, or at SIGTERM or SIGUSR1, with a checkpoint of the whole job; the next
start goes on from it: `mend launch --racks 2 examples/wall_limit.py --limit-s 10`, as often as you
like. With `--nproc-per-rack 2` the ranks of a rack share its model (DDP).

Under Slurm: examples/slurm/wall_limit.sbatch. The page: docs/checkpoints.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import mend

LOOK_STEPS = 10
"""Every so many steps the ranks of a rack ask each other whether to stop."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="from now on")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds since 1970")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    given = parser.parse_args()
    until = min(given.until, time.time() + given.limit_s)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: stop.set())

    truth = torch.randn(32, 1, generator=torch.Generator().manual_seed(0))
    model: torch.nn.Module = torch.nn.Linear(32, 1, bias=False)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    config = mend.MendConfig(sync_period_steps=20, overlap_steps=5, fragments=1)
    rack = config.rack_number
    chance = torch.Generator().manual_seed(1 + rack * ranks + rank)  # draws this rank's data
    own = f"script-{rank}.pt"  # the ranks of a rack share a folder
    found = mend.newest_checkpoint(given.folder)
    mine = found / f"rack-{rack}" / own if found is not None else None
    if mine is not None and mine.exists():  # else it is of a time when this rack was dead
        state = torch.load(mine, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        chance.set_state(state["chance"])

    def save(path: Path) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "chance": chance.get_state()}, path / own)

    stopped = False
    with mend.session(model, config, optimizer, resume=found) as runtime:
        for step in range(runtime.status().step + 1, given.steps + 1):
            inputs = torch.randn(64, 32, generator=chance)
            target = inputs @ truth + 0.5 * torch.randn(64, 1, generator=chance)
            loss = torch.nn.functional.mse_loss(model(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            runtime.count_tokens(len(inputs))
            optimizer.step()
            if step % LOOK_STEPS == 0 and runtime.any_rank(stop.is_set() or time.time() > until):
                # The same name on all racks, and another one at the next start.
                runtime.checkpoint(given.folder / f"stop-{config.job_id}", save, timeout_s=300)
                stopped = True
                break

    status = runtime.status()
    if ranks > 1:
        dist.destroy_process_group()
    if rank > 0:
        return
    (weight,) = model.parameters()
    error = (weight.detach().T - truth).norm() / truth.norm()
    print(
        f"rack={status.rack} step={status.step} versions={','.join(map(str, status.versions))} "
        f"digest={status.anchor_digest} error={error:.4f}{' (stopped)' if stopped else ''}"
    )


if __name__ == "__main__":
    main()
