"""Transfers the state of an optimizer to a joining rack: it is loaded bit for bit, or refused with
the name of what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mend.engine.hooks.step_hooks import HoldsParameters, held_by
from mend.engine.joining.plain_data import Carried, Path, describe_path
from mend.errors import StateRefused
from mend.fragment.shards import as_dtensor


def portable(name: str, optimizer: HoldsParameters, names: Mapping[int, str]) -> dict[str, Any]:
    """The state dict, with the facts that must be equal where it is loaded. `names`: id of a
    parameter -> its name in the model. Raises StateRefused for an optimizer without a
    state_dict."""
    if not hasattr(optimizer, "state_dict"):
        raise StateRefused(f"{name} ({type(optimizer).__name__}) has no state_dict")
    params = held_by(optimizer)
    return {
        "kind": _kind(optimizer),
        "parameters": [names.get(id(p), "") for p in params],
        "shapes": [list(_local(p).shape) for p in params],
        "state": optimizer.state_dict(),
    }


def adopt(
    name: str, optimizer: HoldsParameters, names: Mapping[int, str], theirs: Any
) -> list[str]:
    """Load the donor's state `theirs`, which `portable` made. Returns the hyperparameters that it
    changes, as text. Raises StateRefused."""
    ours = portable(name, optimizer, names)
    for what in ("kind", "parameters", "shapes"):
        if theirs[what] != ours[what]:
            raise StateRefused(_difference(name, what, theirs[what], ours[what]))
    groups = theirs["state"].get("param_groups", [])
    own = ours["state"].get("param_groups", [])
    if [group.get("params") for group in groups] != [group.get("params") for group in own]:
        raise StateRefused(f"{name} has other parameter groups than the donor's")
    params = held_by(optimizer)
    state = resolved((name, "state"), theirs["state"], params)
    changed = _changed(own, groups)
    optimizer.load_state_dict(state)  # type: ignore[attr-defined]
    if isinstance(optimizer, torch.optim.Optimizer):
        _set_exactly(optimizer, params, state["state"])
    loaded = optimizer.state_dict()  # type: ignore[attr-defined]
    if place := first_difference((name,), state, loaded):
        raise StateRefused(
            f"{describe_path(place)} is not as it was at the donor once it is loaded: "
            f"{_kind(optimizer)}.load_state_dict changes it"
        )
    return changed


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _local(tensor: Tensor) -> Tensor:
    spread = as_dtensor(tensor)
    return tensor if spread is None else spread.to_local()


def _difference(name: str, what: str, there: Any, here: Any) -> str:
    if what == "kind":
        return f"{name} is a {there} at the donor and a {here} here; make the same on every rack"
    if len(there) != len(here):
        return f"{name} holds {len(there)} parameters at the donor and {len(here)} here"
    i = next(i for i in range(len(here)) if there[i] != here[i])
    return f"parameter {i} of {name}: {what} {there[i]} at the donor, {here[i]} here"


def _changed(own: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> list[str]:
    changes = []
    for number, (here, there) in enumerate(zip(own, theirs, strict=True)):
        for key in sorted({*here, *there}):
            before, after = _shown(here.get(key)), _shown(there.get(key))
            if before != after:
                changes.append(f"group {number} {key}: {before} -> {after}")
    return changes


def _shown(value: object) -> str:
    if isinstance(value, Carried):
        value = value.tensor
    return str(value.tolist()) if isinstance(value, Tensor) else repr(value)


def resolved(path: Path, value: Any, params: Sequence[Tensor]) -> Any:
    """The value with each tensor on the device of its parameter, or on the CPU."""
    if isinstance(value, Carried):
        return _placed(path, value, params)
    if isinstance(value, dict):
        made = type(value)()
        for key, each in value.items():
            made[key] = resolved((*path, key), each, params)
        return made
    if isinstance(value, list | tuple):
        return type(value)(resolved((*path, i), each, params) for i, each in enumerate(value))
    return value


def _placed(path: Path, value: Carried, params: Sequence[Tensor]) -> Tensor:
    """`path`: name, "state", "state", number of the parameter, ...; otherwise the tensor belongs to
    no parameter."""
    index = path[3] if len(path) > 3 and path[2] == "state" else None
    like = params[index] if isinstance(index, int) and 0 <= index < len(params) else None
    device = value.device if value.device == "cpu" or like is None else like.device
    tensor = value.tensor.to(device, copy=True)  # the received memory is freed
    if not value.placements:
        return tensor
    spread = as_dtensor(like) if like is not None else None
    if spread is None or str(spread.placements) != value.placements:
        has = "not sharded" if spread is None else str(spread.placements)
        raise StateRefused(
            f"{describe_path(path)} is sharded as {value.placements} at the donor, {has} here"
        )
    whole = torch.Size(value.shape)
    stride = torch.empty(whole, device="meta", dtype=torch.float32).stride()
    return type(spread).from_local(
        tensor, spread.device_mesh, spread.placements, run_check=False, shape=whole, stride=stride
    )


def _set_exactly(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor], state: Mapping[Any, Any]
) -> None:
    """Set the state as it was saved: `load_state_dict` casts tensors to the dtype of the parameter,
    which may be narrower, and does not keep strings."""
    for index, values in state.items():
        if not isinstance(index, int) or not isinstance(values, dict):
            continue
        optimizer.state[params[index]].update(values)


def first_difference(path: Path, one: Any, other: Any) -> Path:
    """The first place at which two state dicts differ in a bit; empty: they are equal."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        same = isinstance(one, Tensor) and isinstance(other, Tensor) and _equal(one, other)
        return () if same else path
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return (*path, next(iter(one.keys() ^ other.keys())))
        each = ((key, one[key], other[key]) for key in one)
    elif isinstance(one, list | tuple) and type(one) is type(other):
        if len(one) != len(other):
            return path
        each = ((i, one[i], other[i]) for i in range(len(one)))
    else:
        same = type(one) is type(other) and (one == other or (one != one and other != other))
        return () if same else path
    places = (first_difference((*path, key), a, b) for key, a, b in each)
    return next((place for place in places if place), ())


def _equal(one: Tensor, other: Tensor) -> bool:
    one, other = _local(one).detach(), _local(other).detach()
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if not one.numel():
        return True
    return torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8).cpu(),
        other.contiguous().reshape(-1).view(torch.uint8).cpu(),
    )
