"""determinism.trainer: one training step that can be made twice. Holds no loop and no data."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mend.determinism.digests import digest, optimizer_digest, weight_digest
from mend.determinism.enabling import (
    Determinism,
    Level,
    enable,
    enabled,
    first_difference,
    random_state,
    same_bits,
    seed_all,
    set_random_state,
)
from mend.errors import UsageError

Batch = TypeVar("Batch")
LossFn = Callable[[nn.Module, Batch], Tensor]
"""(model, batch) -> the loss, one element."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a step that was made twice came to the same bits.

    `part`: what differed first: "loss", "gradient of NAME", "weight NAME", "buffer NAME" or
    "optimizer"; None where nothing did. `digest`: of all that the first of the two steps left.
    """

    equal: bool
    part: str | None
    digest: str

    def __bool__(self) -> bool:
        return self.equal


class DeterministicTrainer:
    """Trains `model` step by step under enable(seed, level), which it calls if nobody has.

    Every step begins with generators seeded from (seed, number of the step), so that a step's bits
    do not depend on what was drawn before it: a job that goes on from a checkpoint (set `steps`)
    does what it would have done.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        seed: int,
        *,
        level: Level = "run",
        scheduler: Any = None,  # torch's schedulers share no public base
    ) -> None:
        self.model, self.optimizer, self.seed, self.scheduler = model, optimizer, seed, scheduler
        self.steps = 0
        self._own: Determinism | None = None
        active = enabled()
        if active is None:
            self._own = enable(seed, level)
        elif (active.seed, active.level) != (seed, level):
            raise UsageError(
                f"the trainer asks for seed {seed}, level {level}, and seed {active.seed}, level "
                f"{active.level} is enabled; close() that one, or ask for the same"
            )

    def step(self, batch: Batch, loss_fn: LossFn[Batch]) -> Tensor:
        """Forward, backward, optimizer and scheduler; returns the loss, detached."""
        loss = self._gradients(batch, loss_fn)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.steps += 1
        return loss

    def verify_determinism(self, batch: Batch, loss_fn: LossFn[Batch]) -> Verdict:
        """Make the next step twice and compare all bits; then everything is as it was before.

        Needs memory for three copies of weights, gradients and optimizer state.
        """
        before = _Snapshot(self)
        loss = self.step(batch, loss_fn)
        first = _Snapshot(self)
        before.put_back(self)
        again = self.step(batch, loss_fn)
        part = "loss" if not same_bits(loss, again) else first.difference(_Snapshot(self))
        before.put_back(self)
        return Verdict(part is None, part, first.digest)

    def digest(self) -> str:
        """Of weights, buffers, optimizer, scheduler and the number of steps."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        weights, optimizer = weight_digest(self.model), optimizer_digest(self.optimizer)
        return digest([weights, optimizer, scheduler, self.steps])

    def close(self) -> None:
        """Put the switches back, if this trainer put them on."""
        if self._own is not None:
            self._own.close()

    def __enter__(self) -> DeterministicTrainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _gradients(self, batch: Batch, loss_fn: LossFn[Batch]) -> Tensor:
        seed_all(seed_of_step(self.seed, self.steps))
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(self.model, batch)
        if loss.numel() != 1:
            raise UsageError(f"loss_fn returned {loss.numel()} elements; return the loss, one")
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def seed_of_step(seed: int, step: int) -> int:
    """32 bits that depend on both, and are far apart for neighbours."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}".encode()).digest()[:4], "big")


class _Snapshot:
    """Copies of all that a step changes."""

    def __init__(self, trainer: DeterministicTrainer) -> None:
        model = trainer.model
        self.digest = trainer.digest()
        weights = ((f"weight {name}", each) for name, each in model.named_parameters())
        buffers = ((f"buffer {name}", each) for name, each in model.named_buffers())
        self._tensors: dict[str, Tensor] = {
            name: each.detach().clone() for name, each in (*weights, *buffers)
        }
        self._gradients = {
            f"gradient of {name}": parameter.grad.detach().clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        self._optimizer = copy.deepcopy(trainer.optimizer.state_dict())
        self._optimizer_digest = optimizer_digest(trainer.optimizer)
        scheduler = trainer.scheduler
        self._scheduler = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
        self._steps, self._random = trainer.steps, random_state()

    def difference(self, other: _Snapshot) -> str | None:
        part = first_difference(self._gradients, other._gradients)
        part = part or first_difference(self._tensors, other._tensors)
        if part is None and self._optimizer_digest != other._optimizer_digest:
            return "optimizer"
        return part

    def put_back(self, trainer: DeterministicTrainer) -> None:
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                parameter.copy_(self._tensors[f"weight {name}"])
                gradient = self._gradients.get(f"gradient of {name}")
                parameter.grad = None if gradient is None else gradient.clone()
            for name, buffer in trainer.model.named_buffers():
                buffer.copy_(self._tensors[f"buffer {name}"])
        trainer.optimizer.load_state_dict(copy.deepcopy(self._optimizer))
        if trainer.scheduler is not None:
            trainer.scheduler.load_state_dict(copy.deepcopy(self._scheduler))
        trainer.steps = self._steps
        set_random_state(self._random)
