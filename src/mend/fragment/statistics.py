"""Finds buffers and frozen parameters that training changes and racks do not exchange. Reads the
model; never peers, clocks, files.

Only floating-point ones of the state dict count. Some are known by the type of their module; for
the rest only a comparison of values tells whether training changed them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import xxhash
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mend.fragment.plan import unwrap
from mend.fragment.shards import as_dtensor, bytes_held

NAMED_MAX = 4
"""Names in a sentence; the rest is counted."""

FROZEN_NUMEL_MAX = 1 << 16
"""Elements of a frozen parameter that are compared: an average moves all of them, and a frozen base
may be large."""


def running_statistics(model: nn.Module) -> list[str]:
    """Paths of the modules that keep running statistics of their input, as BatchNorm does."""
    return [
        path or type(module).__name__
        for path, module in unwrap(model).named_modules()
        if isinstance(module, _NormBase) and module.running_mean is not None
    ]


def digests_of_rest(model: nn.Module, exchanged: Collection[Tensor]) -> dict[str, str]:
    """Name -> digest of what nobody exchanges, as this rank holds it: buffers, but for those of
    `running_statistics`, and the first elements of parameters that need no gradient and are not
    `exchanged`, as the teacher of a student that is an average of it."""
    module, known = unwrap(model), {id(p) for p in exchanged}
    frozen = (
        (name, parameter.detach().reshape(-1)[:FROZEN_NUMEL_MAX])
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
        and id(parameter) not in known
        and parameter.is_floating_point()
        and not parameter.is_meta
        and as_dtensor(parameter) is None  # FSDP2 may have another in its place at the end
    )
    return {
        name: xxhash.xxh3_128_hexdigest(bytes_held(tensor))
        for name, tensor in (*_others(module), *frozen)
    }


def in_few_words(names: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    found = list(names)
    more = f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
    return ", ".join(found[:NAMED_MAX]) + more


def _others(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            continue
        hidden = module._non_persistent_buffers_set
        for name, buffer in module.named_buffers(recurse=False):
            if name not in hidden and buffer.is_floating_point() and not buffer.is_meta:
                yield f"{path}.{name}" if path else name, buffer
