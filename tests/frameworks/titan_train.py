"""torchtitan's debug model on the CPU.

Started by test_torchtitan.py, once per rank; prints one JSON line. Stands in for what a CPU has
not: the device, its memory monitor, the backward of flex attention, the barrier of a device, and
the tokenizer and the text that torchtitan has in its repository only; and for the step of pre-split
micro-batches that torch has from 2.14 on.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

torchtitan.tools.utils.device_type, torchtitan.tools.utils.device_module = "cpu", torch.cpu

import torchtitan.components.metrics as metrics  # noqa: E402  # after the device is chosen
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils as titan_utils  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry  # noqa: E402

from mend.integrations.torchtitan import MendTrainer, with_mend  # noqa: E402

VOCABULARY = 64


def _attention(
    q: Any, k: Any, v: Any, *, scale: float | None, enable_gqa: bool, **_: Any
) -> tuple[torch.Tensor, Any]:
    plain = torch.nn.functional.scaled_dot_product_attention
    return plain(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None


NO_MEMORY = metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)
metrics.build_device_memory_monitor = lambda: SimpleNamespace(
    device_name="cpu", get_peak_stats=lambda: NO_MEMORY, reset_peak_stats=lambda: None
)
FlexAttention.compiled_flex_attn = staticmethod(_attention)
titan_utils.set_pg_timeouts = lambda **_: None


def _presplit_step(
    schedule: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any,
    loss_kwargs: Any, return_outputs: bool,
) -> None:  # fmt: skip
    for stage in schedule._stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    schedule._step_microbatches(
        arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs
    )


if "arg_mbs" not in inspect.signature(PipelineScheduleMulti.step).parameters:
    PipelineScheduleMulti.step = _presplit_step


class Rows(BaseDataLoader):
    """Sequences that count upwards."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        die_in: int = 0

    def __init__(
        self, config: Config, *, dp_rank: int, dp_world_size: int, seq_len: int,
        local_batch_size: int, **_: Any,
    ) -> None:  # fmt: skip
        self.batch, self.shape = 0, (local_batch_size, seq_len + 1)
        self.rank, self.ranks, self.die_in = dp_rank, dp_world_size, config.die_in

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        rows, length = self.shape
        while True:
            self.batch += 1
            if self.batch == self.die_in:
                os.kill(os.getpid(), signal.SIGKILL)
            chance = torch.Generator().manual_seed(self.batch * self.ranks + self.rank)
            starts = torch.randint(VOCABULARY, (rows, 1), generator=chance)
            tokens = (starts + torch.arange(length)) % VOCABULARY
            places = torch.arange(length - 1).repeat(rows, 1)
            yield {"input": tokens[:, :-1].contiguous(), "positions": places}, tokens[:, 1:].clone()

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch = state["batch"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        pass

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--die-in", type=int, default=0, help="kill the process in this step")
    parser.add_argument("--stages", type=int, default=1, help="ranks of the rack's pipeline")
    parser.add_argument("--schedule", default="1F1B")
    given = parser.parse_args()
    config = with_mend(config_registry.llama3_debugmodel())
    config.dump_folder = given.folder
    config.dataloader = Rows.Config(die_in=given.die_in)
    config.tokenizer = NoTokenizer.Config()
    config.optimizer.implementation = "for-loop"
    config.validator.enable = False
    config.training.disable_cuda_graphs = True
    config.training.local_batch_size, config.training.seq_len = 2, 32
    config.training.steps = given.steps
    config.checkpoint.enable, config.checkpoint.interval = True, 8
    config.parallelism.pipeline_parallel_degree = given.stages
    config.parallelism.pipeline_parallel_schedule = given.schedule
    config.debug.seed = int(os.environ["MEND_RACK"])
    trainer = config.build()
    assert isinstance(trainer, MendTrainer)
    trainer.train()
    trainer.close()
    status, dataloader = trainer.status, trainer.dataloader
    assert status is not None
    assert isinstance(dataloader, Rows)
    parameters = [p for part in trainer.model_parts for p in part.parameters()]
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
    total = torch.stack([p.detach().double().sum() for p in weights]).sum()
    torch.distributed.all_reduce(total)
    print(
        json.dumps({
            "rack": status.rack, "outcome": status.outcome, "step": status.step,
            "tokens": status.tokens, "digest": status.anchor_digest,
            "loss": trainer.lr_schedulers.schedulers[0].get_last_lr()[0],
            "weights": total.item(),
            "titan_step": trainer.step, "parts": len(trainer.model_parts),
            "share": [dataloader.rank, dataloader.ranks],
        }),
        flush=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
