"""Sums over ranks in one order, for DDP and FSDP2. Moves tensors through torch.distributed; opens
no socket of its own.

Every rank's part is a leaf of the tree of trees.py, in rank order: with 1, 2, 4 or 8 ranks that own
neighbouring rows of the batch the sum over the batch is the same. The bytes are those of a ring:
all_to_all, the tree over the rank's own share, all_gather. Small tensors go from every rank to
every other at once: the same bits in a third of the time of a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mend.determinism.coverage import unseen
from mend.determinism.trees import tree_sum, widen
from mend.errors import NotDeterministic, UsageError

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
except ImportError:  # an older torch: fix_fsdp says so
    FSDPModule, ReduceScatter = None, object  # type: ignore[assignment, misc]

Group = dist.ProcessGroup | None

SMALL_BYTES = 1 << 16
"""Of one rank. Up to this size the time depends on the number of turns."""


def all_reduce(tensor: Tensor, group: Group = None, *, mean: bool = False) -> None:
    """Put the sum (or mean) over all ranks into `tensor`, on every rank. A collective."""
    ranks = dist.get_world_size(group)
    with unseen():
        flat = tensor.detach().reshape(-1)
        if _is_small(flat):
            total = tree_sum(_of_all(flat, ranks, group), 0)
            tensor.detach().copy_((total / ranks if mean else total).view(tensor.shape))
            return
        share = -(-flat.numel() // ranks)
        padded = torch.cat([flat, flat.new_zeros(share * ranks - flat.numel())])
        mine = flat.new_empty(share)
        reduce_scatter(mine, padded, group, mean=mean)
        dist.all_gather(list(padded.chunk(ranks)), mine, group=group)
        tensor.detach().copy_(padded[: flat.numel()].view(tensor.shape))


def reduce_scatter(
    output: Tensor, tensor: Tensor, group: Group = None, *, mean: bool = False
) -> None:
    """Put this rank's share of the sum (or mean) of `tensor`, flat, into `output`. A collective."""
    ranks = dist.get_world_size(group)
    if tensor.numel() != ranks * output.numel():
        raise UsageError(
            f"{tensor.numel()} elements are not {ranks} shares of {output.numel()}; pad them"
        )
    with unseen():
        parts = torch.empty_like(tensor)
        dist.all_to_all_single(parts, tensor.contiguous(), group=group)
        total = tree_sum(parts.view(ranks, output.numel()), 0)
        output.copy_((total / ranks if mean else total).view(output.shape))


def all_gather(tensor: Tensor, group: Group = None, dim: int = 0) -> Tensor:
    """The ranks' tensors, of equal shapes, one after another in rank order. A collective."""
    ranks = dist.get_world_size(group)
    with unseen():
        moved = tensor.detach().movedim(dim, 0).contiguous()
        shape = (ranks * moved.shape[0], *moved.shape[1:])
        if _is_small(moved):
            whole = _of_all(moved.reshape(-1), ranks, group).view(shape)
        else:
            whole = moved.new_empty(shape)
            dist.all_gather(list(whole.chunk(ranks)), moved, group=group)
        return whole.movedim(0, dim)


def own_share(x: Tensor, group: Group = None, dim: int = 0) -> Tensor:
    """A copy of this rank's part of what all_gather() makes."""
    with unseen():
        return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone()


class Gathered(torch.autograd.Function):
    """all_gather() where every rank computes the same from what is gathered: the gradient of a
    part is its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return own_share(grad, ctx.group, ctx.dim), None, None


def _is_small(tensor: Tensor) -> bool:
    return 0 < tensor.numel() * tensor.element_size() <= SMALL_BYTES


def _of_all(flat: Tensor, ranks: int, group: Group) -> Tensor:
    """(ranks, elements): every rank's."""
    parts = flat.new_empty(ranks, flat.numel())
    dist.all_to_all_single(parts, flat.expand(ranks, -1).contiguous(), group=group)
    return parts


def sum_over_shares(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """The tree over a dimension, which is removed; every rank has an equal share. A collective.

    Only what is a subtree of the whole is summed before it goes over the wire.
    """
    share = x.shape[dim]
    leaves = share & -share
    moved = widen(x).movedim(dim, 0)
    parts = tree_sum(moved.reshape(share // leaves, leaves, *moved.shape[1:]), 1)
    return tree_sum(all_gather(parts, group), 0).to(x.dtype)


def ddp_hook(group: Group, bucket: Any) -> torch.futures.Future[Tensor]:
    """For DistributedDataParallel: model.register_comm_hook(None, ddp_hook)."""
    gradients = bucket.buffer()
    all_reduce(gradients, group, mean=True)
    devices = [gradients.device] if gradients.is_cuda else None
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    done.set_result(gradients)
    return done


# torch compares them with classes of its own, and here they are strings.
ddp_hook.__annotations__ = {}


class FixedReduceScatter(ReduceScatter):
    """A reduce_scatter for FSDP2 in place of NCCL's or gloo's."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,  # a ReduceOp, or torch's own marker for a scaled sum
        async_op: bool = False,
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotDeterministic(f"a reduce_scatter with {op}", "use a sum or a mean")
        reduce_scatter(output_tensor, input_tensor, group, mean=op == dist.ReduceOp.AVG)


def fix_fsdp(model: nn.Module) -> None:
    """Give every fully_shard-ed module of `model` the reduce_scatter of this file."""
    if FSDPModule is None or not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise NotDeterministic(
            f"FSDP2 of torch {torch.__version__} takes no reduce_scatter of others",
            "use torch 2.9 or newer, or DDP with ddp_hook",
        )
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise UsageError("no module of this model is sharded; call fully_shard first")
    for module in sharded:
        module.set_custom_reduce_scatter(FixedReduceScatter())
