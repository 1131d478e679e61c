"""The elements that a rank holds of every tensor, and those that it owns. Reads the model; uses no
peers, clocks or files.

Under FSDP2 and tensor parallelism a parameter is a DTensor of which a rank holds one box, under DDP
every rank holds the whole. Ranks that hold the same box are replicas: each owns an equal slice of
it, exchanges that slice with the other racks, and gets the other slices from its replicas when a
new anchor is applied. A box without replicas is owned whole, and no rank ever sees more of the
model than its own boxes.

Legend: N elements of a vector.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mend.errors import ConfigError
from mend.types import Layout, Owned, Span, owned_span

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

WHOLE = "whole"
"""Placement of a tensor that a rank holds completely."""


class Shard(NamedTuple):
    """A box of a tensor: elements [offset, offset + shape) of every dimension."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


NOTHING = Shard((0,), (0,))
"""The box of a tensor that a rank does not have."""


def as_dtensor(parameter: Tensor) -> DTensor | None:
    """The parameter, if it is a DTensor. Does not import DTensor: code that has made one has
    imported it already, and other processes should not wait for the import."""
    module = sys.modules.get("torch.distributed.tensor")
    return parameter if module is not None and isinstance(parameter, module.DTensor) else None


@torch.no_grad()
def local_of(parameter: Tensor) -> Tensor:
    """The elements this rank holds, sharing their memory."""
    spread = as_dtensor(parameter)
    return parameter.detach() if spread is None else spread.to_local().detach()


def is_array(tensor: Tensor) -> bool:
    """Whether what this rank holds is a plain array with data, as `bytes_held` needs it: not
    sparse, nested, quantized, of a class of its own, or on the meta device."""
    held = local_of(tensor)
    strided = held.layout == torch.strided and not held.is_nested
    return type(held) is Tensor and strided and not held.is_quantized and not held.is_meta


def bytes_held(tensor: Tensor) -> memoryview:
    """The elements that this rank holds of a tensor, as bytes in row-major order on the CPU."""
    flat = local_of(tensor).cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view


def shard_of(name: str, parameter: Tensor) -> Shard:
    """The box of the tensor that this rank holds. Raises ConfigError for a partial DTensor."""
    spread = as_dtensor(parameter)
    if spread is None:
        return whole(tuple(parameter.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in spread.placements):
        rule = f"is placed {spread.placements}"
        raise ConfigError("model", name, rule, "Reduce it before mend_init.")
    shape, offset = compute_local_shape_and_global_offset(
        spread.shape, spread.device_mesh, spread.placements
    )
    found = Shard(tuple(shape), tuple(offset))
    local = tuple(local_of(parameter).shape)
    if local != found.shape:
        rule = f"holds a shard of shape {local}, its placement {spread.placements} says {found}"
        raise ConfigError("model", name, rule, "Spread it with fully_shard or distribute_tensor.")
    return found


def placement_of(parameter: Tensor) -> str:
    """How a tensor is spread over its rack, as text: WHOLE, or placements and mesh."""
    spread = as_dtensor(parameter)
    if spread is None:
        return WHOLE
    mesh = "x".join(map(str, spread.device_mesh.shape))
    return f"{' '.join(map(str, spread.placements))} over {mesh}"


def mesh_ranks(parameter: Tensor) -> set[int]:
    """Global ranks that a tensor is spread over; empty for a plain one."""
    spread = as_dtensor(parameter)
    if spread is None:
        return set()
    return {int(rank) for rank in spread.device_mesh.mesh.flatten().tolist()}


def by_rows(ranks: int) -> str:
    """Placement of a tensor whose rows `fully_shard` has spread over so many ranks."""
    return f"S(0) over {ranks}"


def row_box(shape: tuple[int, ...], ranks: int, rank: int) -> Shard:
    """The box of a rank under that placement, by the rule of `torch.chunk`: all ranks get equally
    many rows, the last ones the remainder."""
    rows, each = shape[0], -(-shape[0] // ranks)
    first, last = min(rank * each, rows), min((rank + 1) * each, rows)
    return Shard((last - first, *shape[1:]), (first, *(0 for _ in shape[1:])))


def whole_of(parameter: Tensor) -> Tensor:
    """The whole tensor. Collective over its ranks if they hold shards."""
    spread = as_dtensor(parameter)
    return parameter.detach() if spread is None else spread.full_tensor().detach()


def owned_by(layout: Layout, sharded: Container[str], ranks: int, rank: int) -> Owned:
    """The elements that a rank of so many owns, as indices of the whole tensors: its rows of those
    named in `sharded`, its slice of all others."""
    spans = []
    for slot in layout.slots:
        if slot.name in sharded:
            box, row = row_box(slot.shape, ranks, rank), prod(slot.shape[1:])
            first = box.offset[0] * row
            spans.append(Span(first, first + box.numel))
        else:
            spans.append(owned_span(slot.numel, ranks, rank))
    return _owned(spans, tuple(slot.shape for slot in layout.slots))


@dataclass(frozen=True, slots=True)
class Holding:
    """One rank's place in one fragment.

    replicas[i]: ranks of the rack that hold the same box of slot i, ascending, this one among them.
    """

    local: tuple[int, ...]
    """Elements this rank holds, per slot."""
    replicas: tuple[tuple[int, ...], ...]
    owned: Owned

    @property
    def everything(self) -> Owned:
        """All elements the rank holds, as if it owned them."""
        return _owned(Span(0, numel) for numel in self.local)

    @property
    def teams(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Replicas that have to exchange slices -> the slots concerned. The order is the same on
        all ranks."""
        found = defaultdict[tuple[int, ...], list[int]](list)
        for slot, ranks in enumerate(self.replicas):
            if len(ranks) > 1:
                found[ranks].append(slot)
        return {ranks: tuple(found[ranks]) for ranks in sorted(found)}


def holding(layout: Layout, boxes: Sequence[Sequence[Shard]], rank: int) -> Holding:
    """The elements that `rank` owns, from the boxes of all ranks of the rack: boxes[rank][slot].

    Raises ConfigError when the boxes of a tensor do not make up the whole.
    """
    replicas, spans = [], []
    for i, slot in enumerate(layout.slots):
        holders = defaultdict[Shard, list[int]](list)
        for other, theirs in enumerate(boxes):
            if theirs[i].numel or not slot.numel:
                holders[theirs[i]].append(other)
        found = sum(box.numel for box in holders)
        if found != slot.numel:
            rule = f"has {slot.numel} elements, the ranks of this rack hold {found} different ones"
            remedy = "Shard every parameter over ranks of one rack only, and over all of a mesh."
            raise ConfigError("model", slot.name, rule, remedy)
        mine = boxes[rank][i]
        team = tuple(holders.get(mine, [rank]))
        replicas.append(team)
        spans.append(owned_span(mine.numel, len(team), team.index(rank)))
    local = tuple(box.numel for box in boxes[rank])
    shapes = tuple(box.shape for box in boxes[rank])
    return Holding(local, tuple(replicas), _owned(spans, shapes))


def whole(shape: tuple[int, ...]) -> Shard:
    """The box of a rank that holds all of a tensor."""
    return Shard(shape, (0,) * len(shape))


def replicated(layout: Layout, ranks: int, rank: int) -> Holding:
    """The holding of a rank under DDP: every rank holds everything."""
    return holding(layout, [[whole(slot.shape) for slot in layout.slots]] * ranks, rank)


GatherSlices = Callable[[tuple[int, ...], tuple[int, ...]], Sequence[Tensor]]
"""(replicas, slots) -> what each replica owns of these slots, end to end. The vector may be
longer."""


def put_together(mine: Holding, slice_N: Tensor, gather: GatherSlices) -> Tensor:
    """All that this rank holds of a fragment (fp32), from its own slice and those of its
    replicas."""
    whole_N = torch.empty(sum(mine.local), dtype=torch.float32, device=slice_N.device)
    own, all_ = _places(mine.owned), _places(mine.everything)
    for slot, ranks in enumerate(mine.replicas):
        if len(ranks) == 1:
            whole_N[all_[slot]] = slice_N[own[slot]]
    for ranks, slots in mine.teams.items():
        parts, offsets = gather(ranks, slots), [0] * len(ranks)
        for slot in slots:
            target_n = whole_N[all_[slot]]
            for position, part in enumerate(parts):
                span = owned_span(mine.local[slot], len(ranks), position)
                start = offsets[position]
                offsets[position] = start + span.numel
                target_n[span.start : span.stop] = part[start : offsets[position]]
    return whole_N


def take(slice_N: Tensor, owned: Owned, slots: Sequence[int]) -> Tensor:
    """The elements of these slots, end to end."""
    places = _places(owned)
    return torch.cat([slice_N[places[slot]] for slot in slots])


def _places(owned: Owned) -> list[slice]:
    """Positions of the elements of each slot in the vector of `owned`."""
    return [slice(start, stop) for start, stop in pairwise(owned.cuts)]


def _owned(spans: Iterable[Span], shapes: tuple[tuple[int, ...], ...] = ()) -> Owned:
    kept = tuple(spans)
    return Owned(kept, sum(span.numel for span in kept), shapes)
