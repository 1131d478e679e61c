"""Linear layers cut over ranks, to the bits of one rank. Moves tensors through torch.distributed;
for parallelize_module.

On the CPU a rank's sums are whole subtrees of the uncut layer's (gemm.leaf_of cuts into 8 leaves
and more); the ranks' results, in fp32, are summed by the rest of the tree, in rank order, and
rounded once. On a GPU no sum is cut (gpu_parallel.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from mend.determinism.autocasting import autocast_type, compute_in
from mend.determinism.collectives import all_gather, all_reduce, reduce_scatter
from mend.determinism.enabling import enabled
from mend.determinism.gemm import leaf_of
from mend.determinism.gpu_parallel import TOKENS, CutLinear
from mend.determinism.gpu_products import ALIGNED
from mend.determinism.linear import Linear, Order
from mend.determinism.trees import tree_sum
from mend.errors import NotDeterministic, UsageError, require


@dataclass(frozen=True, slots=True)
class Cut(Order):
    """Of a layer that is cut. `sums_in`: over ranks forward (the inputs are cut), otherwise
    backward (the outputs are). `fused`: layers that the outputs hold one after another, each cut.
    `tokens_cut`: the uncut side is this rank's share of the tokens."""

    group: dist.ProcessGroup
    sums_in: bool
    fused: int = 1
    tokens_cut: bool = False

    def whole_input(self, x: Tensor) -> Tensor:
        return all_gather(x, self.group, TOKENS) if self.tokens_cut and not self.sums_in else x

    def whole_gradient(self, grad: Tensor) -> Tensor:
        return all_gather(grad, self.group, TOKENS) if self.tokens_cut and self.sums_in else grad

    def output(self, product: Tensor) -> Tensor:
        return self._complete(product) if self.sums_in else product

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        # Zero-argument super() knows nothing of a class that slots=True has made anew.
        if self.sums_in:
            return Order.input_gradient(self, grad, weight)
        pairs = zip(grad.chunk(self.fused, -1), weight.chunk(self.fused), strict=True)
        parts = [Order.input_gradient(self, *pair) for pair in pairs]
        if self.fused == 1:
            return self._complete(parts[0])
        return tree_sum(self._complete(torch.stack(parts, -2)), -2)

    def _complete(self, product: Tensor) -> Tensor:
        """The sum over ranks, of all tokens or of this rank's."""
        if not self.tokens_cut:
            all_reduce(product, self.group)
            return product
        (rows, tokens), ranks = product.shape[:2], dist.get_world_size(self.group)
        shares = product.reshape(rows, ranks, tokens // ranks, *product.shape[2:])
        mine = torch.empty_like(shares.select(TOKENS, 0).contiguous())
        reduce_scatter(mine, shares.movedim(TOKENS, 0).contiguous(), self.group)
        return mine


class _Parallel(ParallelStyle):
    """Cuts one nn.Linear; its parameters become DTensors, so that digests, checkpoints and the
    optimizer see the whole layer.

    `tokens_cut`: between layers every rank has its share of the tokens (sequence_parallel.py).
    """

    sums_in: bool

    def __init__(self, *, tokens_cut: bool = False) -> None:
        super().__init__()
        self.tokens_cut, self.fused = tokens_cut, 1

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise UsageError(f"{type(self).__name__} cuts nn.Linear, not {type(module).__name__}")
        outputs, inputs = module.weight.shape
        check = _check_gpu_shares if device_mesh.device_type == "cuda" else _check_shares
        check(inputs if self.sums_in else outputs, device_mesh.size(), self.fused)
        orders = leaf_of(inputs), leaf_of(outputs)
        cut = Cut(*orders, group_of(device_mesh), self.sums_in, self.fused, self.tokens_cut)
        places = {"weight": self._place(), "bias": Replicate() if self.sums_in else self._place()}
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = _distribute(parameter.detach(), device_mesh, places[name], self.fused)
            module.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))
        module.forward = partial(_forward, module, cut)  # type: ignore[method-assign]
        return module

    def _place(self) -> Placement:
        if self.fused > 1:
            return _StridedShard(0, split_factor=self.fused)
        return Shard(1 if self.sums_in else 0)


class ColumnParallel(_Parallel):
    """The outputs are cut: every rank has the whole input and its share of the output features.
    As torch's ColwiseParallel; query, key, value, gate and up, the head of a cut vocabulary.

    `fused`: so many layers of equal sizes, a power of two, are one, as gate and up of SwiGLU. Of
    each the rank has its share, in their order: `gate, up = layer(x).chunk(2, -1)`.
    """

    sums_in = False

    def __init__(self, *, fused: int = 1, tokens_cut: bool = False) -> None:
        super().__init__(tokens_cut=tokens_cut)
        if fused < 1:
            raise UsageError(f"fused={fused}: at least one layer")
        self.fused = fused


class RowParallel(_Parallel):
    """The inputs are cut: every rank has its share of the input features and the whole output.
    As torch's RowwiseParallel; out and down."""

    sums_in = True


def _distribute(whole: Tensor, mesh: DeviceMesh, place: Placement, fused: int) -> DTensor:
    """Not every torch cuts by a _StridedShard, so rows are brought into the order of ranks."""
    if fused == 1:
        return distribute_tensor(whole, mesh, [place])
    by_rank = whole.view(fused, mesh.size(), -1, *whole.shape[1:]).transpose(0, 1)
    local = distribute_tensor(by_rank.reshape(whole.shape), mesh, [Shard(0)]).to_local()
    return DTensor.from_local(
        local, mesh, [place], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _check_shares(summed: int, ranks: int, fused: int) -> None:
    parts = ranks * fused
    if summed % parts or (summed // parts) % leaf_of(summed) or parts & (parts - 1):
        leaves = summed // leaf_of(summed)
        layers = f" of {fused} fused layers" if fused > 1 else ""
        raise NotDeterministic(
            f"{summed} features{layers} are {leaves} leaves of {leaf_of(summed)}, which "
            f"{ranks} ranks cannot share as subtrees",
            "take 1, 2, 4 or 8 ranks, and features that are a multiple of 8 (of 2 or 4 "
            "fused layers: of 128 for every rank and layer)",
        )


def _check_gpu_shares(summed: int, ranks: int, fused: int) -> None:
    if summed % (ranks * fused * ALIGNED):
        layers = f" of {fused} fused layers" if fused > 1 else ""
        raise NotDeterministic(
            f"{summed} features{layers} on {ranks} GPUs",
            f"take features of which every rank and layer has a multiple of {ALIGNED}",
        )


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Raises UsageError for a mesh of several dimensions."""
    if mesh.ndim != 1:
        raise UsageError(f"a mesh of {mesh.ndim} dimensions; name one, as mesh['tp']")
    return mesh.get_group()


def refuse_other_levels(what: str) -> None:
    """Raises UsageError unless level shape is on."""
    active = enabled()
    if active is None or active.level != "shape":
        raise UsageError(f'{what} is cut by mend.determinism: call it under enable(level="shape")')


def _forward(module: nn.Linear, cut: Cut, x: Tensor) -> Tensor:
    refuse_other_levels("this layer")
    if cut.tokens_cut:
        refuse_tokens(x, 1 if not cut.sums_in else dist.get_world_size(cut.group))
    weight, bias = (_local(parameter) for parameter in (module.weight, module.bias))
    if x.device.type not in ("cpu", "cuda"):
        raise NotDeterministic(
            f"tensor parallelism at level shape on {x.device.type}", "use CPUs or CUDA GPUs"
        )
    layer: Any = CutLinear if x.is_cuda else Linear
    with compute_in(autocast_type(x)):  # no operator of torch, so autocast does not see it
        output: Tensor = layer.apply(x, require(weight, "a layer without a weight"), bias, cut)
    return output


def refuse_tokens(x: Tensor, ranks: int) -> None:
    """Raises UsageError where tokens have no dimension of their own, or no equal shares."""
    if x.dim() < 3 or x.shape[TOKENS] % ranks:
        raise UsageError(
            f"a tensor of shape {tuple(x.shape)}: where ranks share the tokens it is (rows, "
            f"tokens, features), and {ranks} ranks have equal shares"
        )


def _local(parameter: Tensor | None) -> Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
