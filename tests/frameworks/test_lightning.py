"""The callback in the real Trainer of Lightning, in jobs of two racks."""

from __future__ import annotations

from pathlib import Path

import pytest

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
