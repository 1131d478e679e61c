"""A small GPT in the Trainer of transformers: what a user's script looks like.

Started by test_transformers.py, once per rack; prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import mend
from mend.integrations.transformers import MendCallback

VOCABULARY, LENGTH = 64, 16


def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards, from a random number in random steps."""
    chance = torch.Generator().manual_seed(seed)
    starts = torch.randint(VOCABULARY, (count, 1), generator=chance)
    steps = torch.randint(1, 4, (count, 1), generator=chance)
    tokens = (starts + steps * torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


class Death(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.step == state.global_step + 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Fault(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("out of memory")


def small_model() -> GPT2LMHeadModel:
    shape = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **shape))


def small_trainer(folder: Any, callback: MendCallback) -> tuple[Trainer, Fault]:
    """A trainer of eight steps, with a callback that ends it after three."""
    fault = Fault()
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=8, per_device_train_batch_size=8, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    callbacks = [fault, callback]
    trainer = Trainer(small_model(), arguments, train_dataset=rows(64, 0), callbacks=callbacks)
    return trainer, fault


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--die-in", type=int, default=0, help="kill the process in this step")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--no-checkpoints", action="store_true")
    parser.add_argument("--more", default="{}", help="JSON: further TrainingArguments")
    given = parser.parse_args()

    config = mend.MendConfig()
    torch.manual_seed(config.rack_number)
    model = small_model()
    more: dict[str, Any] = {"save_strategy": "steps", "eval_strategy": "steps"}
    arguments = TrainingArguments(
        output_dir=given.folder, max_steps=given.steps, per_device_train_batch_size=8,
        learning_rate=3e-3, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=4,
        eval_steps=8, save_steps=8, include_num_input_tokens_seen="all",
        **{**more, **json.loads(given.more)},
    )  # fmt: skip
    callback = MendCallback(config, checkpoints=not given.no_checkpoints)
    trainer = Trainer(
        model, arguments, train_dataset=rows(256, config.rack_number), eval_dataset=rows(64, 99),
        callbacks=[Death(given.die_in), callback],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=given.resume or None)
    status = callback.status
    assert status is not None
    print(
        json.dumps({
            "rack": status.rack, "outcome": status.outcome, "detail": status.outcome_detail,
            "step": status.step, "global_step": trainer.state.global_step,
            "tokens": status.tokens, "digest": status.anchor_digest,
            "loss": trainer.evaluate()["eval_loss"], "rate": trainer._get_learning_rate(),
            "weights": sum(p.double().sum().item() for p in model.parameters()),
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
