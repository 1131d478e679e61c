"""A small model in the Trainer of Lightning: what a user's script looks like.

Started by test_lightning.py, once per rack; prints one JSON line. Without --callback mend comes by
its entry point.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import mend
from mend.integrations.lightning import MendCallback


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)  # each rank sees a part of the rows

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def loader(count: int, seed: int) -> torch.utils.data.DataLoader[tuple[torch.Tensor, ...]]:
    chance = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, generator=chance)
    rows = torch.utils.data.TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    return torch.utils.data.DataLoader(rows, batch_size=16)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--resume", default="", help="a checkpoint in this rack's folder")
    parser.add_argument("--callback", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    given = parser.parse_args()

    config = mend.MendConfig()
    torch.manual_seed(config.rack_number)
    module = Regression()
    saves = ModelCheckpoint(every_n_train_steps=8, save_top_k=-1, filename="{step}")
    own = [MendCallback(config, tokens=lambda batch: len(batch[0]))] if given.callback else []
    folder = Path(given.folder) / f"rack-{config.rack_number}"
    trainer = pl.Trainer(
        max_steps=given.steps, default_root_dir=folder, callbacks=[saves, *own], logger=False,
        accelerator="cpu", devices=given.ranks, precision=given.precision,
        strategy="ddp" if given.ranks > 1 else "auto", enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0, accumulate_grad_batches=2,
    )  # fmt: skip
    validation = loader(64, 99)
    resume = str(folder / given.resume) if given.resume else None
    trainer.fit(module, loader(256, config.rack_number), validation, ckpt_path=resume)
    member = next(each for each in trainer.callbacks if isinstance(each, MendCallback))
    status = member.status
    assert status is not None
    print(
        json.dumps({
            "rack": status.rack, "outcome": status.outcome, "detail": status.outcome_detail,
            "step": status.step, "global_step": trainer.global_step, "tokens": status.tokens,
            "digest": status.anchor_digest,
            "loss": trainer.validate(module, validation, verbose=False)[0]["val_loss"],
            "rate": trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None,
            "weights": sum(p.double().sum().item() for p in module.parameters()),
            "saved": sorted(path.name for path in Path(saves.dirpath or ".").glob("*.ckpt")),
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
