"""Checks that the parameters that mend reads and writes are still those that the script trains.
Reads the model; uses no peers, clocks or files."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Container
from typing import TYPE_CHECKING

from torch import Tensor, nn

from mend.errors import UsageError
from mend.fragment.plan import overlaps_itself, sharing_memory
from mend.fragment.shards import local_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class InPlace:
    """Checks that the parameters read and written are the trained ones. Keeps no module alive.

    The FSDP2 modules of a model may be gathered when their shards are wanted: after a forward pass
    without grad the root stays so, its parameters are then plain tensors, and what is written to
    the shards is overwritten unseen. A parameter may have been replaced, by a `fully_shard` that
    came too late or by `load_state_dict(assign=True)`: the old one is not trained any more. And its
    elements may have been replaced by another parameter's (`p.data = other.data`): one write would
    undo the other.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [weakref.ref(m) for m in _fsdp_modules(model)]
        self._homes: list[tuple[str, weakref.ref[nn.Module], str, nn.Parameter, str]] = []
        self._places: list[tuple[int, ...]] = []
        """Memory layout of the parameters when they last shared no element."""

    def watch(self, model: nn.Module, exchanged: Container[int]) -> None:
        """Require that the exchanged parameters (ids) stay where they are from now on. The model is
        resharded."""
        self._homes = [
            (f"{prefix}.{name}".lstrip("."), weakref.ref(module), name, parameter, _kind(parameter))
            for prefix, module in model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) in exchanged
        ]
        self._places = self._places_now()

    def check(self) -> None:
        """Reshard gathered modules. Raises UsageError if a parameter is not the same any more, has
        another type, shape or device, or shares its elements."""
        for reference in self._modules:
            module = reference()
            if module is not None:
                module.reshard()
        for name, home, attribute, parameter, kind in self._homes:
            owner = home()
            if owner is not None and owner._parameters.get(attribute) is not parameter:
                raise UsageError(
                    f"parameter {name} was replaced after mend_init; call fully_shard, "
                    "load_state_dict(assign=True) and other replacements before mend_init"
                )
            if (now := _kind(parameter)) != kind:
                raise UsageError(
                    f"parameter {name} was {kind} at mend_init and is {now}; call model.to(...), "
                    "and other conversions, before mend_init, on every rack"
                )
        if (places := self._places_now()) != self._places:
            self._check_elements()
            self._places = places

    def _places_now(self) -> list[tuple[int, ...]]:
        return [_place(parameter) for *_, parameter, _ in self._homes]

    def _check_elements(self) -> None:
        """Raises UsageError if two parameters share an element, or one parameter has an element
        twice."""
        named = {id(parameter): (name, parameter) for name, _, _, parameter, _ in self._homes}
        remedy = (
            "one write would undo the other. Copy values (p.data.copy_(other)), or tie parameters "
            "before mend_init, on every rack"
        )
        for name, parameter in named.values():
            if overlaps_itself(parameter):
                raise UsageError(
                    f"parameter {name} has several elements in one place in memory since "
                    f"mend_init; {remedy}"
                )
        if shared := sharing_memory([*named.values()]):
            raise UsageError(
                f"parameter {shared[1]} shares memory with {shared[0]} since mend_init; {remedy}"
            )


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    module = sys.modules.get("torch.distributed.fsdp")
    return [m for m in model.modules() if module is not None and isinstance(m, module.FSDPModule)]


def _kind(parameter: Tensor) -> str:
    """Type, shape and device. They may change in place: `model.bfloat16()` keeps the object."""
    return f"{parameter.dtype} {tuple(parameter.shape)} on {parameter.device}"


def _place(parameter: Tensor) -> tuple[int, ...]:
    """Address and strides of the elements that this rank holds; empty: unknown."""
    held = parameter if type(parameter) is nn.Parameter else local_of(parameter)
    if type(held) is Tensor or held is parameter:
        return held.data_ptr(), *held.stride()
    return ()
