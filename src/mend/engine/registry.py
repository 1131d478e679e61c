"""Maps each model to its runtime. The references to models are weak."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from mend.errors import AddressInUse, UsageError
from mend.fragment.plan import unwrap

_runtimes: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def _forget_forked() -> None:
    """Called in a forked process. The rack trains in the parent, whose threads and sockets do not
    exist here: the end of this process would pass for the rack's, and its steps would never end."""
    for runtime in list(_runtimes.values()):
        runtime._disown()
    _runtimes.clear()


os.register_at_fork(after_in_child=_forget_forked)


def enter(model: nn.Module, runtime: object) -> None:
    """Register the runtime. Raises UsageError when the model, or one that shares parameters with
    it, already has one."""
    if find(model) is not None:
        raise UsageError(
            "mend_init was called twice for this model; call mend_shutdown(model) first"
        )
    _runtimes[unwrap(model)] = runtime


def find(model: nn.Module) -> Any:
    """The runtime of this model, of a wrapper around it, or of a module that shares parameters
    with it; None without one. Raises UsageError when it shares parameters with several."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"got a {type(model).__name__}; give the model that mend_init was given")
    shared = runtimes_of(model)
    if len(shared) > 1:
        raise UsageError(f"{type(model).__name__} shares parameters with {len(shared)} models")
    return shared[0] if shared else None


def runtimes_of(model: nn.Module) -> list[Any]:
    """The runtime of this model, or of a wrapper around it; otherwise those of all models that
    share parameters with it."""
    if not _runtimes:
        return []
    if unwrap(model) in _runtimes:
        return [_runtimes[unwrap(model)]]
    mine = {id(parameter) for parameter in model.parameters()}
    return [
        runtime
        for other, runtime in list(_runtimes.items())
        if any(id(parameter) in mine for parameter in other.parameters())
    ]


def refuse_stranger(model: nn.Module) -> None:
    """Raise UsageError where another module has a runtime: the caller, whose module has none, would
    wrongly conclude that training has ended."""
    others = [type(other).__name__ for other in list(_runtimes)]
    if others:
        raise UsageError(
            f"this {type(model).__name__} shares no parameter with the model that mend trains "
            f"({', '.join(others)}); give the model that mend_init was given"
        )


@contextlib.contextmanager
def name_holder(config: Any) -> Iterator[None]:
    """Where this process itself holds the address of this rack, make AddressInUse say so: the user
    need not look for another process."""
    try:
        yield
    except AddressInUse as error:
        holders = [
            type(model).__name__
            for model, runtime in list(_runtimes.items())
            if runtime.config.exchange and runtime.config.bind_address == config.bind_address
        ]
        if not holders:
            raise
        raise AddressInUse(
            f"address={config.bind_address!r}: this process holds it itself, for the {holders[0]} "
            "that mend trains here. Call mend_shutdown for that model first, or give this one "
            "a config with another address"
        ) from error


def leave(runtime: object) -> None:
    """Remove the runtime."""
    for model in [model for model, other in list(_runtimes.items()) if other is runtime]:
        _runtimes.pop(model, None)


def get_runtime(model: nn.Module) -> Any:
    """The runtime mend_init made for this model, wrapped or not. Raises UsageError without one."""
    runtime = find(model)
    if runtime is None:
        raise UsageError(
            "this model has no runtime; call mend_init(model, config, optimizer=...) first"
        )
    return runtime
