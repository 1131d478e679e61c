"""Gathers tensors that are sharded over ranks (DTensors of FSDP2 and of tensor parallelism) with
few collectives. Moves tensors through torch.distributed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from mend.determinism.collectives import all_gather
from mend.determinism.gemm import ELEMENTS_MAX


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's part of a tensor of `shape` that is cut along `dim`, in rank order, as
    torch.chunk cuts. `fused`: the dimension holds so many equal pieces, each of which is cut."""

    local: Tensor
    shape: torch.Size
    dim: int
    fused: int
    group: dist.ProcessGroup

    @property
    def each(self) -> torch.Size:
        """The shape of the first rank's part, the largest."""
        shape = list(self.shape)
        shape[self.dim] = -(-shape[self.dim] // dist.get_world_size(self.group))
        return torch.Size(shape)

    @property
    def has_rows(self) -> bool:
        """Whether rows, along the last dimension, are whole here."""
        return self.dim == 0 and len(self.shape) > 1

    def wide(self) -> Share:
        """In fp32, unless it is wider."""
        return replace(
            self, local=self.local.to(torch.promote_types(self.local.dtype, torch.float32))
        )

    def of_rows(self, by_row: Tensor) -> Share:
        """The share of a tensor with one element for every row of the whole."""
        rows = torch.Size((self.shape[0], self.shape[1:-1].numel()))
        return replace(self, local=by_row.view(self.local.shape[0], rows[1]), shape=rows)


def share_of(tensor: Tensor) -> Share | None:
    """None: every rank has the whole, or it is cut in a way that only torch puts together."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim != 1:
        return None
    place, shape, group = tensor.placements[0], tensor.shape, tensor.device_mesh.get_group()
    if isinstance(place, _StridedShard):  # first: in older torches it is a Shard as well
        fused = int(place.split_factor)
        if place.dim == 0 and shape[0] % (fused * dist.get_world_size(group)) == 0:
            return Share(local_of(tensor), shape, 0, fused, group)
    elif isinstance(place, Shard):
        return Share(local_of(tensor), shape, place.dim, 1, group)
    return None


def local_of(tensor: Tensor) -> Tensor:
    """The elements that this rank holds, without history."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """The unsharded tensor. A collective where `tensor` is a DTensor that is cut."""
    if not isinstance(tensor, DTensor):
        return tensor
    if all(isinstance(place, Replicate) for place in tensor.placements):
        return local_of(tensor)
    if (share := share_of(tensor) or _share_of_layer(tensor)) is not None:
        return next(whole_of([share]))
    whole: Tensor = tensor.full_tensor()
    return whole


def _share_of_layer(tensor: DTensor) -> Share | None:
    """This rank's share of a layer that tensor parallelism cut along the second dimension of a
    mesh, and FSDP2 then along the first, whose parts it puts together; None: it was not cut so. A
    collective, which torch has not in all versions."""
    if tensor.device_mesh.ndim != 2:
        return None
    (outer, inner), shape = tensor.placements, list(tensor.shape)
    cut = (Shard, _StridedShard)
    if not isinstance(outer, cut) or not isinstance(inner, cut):
        return None
    if type(outer) is type(inner) is Shard and outer.dim == inner.dim:
        return None  # cut along the first dimension of the mesh first
    fused = int(inner.split_factor) if isinstance(inner, _StridedShard) else 1
    data, layer = (tensor.device_mesh.get_group(dim) for dim in range(2))
    if shape[inner.dim] % (fused * dist.get_world_size(layer)) or (fused > 1 and inner.dim):
        return None
    shape[inner.dim] //= dist.get_world_size(layer)
    local = Share(local_of(tensor), torch.Size(shape), outer.dim, 1, data)
    return Share(next(whole_of([local])), tensor.shape, inner.dim, fused, layer)


def whole_of(shares: Iterable[Share]) -> Iterator[Tensor]:
    """The unsharded tensors, in order. A collective for each ELEMENTS_MAX of them: neighbours of
    one group and dtype share it, and no more than that is whole at once."""
    some: list[Share] = []
    for share in shares:
        numel = share.shape.numel() + sum(each.shape.numel() for each in some)
        if some and (numel > ELEMENTS_MAX or not _fit(some[0], share)):
            yield from _gather(some)
            some = []
        some.append(share)
    if some:
        yield from _gather(some)


def _fit(one: Share, other: Share) -> bool:
    return one.group is other.group and one.local.dtype == other.local.dtype


def _gather(shares: Sequence[Share]) -> Iterator[Tensor]:
    mine = torch.cat([_pad(share) for share in shares])
    parts_RN = all_gather(mine[None], shares[0].group)
    columns = torch.split(parts_RN, [share.each.numel() for share in shares], 1)
    yield from map(assemble, shares, columns)


def _pad(share: Share) -> Tensor:
    """Flat, and as long as the first rank's: zeros where rows, or ends of rows, are missing."""
    missing = list(share.local.shape)
    missing[share.dim] = share.each[share.dim] - missing[share.dim]
    if missing[share.dim]:
        return torch.cat([share.local, share.local.new_zeros(missing)], share.dim).reshape(-1)
    return share.local.reshape(-1)


def assemble(share: Share, parts_RN: Tensor) -> Tensor:
    """The whole, of all ranks' parts, each flat and padded to the first's shape."""
    ranks, each, dim = len(parts_RN), share.each, share.dim
    parts = parts_RN.reshape(ranks, *each)
    if share.fused > 1:
        pieces = parts.view(ranks, share.fused, -1, math.prod(each[1:]))
        return pieces.transpose(0, 1).reshape(share.shape)
    return parts.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, share.shape[dim])
