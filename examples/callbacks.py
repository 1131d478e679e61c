"""A wall limit with a checkpoint in a loop that is not yours: one callback for trainers in the
style of Hugging Face, one for those in the style of Lightning.

    mend launch --racks 2 examples/callbacks.py --style hf --limit-s 10

The next start goes on from the checkpoint. The two trainers here are a few lines of plain PyTorch
and call the callbacks as theirs do; with theirs, derive the callbacks from
`transformers.TrainerCallback` and `lightning.Callback`. The page: docs/checkpoints.md.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import mend

LOOK_STEPS = 10
"""Every so many steps the ranks of a rack ask each other whether to stop."""


class Limited:
    """Joins the job, stops before the limit with a checkpoint, leaves. What both callbacks do."""

    def __init__(self, folder: Path, steps: int, limit_s: float) -> None:
        self.folder, self.steps, self.until = folder, steps, time.time() + limit_s
        self.config = mend.MendConfig(sync_period_steps=20, overlap_steps=5, fragments=1)
        self.stopped = False

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        found = mend.newest_checkpoint(self.folder)
        if found is not None:
            path = found / f"rack-{self.config.rack_number}" / "script.pt"
            state = torch.load(path, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        self.runtime = mend.mend_init(model, self.config, optimizer, resume=found)

    @property
    def step(self) -> int:
        return self.runtime.status().step

    def stops(self) -> bool:
        """After a step; mend has counted it when the optimizer made it."""
        if self.step % LOOK_STEPS == 0 and self.runtime.any_rank(time.time() > self.until):
            # The same name on all racks, and another one at the next start.
            path = self.folder / f"stop-{self.config.job_id}"
            self.runtime.checkpoint(path, self._save, timeout_s=300)
            self.stopped = True
        return self.stopped or self.step >= self.steps

    def _save(self, path: Path) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, path / "script.pt")

    def end(self) -> mend.Status | None:
        """Afterwards the model holds the merged weights."""
        return mend.mend_shutdown(self.model)


class HfCallback:  # (transformers.TrainerCallback)
    def __init__(self, limited: Limited) -> None:
        self.limited = limited

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.limited.begin(kwargs["model"], kwargs["optimizer"])
        state.global_step = self.limited.step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= self.limited.stops()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.limited.end()


class LightningCallback:  # (lightning.Callback)
    def __init__(self, limited: Limited) -> None:
        self.limited = limited

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self.limited.begin(pl_module, trainer.optimizers[0])

    def on_train_batch_end(
        self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.should_stop |= self.limited.stops()

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        self.limited.end()


# ------------------------------------------------------------------ stand-ins for the frameworks


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """On a batch of this step."""
    chance = torch.Generator().manual_seed(step)
    inputs = torch.randn(64, 32, generator=chance)
    truth = torch.randn(32, 1, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(64, 1, generator=chance)
    return nn.functional.mse_loss(model(inputs), inputs @ truth + 0.5 * noise)


def hf_style(model: nn.Module, optimizer: torch.optim.Optimizer, callback: HfCallback) -> None:
    """As `Trainer.train` calls its callbacks."""
    state, control = SimpleNamespace(global_step=0), SimpleNamespace(should_training_stop=False)
    more = {"model": model, "optimizer": optimizer}
    callback.on_train_begin(None, state, control, **more)
    while not control.should_training_stop:
        loss_of(model, state.global_step).backward()
        optimizer.step()
        optimizer.zero_grad()
        state.global_step += 1
        callback.on_step_end(None, state, control, **more)
    callback.on_train_end(None, state, control, **more)


def lightning_style(
    model: nn.Module, optimizer: torch.optim.Optimizer, callback: LightningCallback
) -> None:
    """As `Trainer.fit` calls its callbacks."""
    trainer, batch_idx = SimpleNamespace(optimizers=[optimizer], should_stop=False), 0
    callback.on_train_start(trainer, model)
    while not trainer.should_stop:
        optimizer.zero_grad()
        loss = loss_of(model, batch_idx)
        loss.backward()
        optimizer.step()
        callback.on_train_batch_end(trainer, model, loss, None, batch_idx)
        batch_idx += 1
    callback.on_train_end(trainer, model)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--style", choices=("hf", "lightning"), default="hf")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="from now on")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    given = parser.parse_args()
    model = nn.Linear(32, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    limited = Limited(given.folder, given.steps, given.limit_s)
    if given.style == "hf":
        hf_style(model, optimizer, HfCallback(limited))
    else:
        lightning_style(model, optimizer, LightningCallback(limited))
    status = limited.runtime.status()
    print(
        f"rack={status.rack} step={status.step} versions={','.join(map(str, status.versions))} "
        f"digest={status.anchor_digest} error={loss_of(model, 0).item():.4f}"
        f"{' (stopped)' if limited.stopped else ''}"
    )


if __name__ == "__main__":
    main()
