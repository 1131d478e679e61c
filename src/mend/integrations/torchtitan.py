"""mend in torchtitan: a `Trainer` whose model the racks merge.

    # my_run.py
    from torchtitan.models.llama3.config_registry import llama3_8b

    from mend.integrations.torchtitan import with_mend


    def llama3_8b_racks():
        return with_mend(llama3_8b())

Then `torchrun ... -m torchtitan.train --module my_run --config llama3_8b_racks`, once per rack. The
trainer joins the job at its first step, when its checkpoint is loaded, and leaves it after the last
one, before the last checkpoint and validation. Settings come from MEND_* variables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.trainer import Trainer

from mend.api import Runtime
from mend.errors import UsageError
from mend.integrations.membership import Member, Membership, name_at


def with_mend(config: Trainer.Config) -> MendTrainer.Config:
    """The same configuration for a MendTrainer. Raises UsageError for a subclass of
    `Trainer.Config`: derive its trainer from MendTrainer as well."""
    if type(config) is not Trainer.Config:
        raise UsageError(
            f"with_mend takes a torchtitan.trainer.Trainer.Config, not a {type(config).__name__}: "
            "its trainer would be replaced. Derive that trainer from MendTrainer"
        )
    return MendTrainer.Config(**{each.name: getattr(config, each.name) for each in fields(config)})


class MendTrainer(Member, Trainer):
    """Exchanges the model with the other racks. Each rack writes into `dump_folder/rack-<number>`,
    and reads its own share of the training data. The ranks of a rack may be stages of a pipeline;
    where a rank has several, the names of parameters begin with their position on that rank.

    Raises ConfigError; at the first step what `mend_init` raises.
    """

    _member: Membership
    _model: nn.Module
    """What mend exchanges. It lives as long as this trainer."""
    step: int
    """The status in progress; before and after, the last one."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        self._member = Membership(None, {})
        if self._member.exchanges:
            place = self._member.config
            config.dump_folder = str(self._member.folder_in(config.dump_folder))
            config.dataloader = RackShare.Config(
                of=config.dataloader, rack=place.rack_number, racks=place.racks
            )
        super().__init__(config)

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        runtime = self.runtime or self._begin()
        training = self.config.training
        batch = training.local_batch_size * training.seq_len
        runtime.count_tokens(batch * self.gradient_accumulation_steps)
        super().train_step(data_iterator)
        if not self.should_continue_training():
            self._member.end(self.model_parts[0])
        elif self._is_saved(self.step):
            self._member.checkpoint(self._job_folder(self.step))

    def train(self) -> None:
        super().train()
        self._member.end(self.model_parts[0])  # where the data were exhausted before

    def _begin(self) -> Runtime:
        """Join the job. Called within step `self.step`, before anything of it is done."""
        loaded = self.step - 1
        resume = self._job_folder(loaded) if loaded else None
        optimizers = list(self.optimizers)
        parts = self.model_parts  # several: stages of a pipeline that takes turns
        self._model = parts[0] if len(parts) == 1 else nn.ModuleList(parts)
        runtime = self._member.begin(self._model, optimizers, resume)
        # A rack that joins a running job takes its step, so that it ends with the others.
        self.step = max(self.step, runtime.status().step + 1)
        log = self.metrics_processor.log
        has_loss = not self.parallel_dims.pp_enabled or self.pp_has_last_stage

        def log_and_record(step: int, loss: float, *rest: Any, **more: Any) -> None:
            if has_loss:
                runtime.record(loss=loss)
            log(step, loss, *rest, **more)

        self.metrics_processor.log = log_and_record
        return runtime

    def _is_saved(self, step: int) -> bool:
        """Whether the trainer writes a checkpoint after this step, which is not the last one."""
        it = self.config.checkpoint
        if not it.enable or it.load_only:
            return False
        return step % it.interval == 0 or (step == 1 and it.enable_first_step_checkpoint)

    def _job_folder(self, step: int) -> Path:
        """The folder inside the trainer's checkpoint of this step, which the trainer deletes with
        it."""
        config = self.config
        folder = Path(config.dump_folder, config.checkpoint.folder)
        return folder / f"step-{step}" / name_at(step)


class RackShare(BaseDataLoader):
    """Stands for a data loader that counts its ranks over all racks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        of: BaseDataLoader.Config
        rack: int
        racks: int

        def build(self, *, dp_world_size: int, dp_rank: int, **more: Any) -> BaseDataLoader:
            """Build the other loader. This class is never instantiated."""
            first = self.rack * dp_world_size
            ranks = dp_world_size * self.racks
            return self.of.build(dp_world_size=ranks, dp_rank=first + dp_rank, **more)
