"""A loop with Lightning Fabric: what a user's script looks like.

Started by test_lightning.py, once per rack; each of its ranks prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn

import mend
from tests.frameworks.lightning_train import loader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--resume", action="store_true", help="go on from step 8")
    given = parser.parse_args()

    strategy = "ddp" if given.ranks > 1 else "auto"
    fabric = Fabric(
        accelerator="cpu", devices=given.ranks, strategy=strategy, precision=given.precision
    )
    fabric.launch()
    config = mend.MendConfig()
    torch.manual_seed(config.rack_number)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    data = fabric.setup_dataloaders(loader(1024, config.rack_number))
    job, own = Path(given.folder) / "job", Path(given.folder) / f"rack-{config.rack_number}.ckpt"
    if given.resume:
        fabric.load(own, {"model": model, "optimizer": optimizer})
    begin = 8 if given.resume else 0
    with mend.session(
        model, config, optimizer=optimizer, resume=job if given.resume else None
    ) as runtime:
        for step, (features, targets) in enumerate(data, start=1):
            if not begin < step <= 24:
                continue
            runtime.count_tokens(len(features))
            loss = nn.functional.mse_loss(model(features), targets)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step == 8 and not given.resume:
                runtime.checkpoint(job)
                fabric.save(own, {"model": model, "optimizer": optimizer})
    status = runtime.status()
    with torch.no_grad():
        test = nn.functional.mse_loss(model(torch.eye(8)).float(), torch.ones(8, 1)).item()
    print(
        json.dumps({
            "rack": status.rack, "rank": status.rank, "outcome": status.outcome,
            "step": status.step, "tokens": status.tokens, "digest": status.anchor_digest,
            "loss": test, "weights": sum(p.double().sum().item() for p in model.parameters()),
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
