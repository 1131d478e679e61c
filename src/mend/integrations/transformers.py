"""mend in the `Trainer` of Hugging Face transformers.

    from mend.integrations.transformers import MendCallback

    trainer = Trainer(model, args, train_dataset=rows.shard(2, rack), callbacks=[MendCallback()])
    trainer.train()       # afterwards the model holds the merged weights
    trainer.evaluate()    # of the merged model

The callback joins the job when training begins and leaves it after the last step, before the final
evaluation, the final save and the best model. It writes the job's state into each checkpoint of the
Trainer, and `trainer.train(resume_from_checkpoint=True)` resumes both.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mend.config import MendConfig
from mend.errors import UsageError
from mend.integrations.membership import Member, Membership, name_at


class MendCallback(Member, TrainerCallback):
    """Exchanges the Trainer's model with the other racks. Give it last of all callbacks.

    Each rack writes into its own folder of `output_dir`, named `rack-<number>`.

    `config`: None: from MEND_* variables. `checkpoints`: False: the Trainer's checkpoints get no
    state of the job, and racks may save at different steps. `options`: further arguments of
    `mend.mend_init`, such as `determinism`. Raises ConfigError; when training begins also what
    `mend_init` raises, and UsageError for `save_strategy="best"` with `checkpoints`.
    """

    _member: Membership

    def __init__(
        self, config: MendConfig | None = None, *, checkpoints: bool = True, **options: Any
    ) -> None:
        self._member = Membership(config, options, checkpoints)
        self._saved: Path | None = None
        """The folder with the job's state in the newest checkpoint of the Trainer that has one."""
        self._tokens = 0

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._member.exchanges and args.output_dir:
            args.output_dir = str(self._member.folder_in(args.output_dir))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._member.checkpoints and self._member.exchanges and args.save_strategy == "best":
            raise UsageError(
                'save_strategy="best": each rack would save at steps of its own, as its evaluation '
                'sees its own weights. Use "steps" or "epoch", the same on all racks, or '
                "MendCallback(checkpoints=False)"
            )
        if self._member.exchanges and args.load_best_model_at_end:
            warnings.warn(
                "load_best_model_at_end=True: after the merge each rack loads the checkpoint that "
                "its own evaluation found best, so the racks may end with different models. Leave "
                "it False to end with the merged one, or use the best checkpoint of one rack",
                stacklevel=2,
            )
        resume = _job_folder(args, state) if state.global_step else None
        self._tokens = state.num_input_tokens_seen
        runtime = self._member.begin(kwargs["model"], [kwargs["optimizer"]], resume)
        # A rack that joins a running job takes its step, so that it ends with the others.
        state.global_step = max(state.global_step, runtime.status().step)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Weights a step by its tokens if the Trainer counts them, which it does for all ranks of
        the rack together: each counts its part."""
        tokens = state.num_input_tokens_seen - self._tokens
        self._tokens = state.num_input_tokens_seen
        if self.runtime is not None and tokens:
            part, rest = divmod(tokens, args.world_size)
            self.runtime.count_tokens(part + (args.process_index < rest))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called before the Trainer evaluates and saves, so that it sees the state of the job at
        this step."""
        if control.should_training_stop:
            self._member.end(kwargs["model"])
        elif control.should_save and self.runtime is not None:
            self._saved = _job_folder(args, state)
            self._member.checkpoint(self._saved)

    on_epoch_end = on_step_end

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        folder = _job_folder(args, state)
        member = self._member
        if self.runtime and member.checkpoints and member.exchanges and self._saved != folder:
            warnings.warn(
                f"{folder.parent} has no state of the job, as a callback behind MendCallback asked "
                "for it: give MendCallback last. The job cannot resume from this checkpoint",
                stacklevel=2,
            )

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        logs: dict[str, Any] | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        logs = logs or {}
        if self.runtime is not None:
            numbers = {key: float(n) for key, n in logs.items() if isinstance(n, int | float)}
            self.runtime.record(**numbers)
        if "train_loss" in logs:  # the last words of the Trainer before it loads the best model
            self._member.end(kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._member.end(kwargs["model"])


def _job_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder inside the Trainer's checkpoint of this step, which the Trainer deletes with
    it."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / name_at(state.global_step)
