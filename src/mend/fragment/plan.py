"""fragment.plan: which parameters are exchanged, and in which fragment. Reads the model; never
peers, clocks, files.

Every rack computes the same plan from its own copy of the model; nothing here depends on values,
devices or hashing.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from mend.errors import ConfigError
from mend.terms import Layout, Slot


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DDP and torch.compile wrappers, so that names are the same with
    and without."""
    while True:
        inner = (
            model.module
            if isinstance(model, DistributedDataParallel)
            else getattr(model, "_orig_mod", None)
        )
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that require a gradient, in module order; a tied one once, under its first
    name."""
    found = [(name, p) for name, p in unwrap(model).named_parameters() if p.requires_grad]
    for name, parameter in found:
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                "model", name, "has no shape yet", "Run one forward pass before mend_init."
            )
        if not parameter.dtype.is_floating_point:
            raise ConfigError(
                "model", name, f"is {parameter.dtype}, not real floating point", "Freeze it."
            )
    return found


def tied_names(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """(further name, first name) of every trainable parameter that occurs more than once."""
    first: dict[int, str] = {}
    tied = []
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        if parameter.requires_grad and first.setdefault(id(parameter), name) != name:
            tied.append((name, first[id(parameter)]))
    return tuple(tied)


def build_plan(model: nn.Module, fragments: int) -> tuple[Layout, ...]:
    """Cut the parameters, in module order, into contiguous runs of whole tensors with about equal
    numbers of elements.

    Each cut is the tensor boundary nearest to its equal share (ties: the earlier). With fewer
    tensors than fragments asked for, there are as many fragments as tensors. Raises ConfigError
    without a trainable parameter.
    """
    if fragments < 1:
        raise ConfigError("fragments", fragments, "must be at least 1", "4 is a good start.")
    slots = trainable(model)
    if not slots:
        raise ConfigError(
            "model", type(unwrap(model)).__name__, "has no trainable parameter", "Unfreeze some."
        )
    count = min(fragments, len(slots))
    cuts = _cuts([parameter.numel() for _, parameter in slots], count)
    plan = tuple(
        _layout(fragment, slots[start:stop])
        for fragment, (start, stop) in enumerate(pairwise(cuts))
    )
    assert sum(len(layout.slots) for layout in plan) == len(slots), "a tensor is in no fragment"
    return plan


def plan_facts(
    layouts: tuple[Layout, ...], model: nn.Module | None = None
) -> tuple[tuple[str, str], ...]:
    """(key, value) lines in which two racks' plans can differ; with `model` also its tied names."""
    facts = [
        (
            f"param {slot.name}",
            f"{'x'.join(map(str, slot.shape)) or 'scalar'} {slot.dtype} {layout.fragment}",
        )
        for layout in layouts
        for slot in layout.slots
    ]
    if model is not None:
        facts += [(f"tied {name}", first) for name, first in tied_names(model)]
    return tuple(facts)


def frozen_digest(model: nn.Module) -> str:
    """xxh3_128 over name, shape, type and bytes of the parameters that are not trained: they must
    agree, too."""
    digest = xxhash.xxh3_128()
    for name, parameter in unwrap(model).named_parameters():
        if not parameter.requires_grad:
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
            flat = parameter.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _cuts(numels: list[int], count: int) -> list[int]:
    """count + 1 ascending tensor indices; every run between two of them holds at least one
    tensor."""
    before = [0]
    for numel in numels:
        before.append(before[-1] + numel)
    total, cuts = before[-1], [0]
    for fragment in range(1, count):
        possible = range(cuts[-1] + 1, len(numels) - (count - fragment) + 1)
        # Distance to the share total * fragment / count, times count: integers, so every rack cuts
        # alike.
        _, nearest = min((abs(count * before[i] - total * fragment), i) for i in possible)
        cuts.append(nearest)
    return [*cuts, len(numels)]


def _layout(fragment: int, named: list[tuple[str, nn.Parameter]]) -> Layout:
    slots, offset = [], 0
    for name, parameter in named:
        dtype = str(parameter.dtype).removeprefix("torch.")
        slots.append(Slot(name, tuple(parameter.shape), dtype, offset, parameter.numel()))
        offset += parameter.numel()
    return Layout(fragment, tuple(slots), offset)
