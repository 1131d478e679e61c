"""A small model in Ray Train: what a user's script looks like.

Started by test_ray.py, on a Ray of its own; every rank writes one JSON file at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import mend
from mend.integrations.ray import MendTorchConfig


def train(given: dict[str, Any]) -> None:
    config = mend.MendConfig()
    rack, rank = config.rack_number, int(os.environ["RANK"])
    folder = Path(given["folder"])
    if (folder / f"died-{rack}-{rank}").exists():
        (folder / "again").touch()
    torch.manual_seed(rack)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = mend.newest_checkpoint(folder / "checkpoints")
    own = found / f"rack-{rack}" / "script.pt" if found is not None else folder / "none"
    if own.exists():  # not in a checkpoint from a time when this rack was dead
        model_state, optimizer_state = torch.load(own)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
    ranks = dist.get_world_size()
    wrapped = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model

    def save(path: Path) -> None:
        if rank == 0:
            torch.save([model.state_dict(), optimizer.state_dict()], path / "script.pt")

    with mend.session(model, config, optimizer, resume=found) as runtime:
        first = runtime.status().step + 1
        for step in range(first, given["steps"] + 1):
            _play(given, folder, step, [rack, rank])
            chance = torch.Generator().manual_seed(1000 * step + 10 * rack + rank)
            rows = torch.randn(16, 8, generator=chance)
            loss = nn.functional.mse_loss(wrapped(rows), rows.square().sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            runtime.count_tokens(16)
            optimizer.step()
            if given["save_every"] and step % given["save_every"] == 0:
                runtime.checkpoint(folder / "checkpoints" / f"step-{step}", save)
    status = runtime.status()
    end = {
        "rack": rack, "rank": rank, "ranks": ranks, "outcome": status.outcome,
        "step": status.step, "first": first, "tokens": status.tokens,
        "digest": status.anchor_digest, "joined": status.joined_state,
        "weights": sum(p.double().sum().item() for p in model.parameters()),
        "pid": os.getpid(),
    }  # fmt: skip
    (folder / f"end-{rack}-{rank}.json").write_text(json.dumps(end))


def _play(given: dict[str, Any], folder: Path, step: int, me: list[int]) -> None:
    """Die in a step of the first life; in a job that goes on without the dead, take some time."""
    mark = folder / f"died-{me[0]}-{me[1]}"
    if step == given["die_in"] and me in given["die"] and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(given["pause"])
    if given["pause"] and step == given["steps"] // 2:
        while not (folder / "again").exists():
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=1, help="of a rack")
    parser.add_argument("--die-in", type=int, default=0, help="kill the process in this step")
    parser.add_argument("--die", default="[]", help="JSON: [rack, rank] of those")
    parser.add_argument("--pause", type=float, default=0.0, help="s per step; wait for the dead")
    parser.add_argument("--save-every", type=int, default=0)
    given = parser.parse_args()
    variables = {name: os.environ[name] for name in os.environ if name.startswith("MEND_")}
    ray.init(
        num_cpus=2, include_dashboard=False,
        runtime_env={"env_vars": {**variables, "OMP_NUM_THREADS": "1"}},
    )  # fmt: skip
    share = 1 / given.ranks
    TorchTrainer(
        train,
        train_loop_config={**vars(given), "die": json.loads(given.die)},
        torch_config=MendTorchConfig(ranks_per_rack=given.ranks),
        scaling_config=ScalingConfig(
            num_workers=2 * given.ranks, resources_per_worker={"CPU": share}
        ),
        run_config=RunConfig(
            name="run", storage_path=str(Path(given.folder) / "ray"),
            failure_config=FailureConfig(max_failures=2),
        ),
    ).fit()  # fmt: skip


if __name__ == "__main__":
    main()
