"""Detects steps that a GradScaler skips because a gradient is not finite.

The scaler then does not call the optimizer, so no hook of torch runs: `GradScaler.step` is wrapped
while there is a listener. A fused optimizer is called, but changes nothing where `found_inf` is
set.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol
from weakref import WeakSet, finalize

import torch
from torch.amp import GradScaler


class Listener(Protocol):
    """Hears of the steps that a scaler skips. Held weakly."""

    ends: int
    """Steps of any optimizer that have ended so far."""

    def skipped(self, optimizer: Any) -> None:
        """The scaler did not call `optimizer.step()`."""


_listeners: WeakSet[Any] = WeakSet()
_steps: tuple[Any, Any] = (None, None)
"""(the method that was wrapped, the wrapper)."""


def listen(listener: Listener) -> None:
    """Tell `listener` of skipped steps, until `leave` or until it is freed."""
    global _steps
    _listeners.add(listener)
    finalize(listener, _unwrap_if_unused).atexit = False
    if GradScaler.step is not _steps[1]:
        _steps = GradScaler.step, _wrapped(GradScaler.step)
        GradScaler.step = _steps[1]  # type: ignore[method-assign]


def leave(listener: Listener) -> None:
    """Tell `listener` nothing more. Idempotent. After the last listener the wrapper is removed,
    unless other code has wrapped it again."""
    _listeners.discard(listener)
    _unwrap_if_unused()


def _unwrap_if_unused() -> None:
    # A list, as the length of the set may still count a listener that is being freed.
    if not list(_listeners) and GradScaler.step is _steps[1]:
        GradScaler.step = _steps[0]  # type: ignore[method-assign]


def changes_nothing(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the fused step that ends now was a no-op, as a GradScaler found an overflow. Waits
    for the GPU, as the scaler itself does for other optimizers. False at once where no scaler
    called the step."""
    found = getattr(optimizer, "found_inf", None)
    if not isinstance(found, torch.Tensor):
        return False
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return not capturing and bool(found.item())


def _wrapped(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def call(scaler: GradScaler, optimizer: Any, *args: Any, **options: Any) -> Any:
        before = [(listener, listener.ends) for listener in list(_listeners)]
        result = step(scaler, optimizer, *args, **options)
        for listener, ends in before:
            if listener.ends == ends:
                listener.skipped(optimizer)
        return result

    return call
