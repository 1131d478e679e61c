"""A rack that trains a tiny Llama at level shape, cut over its ranks as it is told.

`python -m tests.process.jointly '{"out": "...", "cut": "tp", ...}'`, see Options.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.process.train import leave_group, run_script, seen, weights
from tests.unit.determinism.llama import WORDS, Llama, loss_of

ROWS, TOKENS, SEED = 8, 8, 7


@dataclass(frozen=True)
class Options:
    out: str
    steps: int
    config: dict[str, Any] = field(default_factory=dict)
    cut: str = "whole"
    """Over the ranks of this rack: whole, tp (the layers), dp (the batch)."""
    microbatches: int = 1
    level: str = "shape"


def cut_over_ranks(model: nn.Module, cut: str) -> nn.Module:
    from mend.determinism import ColumnParallel, RowParallel, ddp_hook

    if cut == "tp":
        columns = ("query", "key", "value", "gate", "up")
        plan: dict[str, Any] = {f"blocks.*.{name}": ColumnParallel() for name in columns}
        plan |= {f"blocks.*.{name}": RowParallel() for name in ("out", "down")}
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        return parallelize_module(model, mesh, plan)
    if cut == "dp":
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, ddp_hook)
    return model


def batch_of(rack: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rack + step)
    return torch.randint(0, WORDS, (ROWS, TOKENS + 1), generator=generator)


def share(batch: Tensor, options: Options) -> Tensor:
    """This rank's rows, microbatch by microbatch."""
    if options.cut != "dp":
        return batch
    rows = batch.view(options.microbatches, dist.get_world_size(), -1, batch.shape[1])
    return rows[:, dist.get_rank()].reshape(-1, batch.shape[1])


def run(options: Options, result: dict[str, Any]) -> None:
    import mend
    from mend.determinism import DeterministicTrainer
    from mend.determinism.enabling import enabled

    rack = int(os.environ["MEND_RACK"])
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(rack)  # rack 0's weights are version 0
    inner = Llama(layers=1, dropout=0.1)
    model = cut_over_ranks(inner, options.cut)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    level: Any = options.level
    config = mend.MendConfig(**options.config)
    with mend.session(model, config, optimizer, determinism=level, seed=SEED) as runtime:
        active = enabled()
        assert active is not None
        trainer = DeterministicTrainer(
            model, optimizer, active.seed, level=level, microbatches=options.microbatches,
            group=dist.group.WORLD if options.cut == "dp" else None, grad_norm_max=1.0,
        )  # fmt: skip
        for step in range(1, options.steps + 1):
            runtime.count_tokens(ROWS * TOKENS)
            loss = trainer.step(share(batch_of(rack, step), options), loss_of)
            result.setdefault("losses", []).append(struct.pack(">f", loss.item()).hex())
    result["weights"] = weights(inner)
    result["status"] = seen(runtime.status())
    leave_group()


if __name__ == "__main__":
    run_script(Options, run)
