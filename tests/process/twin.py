"""The script of the tests about racks that join: an optimizer of choice, a scheduler, and a record
of the state that each step begins with.

`python -m tests.process.twin '{"out": "...", "optimizer": "adamw"}'`, see Options. The digests are
made here, from what `state_dict` says, without mend.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
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
    pace_ms: float = 4.0
    at: dict[str, list[list[Any]]] = field(default_factory=dict)
    """step -> acts before it, see `train.Acts`."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    resume: str = ""


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Two groups with hyperparameters of their own."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=lr, amsgrad=True
    )


def muon(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Of matrices only; the rest of the model stays as it is."""
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=lr)


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


class Callback(torch.optim.SGD):
    """Keeps a function in its state: nothing of it can travel."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["hook"] = print
        return super().step(closure)


def callback(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return Callback(model.parameters(), lr=lr)


MADE: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "adamw": adamw, "muon": muon, "sgd": sgd, "callback": callback,
}  # fmt: skip


class Place:
    """A place in the data: of this rack alone."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


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


def run(options: Options, result: dict[str, Any]) -> None:
    rack, rank = int(os.environ["MEND_RACK"]), int(os.environ.get("RANK", "0"))
    model = train.build(options.model, rack)
    ranks, gpu = int(os.environ.get("WORLD_SIZE", "1")), options.device == "cuda"
    if gpu:
        torch.cuda.set_device(rack * ranks + rank)
        model.cuda()
    wrapped: nn.Module = model
    if ranks > 1:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
        wrapped = train.spread(model, options.parallel, options.device)
    optimizer = MADE[options.optimizer](model, options.learning_rate)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    if not options.schedules:  # as a script without one
        optimizer = MADE[options.optimizer](model, options.learning_rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=7)
    place = Place()
    acts = train.Acts(model, wrapped, optimizer)
    resume = {"resume": options.resume} if options.resume else {}
    if options.resume:
        train.load(Path(options.resume) / f"rack-{rack}", model, optimizer)
    config = mend.MendConfig(**options.config)
    states: dict[str, str] = result.setdefault("states", {})

    def standing() -> str:
        kept = [optimizer.state_dict()]
        if options.schedules:
            kept += [scheduler.state_dict(), scaler.state_dict()]
        return digest(kept)

    with mend.session(wrapped, config, optimizer, **resume) as runtime:
        acts.runtime = runtime
        if options.registers and options.schedules:
            runtime.register_state("scheduler", scheduler)
            runtime.register_state("scaler", scaler)
            runtime.register_state("place", place, scope="rack")
        step = runtime.status().step
        result["begun"] = [step, standing(), optimizer.param_groups[0]["lr"], place.batches]
        while not runtime.any_rank(Path(options.stop).exists()):
            step += 1
            states[str(step - 1)] = standing()
            acts.do(options.at.get(str(step), []))
            loss = train.loss_of(wrapped, rack, rank, step)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if options.schedules:
                scheduler.step()
            place.batches += 1
            if folder := options.checkpoints.get(str(step)):
                runtime.checkpoint(folder, lambda path: train.save(model, optimizer, "", False, path))
            time.sleep(options.pace_ms / 1000)
        states[str(step)] = standing()
    result["status"] = train.seen(runtime.status())
    result["weights"] = train.weights(model)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    options = Options(**json.loads(sys.argv[1]))
    result: dict[str, Any] = {}
    try:
        run(options, result)
    except BaseException as error:
        result["error"] = [type(error).__name__, str(error)]
        raise
    finally:
        out = Path(options.out.format(rank=os.environ.get("RANK", "0")))
        out.with_suffix(".part").write_text(json.dumps(result))
        out.with_suffix(".part").rename(out)


if __name__ == "__main__":
    main()
