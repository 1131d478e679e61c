"""runtime.registry: which runtime belongs to which model. Weak: it keeps neither alive."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from mend.errors import UsageError
from mend.fragment.plan import unwrap

_runtimes: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def enter(model: nn.Module, runtime: object) -> None:
    """Raises UsageError when the model (or the module inside its wrapper) already has a runtime."""
    if unwrap(model) in _runtimes:
        raise UsageError(
            "mend_init was called twice for this model; call mend_shutdown(model) first"
        )
    _runtimes[unwrap(model)] = runtime


def find(model: nn.Module) -> Any:
    return _runtimes.get(unwrap(model))


def leave(model: nn.Module) -> None:
    _runtimes.pop(unwrap(model), None)


def get_runtime(model: nn.Module) -> Any:
    """The runtime mend_init made for this model, wrapped or not. Raises UsageError without one."""
    runtime = find(model)
    if runtime is None:
        raise UsageError(
            "this model has no runtime; call mend_init(model, config, optimizer=...) first"
        )
    return runtime
