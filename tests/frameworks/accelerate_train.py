"""A loop with Accelerate's LocalSGD, of which only the import is another.

Started by test_accelerate.py, once per rack; prints one JSON line.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from accelerate import Accelerator
from torch import nn

import mend
from mend.integrations.accelerate import LocalSGD

STEPS, ACCUMULATION = 24, 2


def main() -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    rack = mend.MendConfig().rack_number
    torch.manual_seed(rack)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.5)
    chance = torch.Generator().manual_seed(rack)
    inputs = torch.randn(ranks * STEPS * ACCUMULATION * 16, 8, generator=chance)
    rows = torch.utils.data.TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(rows, batch_size=16)
    precision = sys.argv[1] if len(sys.argv) > 1 else "no"
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATION, cpu=True, mixed_precision=precision
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
        for features, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(features), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                local_sgd.step()
    status = local_sgd.status
    assert status is not None
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(torch.eye(8)), torch.ones(8, 1)).item()
    print(
        json.dumps({
            "rack": status.rack, "outcome": status.outcome, "step": status.step,
            "digest": status.anchor_digest, "loss": loss,
            "weights": sum(p.double().sum().item() for p in model.parameters()),
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
