"""Finds the torch learning-rate schedulers that drive an optimizer."""

from __future__ import annotations

import gc
from collections.abc import Mapping

from torch.optim.lr_scheduler import LRScheduler


def is_scheduled(optimizer: object) -> bool:
    """Whether a scheduler has wrapped the optimizer's `step`."""
    return getattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched", False)


def schedulers_of(optimizer: object) -> list[LRScheduler]:
    """The schedulers that hold this optimizer, without those that are parts of another scheduler.
    The wrapper around `step` does not name its scheduler, so this searches all objects of the
    interpreter, which takes some tens of milliseconds."""
    found = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), LRScheduler) and getattr(each, "optimizer", None) is optimizer
    ]
    parts = {id(part) for each in found for part in getattr(each, "_schedulers", ())}
    return [each for each in found if id(each) not in parts]


def rates_of(optimizers: Mapping[str, object]) -> dict[str, list[float]]:
    """Name of the optimizer -> the learning rate of each parameter group."""
    rates = {}
    for name, optimizer in optimizers.items():
        groups = getattr(optimizer, "param_groups", [])
        if all("lr" in group for group in groups):
            rates[name] = [float(group["lr"]) for group in groups]
    return rates
