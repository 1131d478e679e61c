"""Ranks that share a GPU, over gloo: NCCL wants a GPU for each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import _collective_utils


def host_collectives() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(module, name, function) to put there: see `through_host`."""
    for module, name in (
        (dist, "all_to_all_single"), (dist, "all_gather"),
        (_collective_utils, "scatter"), (_collective_utils, "broadcast"),
    ):  # fmt: skip
        yield module, name, through_host(getattr(module, name))


def through_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """A collective of gloo, some of which end with SIGSEGV on a GPU. `function` writes its first
    argument."""

    def host(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [host(each) for each in value]
        return value.cpu() if isinstance(value, Tensor) else value

    def call(out: Any, *args: Any, **kwargs: Any) -> None:
        there = host(out)
        function(there, *map(host, args), **{name: host(each) for name, each in kwargs.items()})
        if isinstance(out, Tensor):
            out.copy_(there)
            return
        for ours, made in zip(out, there, strict=True):
            ours.copy_(made)

    return call
