"""Finds buffers and frozen parameters that racks do not exchange: those that training changes, and
digests of all buffers for a comparison at the start. Reads the model; uses no peers, clocks or
files.

Of those that training changes only floating-point ones of the state dict count. Some are known by
the type of their module; for the rest only a comparison of values tells.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import xxhash
from torch import Tensor, nn

from mend.fragment.plan import unwrap
from mend.fragment.running_statistics import modules_with_statistics
from mend.fragment.shards import as_dtensor, bytes_held, is_array, local_of
from mend.types import BUFFERS_MAX

NAMED_MAX = 4
"""Limit of the names in a sentence; the others are counted."""

FROZEN_NUMEL_MAX = 1 << 16
"""Limit of the compared elements of a frozen parameter. An average changes all of them, and a
frozen base may be large."""

BUFFER_NUMEL_MAX = 1 << 20
"""Limit of the elements of a buffer that racks compare at the start."""


def running_statistics(model: nn.Module) -> list[str]:
    """Paths of the modules that keep running statistics of their input, as BatchNorm does."""
    return [
        path or type(module).__name__ for path, module in modules_with_statistics(unwrap(model))
    ]


def digests_of_rest(model: nn.Module, exchanged: Collection[Tensor]) -> dict[str, str]:
    """Name -> digest of what is not exchanged, as this rank holds it: buffers, but for those of
    `running_statistics`, and the first elements of parameters that need no gradient and are not
    `exchanged`, as the teacher of a student that is an average of it."""
    module, known = unwrap(model), {id(p) for p in exchanged}
    buffers = (
        (name, buffer)
        for name, buffer, hidden in _buffers(module)
        if not hidden and buffer.is_floating_point()
    )
    frozen = (
        (name, parameter.detach().reshape(-1)[:FROZEN_NUMEL_MAX])
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
        and id(parameter) not in known
        and parameter.is_floating_point()
        and is_array(parameter)
        and as_dtensor(parameter) is None  # FSDP2 may have another in its place at the end
    )
    return {
        name: xxhash.xxh3_128_hexdigest(bytes_held(tensor)) for name, tensor in (*buffers, *frozen)
    }


def digests_of_buffers(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """(name, digest) of the buffers, as this rank holds them, of any type, also those that no state
    dict has, but for those of `running_statistics`. Of each the first BUFFER_NUMEL_MAX elements
    count. BUFFERS_MAX lines; the last one is of all the rest."""
    lines, rest, more = list[tuple[str, str]](), xxhash.xxh3_64(), 0
    for name, buffer, _ in _buffers(unwrap(model)):
        held = local_of(buffer)
        digest = xxhash.xxh3_64(repr((tuple(held.shape), held.dtype)).encode())
        digest.update(bytes_held(_beginning(held)))
        if len(lines) < BUFFERS_MAX - 1:
            lines.append((name, digest.hexdigest()))
        else:
            rest.update(digest.digest())
            more += 1
    return (*lines, (f"{more} more", rest.hexdigest())) if more else tuple(lines)


def _beginning(tensor: Tensor) -> Tensor:
    """At most BUFFER_NUMEL_MAX elements of a buffer, without a copy of the others."""
    for dim in range(tensor.dim()):
        if tensor.numel() > BUFFER_NUMEL_MAX:
            most = tensor.shape[dim] * BUFFER_NUMEL_MAX // tensor.numel()
            tensor = tensor.narrow(dim, 0, max(1, most))
    return tensor


def in_few_words(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    found = list(names)
    more = f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
    return ", ".join(found[:NAMED_MAX]) + more


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, buffer, whether no state dict has it), without running statistics, and without those
    that are not plain arrays."""
    known = {id(module) for _, module in modules_with_statistics(model)}
    for path, module in model.named_modules():
        if id(module) in known:
            continue
        hidden = module._non_persistent_buffers_set
        for name, buffer in module.named_buffers(recurse=False):
            if is_array(buffer):
                yield f"{path}.{name}" if path else name, buffer, name in hidden
