"""A rack that trains a layer with dropout by a DeterministicTrainer, which it does not register.

`python -m tests.process.dropout '{"out": "...", "steps": 8, ...}'`, see Options.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.process.train import load, run_script, save


@dataclass(frozen=True)
class Options:
    out: str
    steps: int
    config: dict[str, Any] = field(default_factory=dict)
    checkpoints: dict[str, str] = field(default_factory=dict)
    """step -> folder of the checkpoint that is made after it."""
    resume: str = ""


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def run(options: Options, result: dict[str, Any]) -> None:
    import mend
    from mend.determinism import DeterministicTrainer

    rack = int(os.environ["MEND_RACK"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if options.resume:
        load(Path(options.resume) / f"rack-{rack}", model, optimizer)
    trainer = DeterministicTrainer(model, optimizer, seed=7)
    config, resume = mend.MendConfig(**options.config), options.resume or None
    with mend.session(model, config, optimizer, resume=resume) as runtime:
        for step in range(runtime.status().step + 1, options.steps + 1):
            loss = trainer.step(torch.ones(4, 16), loss_of)
            result.setdefault("losses", []).append(struct.pack(">f", loss.item()).hex())
            if folder := options.checkpoints.get(str(step)):
                runtime.checkpoint(folder, partial(save, model, optimizer, "", False))
    result["steps"] = trainer.steps


if __name__ == "__main__":
    run_script(Options, run)
