"""A rack that trains a tiny Llama at level shape, cut over its ranks as it is told.

`python -m tests.process.jointly '{"out": "...", "cut": "tp", ...}'`, see Options.
"""

from __future__ import annotations

import os
import struct
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.process.injected import await_that
from tests.process.train import leave_group, load, run_script, save, seen

ROWS, SEED = 8, 7


@dataclass(frozen=True)
class Options:
    out: str
    steps: int
    config: dict[str, Any] = field(default_factory=dict)
    cut: str = "whole"
    """Over the ranks of this rack: whole, tp (the layers), dp (the batch)."""
    microbatches: int = 1
    level: str = "shape"
    device: str = "cpu"
    """Or "cuda": over NCCL where each rank of the rack has a GPU, else over gloo."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    """step -> folder of the checkpoint that is made behind it."""
    resume: str = ""
    meets: str = ""
    """A folder, with which the racks meet at every step: see `Meeting`."""
    alone: tuple[int, ...] = ()
    """Two steps that rack 0 makes while rack 1 is dead."""
    stays: int = 0
    """This rack begins no step from this one on: a file `held` says that it could be killed."""


@dataclass(frozen=True)
class Size:
    """Of the model and its sentences. On a GPU a rank needs a multiple of 8 of what is cut."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Tensor]
    columns: tuple[str, ...]
    words: int
    tokens: int


def size_of(device: str) -> Size:
    if device == "cpu":
        from tests.unit.determinism import llama

        made = partial(llama.Llama, layers=1, dropout=0.1)
        return Size(made, llama.loss_of, ("query", "key", "value", "gate", "up"), llama.WORDS, 8)
    from benchmarks import _determinism_models as models

    made = partial(models.Llama, 512, 256, 1, 8, 4, 512, dropout=0.1)
    return Size(made, models.loss_in_bf16, ("query", "key", "value"), 512, 64)


def cut_over_ranks(model: nn.Module, options: Options, columns: tuple[str, ...]) -> nn.Module:
    from mend.determinism import ColumnParallel, RowParallel, ddp_hook

    if options.cut == "tp":
        plan: dict[str, Any] = {f"blocks.*.{name}": ColumnParallel() for name in columns}
        plan["blocks.*.gate_up"] = ColumnParallel(fused=2)
        plan |= {f"blocks.*.{name}": RowParallel() for name in ("out", "down")}
        plan = {path: style for path, style in plan.items() if is_in(model, path)}
        mesh = init_device_mesh(options.device, (dist.get_world_size(),), mesh_dim_names=("tp",))
        return parallelize_module(model, mesh, plan)
    if options.cut == "dp":
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, ddp_hook)
    return model


def is_in(model: nn.Module, path: str) -> bool:
    first = path.replace("*", "0")
    return any(name == first for name, _ in model.named_modules())


def batch_of(rack: int, step: int, size: Size) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rack + step)
    return torch.randint(0, size.words, (ROWS, size.tokens + 1), generator=generator)


def share(batch: Tensor, options: Options) -> Tensor:
    """This rank's rows, microbatch by microbatch."""
    if options.cut != "dp":
        return batch
    rows = batch.view(options.microbatches, dist.get_world_size(), -1, batch.shape[1])
    return rows[:, dist.get_rank()].reshape(-1, batch.shape[1])


def take_place(device: str, rack: int) -> None:
    """This rank's GPU, and the group of this rack."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    backend = "gloo"
    if device == "cuda":
        from mend.determinism.enabling import PINNED
        from tests.gpu.sharing import host_collectives

        warnings.simplefilter("default")  # what NCCL and Triton warn of is their own
        os.environ.update(PINNED)  # before CUDA and NCCL start
        gpus = torch.cuda.device_count()
        torch.cuda.set_device((rack * ranks + rank) % gpus)
        if gpus >= ranks:
            backend = "cpu:gloo,cuda:nccl"
        else:
            for module, name, function in host_collectives():
                setattr(module, name, function)
        print(f"rack {rack} rank {rank}: GPU {torch.cuda.current_device()} of {gpus}, {backend}")
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)


class Meeting:
    """Racks of a job without lockstep make each step at the same time, so that who merges what
    depends on steps alone, also while one of them is away.

    Behind every step, before mend works, a rack waits for the other. Rack 0 makes the steps `alone`
    once rack 1 waits to join: behind the first one mend finds out how much it has to copy, behind
    the second one that it may, and copies as the third one begins. In that one it waits for the
    first offer of rack 1.
    """

    def __init__(self, options: Options, runtime: Any) -> None:
        self.folder, self.alone, self.stays = Path(options.meets), options.alone, options.stays
        self.rack, self.rank = runtime.status().rack, int(os.environ.get("RANK", "0"))
        self.runtime, self.step = runtime, 0

    def begin(self, step: int) -> None:
        self.step = step
        if step == self.stays:
            (self.folder / f"held-{self.rack}-{self.rank}").touch()
            threading.Event().wait()  # SIGKILL ends it
        if not self.rack and step in self.alone:
            states = self.runtime._rank.trainer.states
            await_that(lambda: bool(states._inbox.asked))
            if step == self.alone[1]:
                await_that(states._has_room)

    def meet(self, *_: object) -> None:
        """A hook of the optimizer: its own hooks run before those of mend."""
        if not self.folder.name or (not self.rack and self.step in self.alone):
            return
        (self.folder / f"{self.rack}-{self.step}").touch()
        await_that((self.folder / f"{1 - self.rack}-{self.step}").exists)
        if not self.rack and self.alone and self.step == self.alone[1] + 1:
            await_that(lambda: bool(self.runtime._rank.published.orders.opened))


def run(options: Options, result: dict[str, Any]) -> None:
    import mend
    from mend.determinism import DeterministicTrainer, digest, optimizer_digest, weight_digest
    from mend.determinism.enabling import enabled

    rack, size = int(os.environ["MEND_RACK"]), size_of(options.device)
    take_place(options.device, rack)
    torch.manual_seed(rack)  # rack 0's weights are version 0
    inner = size.model().to(options.device)
    model = cut_over_ranks(inner, options, size.columns)
    # foreach=False: torch 2.11 on a GPU does not step DTensors (TP) and plain tensors together.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    level: Any = options.level
    more = {"resume": options.resume} if options.resume else {}
    if options.resume:
        load(Path(options.resume) / f"rack-{rack}", model, optimizer)
    config = mend.MendConfig(**options.config)
    with mend.session(model, config, optimizer, determinism=level, seed=SEED, **more) as runtime:
        active = enabled()
        assert active is not None
        trainer = DeterministicTrainer(
            model, optimizer, active.seed, level=level, microbatches=options.microbatches,
            group=dist.group.WORLD if options.cut == "dp" else None, grad_norm_max=1.0,
        )  # fmt: skip
        runtime.register_state("trainer", trainer)
        result["begun"], meeting = runtime.status().step, Meeting(options, runtime)
        optimizer.register_step_post_hook(meeting.meet)
        for step in range(result["begun"] + 1, options.steps + 1):
            meeting.begin(step)
            if options.alone and step == options.alone[1] + 1:
                result["handed on"] = digest([optimizer_digest(optimizer), trainer.steps])
            runtime.count_tokens(ROWS * size.tokens)
            batch = share(batch_of(rack, step, size), options).to(options.device)
            loss = trainer.step(batch, size.loss)
            result.setdefault("losses", []).append(struct.pack(">f", loss.item()).hex())
            if folder := options.checkpoints.get(str(step)):
                runtime.checkpoint(folder, partial(save, model, optimizer, "", False))
    result["merged"], result["trainer"] = weight_digest(inner), trainer.digest()
    result["status"] = seen(runtime.status())
    leave_group()


if __name__ == "__main__":
    run_script(Options, run)
