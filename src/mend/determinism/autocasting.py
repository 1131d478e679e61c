"""Autocast at level shape: linear layers round inside of one operator. torch's own cast would round
the gradient of a weight in every microbatch and on every rank, before the tree adds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

LAYERS = ("linear", "matmul", "mm", "addmm")
"""Operators of aten that multiply by a weight."""

_compute_type: ContextVar[torch.dtype | None] = ContextVar("mend-compute-type", default=None)


@contextmanager
def compute_in(dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, linear layers round inputs and weights to `dtype`."""
    token = _compute_type.set(dtype)
    try:
        yield
    finally:
        _compute_type.reset(token)


def compute_type() -> torch.dtype | None:
    """None: that of the inputs."""
    return _compute_type.get()


def autocast_type(x: Tensor) -> torch.dtype | None:
    """What autocast asks for on the device of x; None: it is off."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def under_autocast(function: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    """`function` for the dispatch key of autocast on "cpu" or "cuda"."""
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device.upper()}"))

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        guard = torch._C._ExcludeDispatchKeyGuard(key)
        with guard, compute_in(torch.get_autocast_dtype(device)):
            return function(*args, **kwargs)

    return kernel
