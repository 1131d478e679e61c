"""Copies a version into a module of this process, completely or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from mend.errors import UsageError
from mend.fragment.plan import unwrap
from mend.fragment.shards import as_dtensor


def fill(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    lock: AbstractContextManager[object] | None = None,
) -> None:
    """See `Version.fill`."""
    inner = unwrap(module)
    state: dict[str, Tensor] = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
    pairs = [(_target(state, name, tensor), tensor) for name, tensor in tensors.items()]
    with torch.no_grad():
        fresh = [(into, tensor.to(into.device, into.dtype)) for into, tensor in pairs]
        with lock or nullcontext():
            before = [into.clone() for into, _ in fresh]
            try:
                for into, tensor in fresh:
                    into.copy_(tensor)
            except BaseException:
                for (into, _), old in zip(fresh, before, strict=True):
                    into.copy_(old)
                raise


def _target(state: dict[str, Tensor], name: str, tensor: Tensor) -> Tensor:
    into = state.get(name)
    if into is None:
        raise UsageError(f"the module has no {name}; make the model that the racks train")
    if as_dtensor(into) is not None or into.is_meta:
        kind = "on the meta device" if into.is_meta else "a shard"
        raise UsageError(f"{name} is {kind}; fill a module that holds its tensors whole")
    if into.shape != tensor.shape:
        raise UsageError(f"{name} has shape {tuple(into.shape)}, the racks' {tuple(tensor.shape)}")
    return into
