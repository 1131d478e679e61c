"""mend in the `Trainer` of Lightning.

    from mend.integrations.lightning import MendCallback

    trainer = Trainer(max_steps=10_000, callbacks=[MendCallback()])
    trainer.fit(module, loader)         # afterwards the model holds the merged weights
    trainer.validate(module, loader)    # of the merged model

Without that line too: where MEND_RACK and MEND_RACKS are set, Lightning finds the callback by its
entry point; MEND_LIGHTNING=0 turns that off. The callback joins the job when `fit` begins to train
and leaves it after the last step. It writes the job's state beside each checkpoint of the Trainer,
and `trainer.fit(..., ckpt_path=...)` resumes both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from mend.config import MendConfig
from mend.config.sources import joins_from_lightning
from mend.errors import UsageError
from mend.integrations.membership import Member, Membership, name_at

KEY = "mend"
"""Key in a checkpoint: the folder of the job's state, relative to `default_root_dir`."""


class MendCallback(Member, pl.Callback):
    """Exchanges the module that `fit` trains with the other racks.

    Each rack needs a `default_root_dir` of its own where racks share a file system. `config`: None:
    from MEND_* variables. `tokens`: the weight of a batch, such as `lambda batch: batch.numel()`.
    `checkpoints`: False: the Trainer's checkpoints get no state of the job, and racks may save at
    different steps. `options`: further arguments of `mend.mend_init`, such as `determinism`.

    When training begins raises what `mend_init` raises, ConfigError, and UsageError for a
    ModelCheckpoint with `monitor` and `checkpoints`.
    """

    def __init__(
        self,
        config: MendConfig | None = None,
        *,
        tokens: Callable[[Any], int] | None = None,
        checkpoints: bool = True,
        **options: Any,
    ) -> None:
        self._given, self._tokens = (config, options, checkpoints), tokens
        self._resume: Path | None = None

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._resume = Path(trainer.default_root_dir) / checkpoint.get(KEY, "without-a-job")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self is not next(each for each in trainer.callbacks if isinstance(each, MendCallback)):
            return  # the entry point's, beside one that the script has given
        self._member = Membership(*self._given)
        if self._member.exchanges and self._member.checkpoints:
            _refuse_monitors(trainer)
        self._member.begin(pl_module, trainer.optimizers, self._resume)
        self._resume = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.runtime is not None and self._tokens is not None:
            self.runtime.count_tokens(self._tokens(batch))

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by its connector
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.runtime is not None and loss is not None and every and not (batch_idx + 1) % every:
            self.runtime.record(loss=float(loss))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Called after the Trainer has collected its own state, and before it writes it."""
        if self._member is None or self.runtime is None or not self._member.checkpoints:
            return
        name = name_at(trainer.global_step)
        self._member.checkpoint(Path(trainer.default_root_dir) / name)
        checkpoint[KEY] = name
        # The call may have applied merged weights.
        strategy = trainer.strategy
        checkpoint["state_dict"] = strategy.lightning_module_state_dict()
        checkpoint["optimizer_states"] = [strategy.optimizer_state(o) for o in trainer.optimizers]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._member is not None:
            self._member.end(pl_module)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Leave at once: `fit` ends without `on_train_end`, and may be called again."""
        if self._member is not None:
            self._member.abort()


def _refuse_monitors(trainer: pl.Trainer) -> None:
    for each in trainer.checkpoint_callbacks:
        if isinstance(each, ModelCheckpoint) and each.monitor is not None and each.save_top_k != -1:
            raise UsageError(
                f"ModelCheckpoint(monitor={each.monitor!r}): each rack would save at steps of its "
                "own, as it sees its own weights. Leave monitor out, or use save_top_k=-1, or "
                "MendCallback(checkpoints=False)"
            )


def callbacks() -> list[pl.Callback]:
    """Lightning's entry point `lightning.pytorch.callbacks_factory`."""
    return [MendCallback()] if joins_from_lightning() else []
