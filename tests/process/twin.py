"""The script of the tests about racks that join: an optimizer of choice, a scheduler, and a record
of the state that each step begins with.

`python -m tests.process.twin '{"out": "...", "optimizer": "adamw"}'`, see Options. The digests are
made here, from what `state_dict` says, without mend.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import mend
from tests.process import train


@dataclass(frozen=True)
class Options:
    out: str
    stop: str
    """The last step is the first that finds this file."""
    optimizer: str = "adamw"
    config: dict[str, Any] = field(default_factory=dict)
    model: str = "plain"
    parallel: str = "ddp"
    device: str = "cpu"
    learning_rate: float = 0.01
    registers: bool = True
    """Whether it registers what a twin needs."""
    schedules: bool = True
    growth_interval: int = 7
    """Steps after which the scaler doubles its scale: no gradient gets other bits by it."""
    pace_ms: float = 4.0
    at: dict[str, list[list[Any]]] = field(default_factory=dict)
    """step -> acts before it, see `train.Acts`."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    resume: str = ""


Made = list[torch.optim.Optimizer]


def adamw(model: nn.Module, lr: float) -> Made:
    """Two groups with hyperparameters of their own."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=lr, amsgrad=True)]


def muon(model: nn.Module, lr: float) -> Made:
    """For matrices; AdamW for the rest."""
    rest = [p for p in model.parameters() if p.ndim != 2]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [torch.optim.AdamW(rest, lr=lr), torch.optim.Muon(matrices, lr=lr)]


def sgd(model: nn.Module, lr: float) -> Made:
    return [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)]


class Callback(torch.optim.SGD):
    """Keeps a function in its state, which cannot travel."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["hook"] = print
        return super().step(closure)


def callback(model: nn.Module, lr: float) -> Made:
    return [Callback(model.parameters(), lr=lr)]


MADE: dict[str, Callable[[nn.Module, float], Made]] = {
    "adamw": adamw, "muon": muon, "sgd": sgd, "callback": callback,
}  # fmt: skip


class Place:
    """A place in the data and in the noise: of this rack alone."""

    def __init__(self) -> None:
        self.batches = 0
        self.noise = torch.Generator().manual_seed(5)

    def read(self) -> None:
        """The next batch."""
        self.batches += 1
        torch.rand(3, generator=self.noise)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "noise": self.noise.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]
        self.noise.set_state(state["noise"])


def digest(value: Any) -> str:
    """Of all that a state dict holds, with types and bits."""
    found = hashlib.sha256()

    def feed(each: Any) -> None:
        if isinstance(each, dict):
            for key in sorted(each, key=repr):
                found.update(repr(key).encode())
                feed(each[key])
        elif isinstance(each, list | tuple):
            for one in each:
                feed(one)
        elif isinstance(each, torch.Tensor):
            local = each.to_local() if isinstance(each, DTensor) else each
            found.update(f"{local.dtype} {tuple(local.shape)}".encode())
            found.update(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        else:
            found.update(f"{type(each).__name__} {each!r}".encode())

    feed(value)
    return found.hexdigest()


class Training:
    """All that a script has besides the model."""

    def __init__(self, options: Options, model: nn.Module) -> None:
        self.options = options
        self.optimizers = MADE[options.optimizer](model, options.learning_rate)
        self.schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(each, 0.999)
            for each in self.optimizers
            if options.schedules
        ]
        self.scaler = torch.amp.GradScaler(
            options.device, init_scale=2.0**4, growth_interval=options.growth_interval
        )
        self.place = Place()

    def register(self, runtime: mend.Runtime) -> None:
        if self.options.registers:
            for number, scheduler in enumerate(self.schedulers):
                runtime.register_state(f"scheduler {number}", scheduler)
            runtime.register_state("scaler", self.scaler)
            runtime.register_state("place", self.place, scope="rack")

    def standing(self) -> str:
        """Digest of what the next step begins with."""
        states = [each.state_dict() for each in (*self.optimizers, *self.schedulers)]
        return digest([*states, self.scaler.state_dict()])

    def step(self, loss: torch.Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for scheduler in self.schedulers:
            scheduler.step()


def modelled(options: Options, rack: int, rank: int) -> tuple[nn.Module, nn.Module]:
    """Bare, and spread over the ranks of this rack."""
    model = train.build(options.model, rack)
    ranks, gpu = int(os.environ.get("WORLD_SIZE", "1")), options.device == "cuda"
    if gpu:
        torch.cuda.set_device((rack * ranks + rank) % torch.cuda.device_count())
        model.cuda()
    if ranks == 1:
        return model, model
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    return model, train.spread(model, options.parallel, options.device)


def run(options: Options, result: dict[str, Any]) -> None:
    rack, rank = int(os.environ["MEND_RACK"]), int(os.environ.get("RANK", "0"))
    model, wrapped = modelled(options, rack, rank)
    training = Training(options, model)
    acts = train.Acts(model, wrapped, training.optimizers[0])
    resume = {"resume": options.resume} if options.resume else {}
    if options.resume:
        load(Path(options.resume) / f"rack-{rack}", model, training.optimizers)
    config = mend.MendConfig(**options.config)
    states: dict[str, str] = result.setdefault("states", {})
    with mend.session(wrapped, config, training.optimizers, **resume) as runtime:
        training.register(runtime)
        step, rate = runtime.status().step, training.optimizers[0].param_groups[0]["lr"]
        result["begun"] = [step, training.standing(), rate, training.place.batches]
        result["place"] = digest(training.place.state_dict())
        while not runtime.any_rank(Path(options.stop).exists()):
            step += 1
            states[str(step - 1)] = training.standing()
            acts.do(options.at.get(str(step), []))
            training.place.read()
            training.step(train.loss_of(wrapped, rack, rank, step))
            if folder := options.checkpoints.get(str(step)):
                runtime.checkpoint(folder, partial(save, model, training.optimizers))
            time.sleep(options.pace_ms / 1000)
        states[str(step)] = training.standing()
    result["status"] = train.seen(runtime.status())
    result["weights"] = train.weights(model)
    train.leave_group()


def save(model: nn.Module, optimizers: Made, folder: Path) -> None:
    state = [model.state_dict(), *(each.state_dict() for each in optimizers)]
    torch.save(state, folder / f"script-{os.environ.get('RANK', '0')}.pt")


def load(folder: Path, model: nn.Module, optimizers: Made) -> None:
    weights, *states = torch.load(folder / f"script-{os.environ.get('RANK', '0')}.pt")
    model.load_state_dict(weights)
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)


if __name__ == "__main__":
    train.run_script(Options, run)
