"""The callback in the real Trainer of Lightning, in jobs of two racks."""

from __future__ import annotations

from pathlib import Path

import pytest

from mend.determinism import digest, enable, optimizer_digest, weight_digest
from tests.frameworks.jobs import LIMIT_S, ends, launch

pytestmark = pytest.mark.timeout(3 * LIMIT_S)  # several jobs, each of which imports a framework
pytest.importorskip("lightning")
SCRIPT, FABRIC = "lightning_train.py", "fabric_train.py"


def test_fit_resumed_from_a_checkpoint_ends_with_the_weights_of_one_run(tmp_path: Path) -> None:
    """With a schedule, accumulation, clipping, validation, and tokens as weights. The checkpoint is
    of the end of an epoch: within one Lightning begins the data anew."""
    whole = ends(SCRIPT, "--callback", "--folder", tmp_path)
    assert whole[0]["global_step"] == whole[0]["step"] == 24
    assert whole[0]["tokens"] == 24 * 2 * 16
    saved = whole[0]["saved"]
    assert "step=8.ckpt" in saved
    again = ends(
        SCRIPT, "--callback", "--folder", tmp_path, "--resume", "checkpoints/step=8.ckpt"
    )  # fmt: skip
    for key in ("step", "tokens", "digest", "weights", "loss", "rate"):
        assert again[0][key] == whole[0][key], key


@pytest.mark.parametrize("fabric", [False, True])
def test_run_of_two_ranks_in_mixed_precision_resumed_ends_with_the_weights_of_one_run(
    fabric: bool, tmp_path: Path
) -> None:
    """By fit and its callback, or by Fabric, which has none: its loop takes a session."""
    options = ["--folder", tmp_path, "--ranks", 2, "--precision", "bf16-mixed"]
    script, own = (FABRIC, []) if fabric else (SCRIPT, ["--callback"])
    whole = ends(script, *own, *options, ranks=2)
    assert (whole[0]["step"], whole[0]["tokens"]) == (24, 24 * 16 * (1 if fabric else 2))
    assert fabric or "step=8.ckpt" in whole[0]["saved"]
    resumed = ["--resume"] if fabric else ["--resume", "checkpoints/step=8.ckpt"]
    again = ends(script, *own, *options, *resumed, ranks=2)
    for key in ("step", "tokens", "digest", "weights", "loss"):
        assert again[0][key] == whole[0][key], key


def test_fit_without_a_callback_joins_by_the_entry_point(tmp_path: Path) -> None:
    end = ends(SCRIPT, "--folder", tmp_path)
    assert end[0]["step"] == 24
    done = launch(SCRIPT, "--folder", tmp_path, MEND_LIGHTNING="0")
    assert done.returncode != 0, "the script asks for the callback's status"
    assert "StopIteration" in done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on loaders
def test_fit_that_an_exception_ended_has_left_and_runs_again(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    import torch

    import mend
    from mend.integrations.lightning import MendCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 1)
            self.faulty = True

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            if self.faulty and index == 3:
                raise RuntimeError("out of memory")
            return self.inner(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    module, callback = Module(), MendCallback(mend.MendConfig(rack=0, racks=1))
    rows = torch.utils.data.TensorDataset(torch.ones(32, 4))
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    options = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1,
    }  # fmt: skip
    for fault in (True, False):
        module.faulty = fault
        trainer = pl.Trainer(callbacks=[callback], default_root_dir=tmp_path, **options)
        if fault:
            with pytest.raises(RuntimeError, match="out of memory"):
                trainer.fit(module, loader)
            assert callback.runtime is None
        else:
            trainer.fit(module, loader)
    assert callback.status is not None
    assert callback.status.step == 8


def twin(device: str, seed: int, folder: Path) -> list[str]:
    """Digests of weights, optimizer, schedule and best metric after two epochs."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch import nn

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4)
            )

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> dict[str, object]:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    with enable(seed):
        module, best = Classifier(), ModelCheckpoint(dirpath=folder, monitor="val_loss")
        rows = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
        loaders = [
            torch.utils.data.DataLoader(rows, batch_size=8, shuffle=shuffle)
            for shuffle in (True, False)
        ]
        trainer = pl.Trainer(
            accelerator={"cuda": "gpu"}.get(device, device), devices=1, max_epochs=2, logger=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[best],
        )  # fmt: skip
        trainer.fit(module, *loaders)
        assert best.best_model_score is not None
        schedule = trainer.lr_scheduler_configs[0].scheduler
        return [
            weight_digest(module), optimizer_digest(trainer.optimizers[0]),
            digest(schedule.state_dict()), digest(best.best_model_score),
        ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on loaders
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fit_made_twice_has_the_same_bits_to_its_best_metric(device: str, tmp_path: Path) -> None:
    first = twin(device, 7, tmp_path / "first")
    assert twin(device, 7, tmp_path / "second") == first
    other = twin(device, 8, tmp_path / "other")
    assert [a == b for a, b in zip(first, other, strict=True)] == [False, False, True, False]
