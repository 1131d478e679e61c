"""Two racks in Ray Train, on a Ray of this machine:

    pip install 'ray[train]' && python examples/ray_train.py --folder runs/ray

A rack that is killed is replaced by Ray and joins the other one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import mend
from mend.integrations.ray import MendTorchConfig


def train(given: dict[str, Any]) -> None:
    """On every worker. MEND_* variables have this rack's place in the job."""
    config = mend.MendConfig(sync_period_steps=16)
    rack = config.rack_number
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    found = mend.newest_checkpoint(Path(given["folder"]) / "checkpoints")
    own = found / f"rack-{rack}" / "script.pt" if found is not None else None
    if own is not None and own.exists():  # else it is of a time when this rack was dead
        model_state, optimizer_state = torch.load(own)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)

    def save(path: Path) -> None:
        torch.save([model.state_dict(), optimizer.state_dict()], path / "script.pt")

    with mend.session(model, config, optimizer, resume=found) as runtime:
        for step in range(runtime.status().step + 1, given["steps"] + 1):
            chance = torch.Generator().manual_seed(2 * step + rack)  # each rack its own rows
            rows = torch.randn(32, 8, generator=chance)
            loss = nn.functional.mse_loss(model(rows), rows.square().sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 100 == 0:
                runtime.record(loss=loss.item())
                runtime.checkpoint(Path(given["folder"]) / "checkpoints" / f"step-{step}", save)
    print(f"rack {rack}: {runtime.status().outcome}, {runtime.anchor_digest()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", required=True, help="shared by all nodes")
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    folder = str(Path(given.folder).absolute())
    ray.init(include_dashboard=False)  # on a cluster: ray.init()
    TorchTrainer(
        train,
        train_loop_config={"folder": folder, "steps": given.steps},
        torch_config=MendTorchConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="mend", storage_path=folder, failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()


if __name__ == "__main__":
    main()
