"""Digests of weights, optimizers and other states. Reads tensors, changes none.

A digest is sha256 over the names, shapes, dtypes and the xxh3_128 of the bytes of all tensors.
Detects accidents, not adversaries. Of DTensors (FSDP2, TP) the whole tensor counts, so that a
sharded and an unsharded model have equal digests; all ranks that hold a shard call it together.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from mend.determinism.sharding import share_of, whole_of, whole_tensor
from mend.errors import UsageError

Hash = TypeVar("Hash")

DEPTH_MAX = 32
"""Of nested lists and dicts in a state."""

_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Parts that DDP, torch.compile and checkpointing add to the names of parameters."""


def weight_digest(model: nn.Module) -> str:
    """Digest of all parameters and persistent buffers, by name; wrappers do not change it."""
    return digest({plain_name(name): value for name, value in model.state_dict().items()})


def optimizer_digest(optimizer: torch.optim.Optimizer) -> str:
    """Digest of the state and options of all parameter groups, in the optimizer's own order."""
    groups = []
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        states = [optimizer.state.get(parameter, {}) for parameter in group["params"]]
        groups.append({"options": options, "states": states})
    return digest(groups)


def digest(value: Any) -> str:
    """Digest of nested dicts, lists, tensors, arrays and numbers, as a scheduler's state_dict()."""
    whole = hashlib.sha256(b"mend-dg1")
    for piece in pieces([value], tensor_hash)[0]:
        whole.update(struct.pack("!Q", len(piece)))
        whole.update(piece)
    return whole.hexdigest()


def pieces(values: Sequence[Any], hash_of: Callable[[Tensor], Hash]) -> list[list[bytes | Hash]]:
    """What makes each value: names, shapes, types and numbers, and `hash_of` every whole tensor.
    Where there are DTensors a collective, for all values together."""
    cut = (share_of(tensor) for value in values for tensor in _tensors(value, 0))
    wholes = whole_of([share for share in cut if share is not None])
    return [list(_pieces(value, "", wholes, hash_of)) for value in values]


def tensor_hash(tensor: Tensor) -> bytes:
    """Hash of a tensor's elements in row-major order; 16 bytes."""
    return xxhash.xxh3_128_digest(bytes_of(whole_tensor(tensor.detach()).cpu()).numpy().data)


def first_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> str | None:
    """The first name, in the order of `one`, whose tensor differs in any bit; None: all equal."""
    for name, tensor in one.items():
        if name not in other or not same_bits(tensor, other[name]):
            return name
    return next((name for name in other if name not in one), None)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether shapes, types and all bits are equal, those of NaN and of zeros as well."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(bytes_of(one.detach()), bytes_of(other.detach()))


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements in row-major order as flat uint8."""
    flat = tensor.contiguous().reshape(-1)
    if flat.stride(0) != 1:  # one element of something larger is contiguous, too
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    """In the order of _pieces()."""
    if depth > DEPTH_MAX:
        raise UsageError(f"a value is nested deeper than {DEPTH_MAX}; digest a part")
    if isinstance(value, Tensor):
        yield value
        return
    for _, item in _items(value):
        yield from _tensors(item, depth + 1)


def _items(value: Any) -> list[tuple[str, Any]]:
    """The items of a container in a fixed order, each with its part of the path."""
    if isinstance(value, Mapping):
        keys = sorted(value, key=lambda key: (type(key).__name__, key))
        return [(f".{key}", value[key]) for key in keys]
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    return []


def _pieces(
    value: Any, path: str, wholes: Iterator[Tensor], hash_of: Callable[[Tensor], Hash]
) -> Iterator[bytes | Hash]:
    """`wholes`: what is next of the tensors that are cut."""
    if isinstance(value, Tensor):
        yield f"{path}:{value.dtype}:{tuple(value.shape)}".encode()
        yield hash_of(whole_tensor(value) if share_of(value) is None else next(wholes))
        return
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:  # else of addresses
        yield f"{path}:{value.dtype}:{value.shape}".encode()
        yield xxhash.xxh3_128_digest(value.tobytes())
    elif isinstance(value, Mapping):
        yield f"{path}:{len(value)}".encode()
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        yield f"{path}[{len(value)}]".encode()
    else:
        yield _scalar(value, path)
    for further, item in _items(value):
        yield from _pieces(item, path + further, wholes, hash_of)


def _scalar(value: Any, path: str) -> bytes:
    if isinstance(value, float):
        return f"{path}={value.hex()}".encode()
    if value is None or isinstance(value, (bool, int, str, bytes, np.generic, torch.dtype)):
        return f"{path}={value!r}".encode()
    kind = "a set has no order" if isinstance(value, Set) else "it has no bytes that mend knows"
    raise UsageError(f"{path or 'the value'} is a {type(value).__name__}: {kind}; leave it out")
