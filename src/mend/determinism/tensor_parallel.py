"""determinism.tensor_parallel: linear layers cut over ranks, to the bits of one rank. Moves tensors
through torch.distributed; for parallelize_module.

A rank's sums are whole subtrees of the uncut layer's (gemm.leaf_of cuts into 8 leaves and more);
the ranks' results, in fp32, are summed by the rest of the tree, in rank order, and rounded once.
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

from mend.determinism.collectives import all_reduce
from mend.determinism.coverage import unseen
from mend.determinism.enabling import enabled
from mend.determinism.gemm import leaf_of, outer_product, rows_product
from mend.determinism.layout import by_sequence, layout
from mend.determinism.linear import refuse_second_derivative
from mend.determinism.trees import tree_sum_dims
from mend.errors import NotDeterministic, UsageError


@dataclass(frozen=True, slots=True)
class Cut:
    """How a layer is cut: `leaf_in`, `leaf_out` of the whole; `sums_in`: over ranks, forward (the
    inputs are cut), otherwise backward (the outputs are)."""

    group: dist.ProcessGroup
    leaf_in: int
    leaf_out: int
    sums_in: bool


class ShardedLinear(torch.autograd.Function):
    """x @ weight.T + bias with a shard of the weight."""

    @staticmethod
    def forward(
        ctx: Any,  # torch's FunctionCtx has no fields that mypy knows
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cut: Cut,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layout, ctx.cut, ctx.has_bias = layout(), cut, bias is not None
        with unseen():
            product = rows_product(x.reshape(-1, x.shape[-1]), weight, cut.leaf_in)
            if cut.sums_in:
                all_reduce(product, cut.group)
            product = (product if bias is None else product + bias).to(x.dtype)
            shape = (*x.shape[:-1], weight.shape[0])
            output: Tensor = torch.ops.aten._unsafe_view(product, shape)
            return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx.layout)
        (x, weight), cut = ctx.saved_tensors, ctx.cut
        with unseen():
            flat = grad.reshape(-1, grad.shape[-1])
            dx = rows_product(flat, weight.t(), cut.leaf_out)
            if not cut.sums_in:
                all_reduce(dx, cut.group)
            grad_BTN = by_sequence(grad, ctx.layout)
            dw = outer_product(grad_BTN, by_sequence(x, ctx.layout)).to(weight.dtype)
            db = tree_sum_dims(grad_BTN, (0, 1)) if ctx.has_bias else None
        return dx.view(x.shape).to(x.dtype), dw, db, None


class _Parallel(ParallelStyle):
    """Cuts one nn.Linear; its parameters become DTensors, so that digests, checkpoints and the
    optimizer see the whole layer."""

    sums_in: bool

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise UsageError(f"{type(self).__name__} cuts nn.Linear, not {type(module).__name__}")
        if device_mesh.ndim != 1:
            raise UsageError(f"a mesh of {device_mesh.ndim} dimensions; name one, as mesh['tp']")
        ranks = device_mesh.size()
        outputs, inputs = module.weight.shape
        summed = inputs if self.sums_in else outputs
        if summed % ranks or (summed // ranks) % leaf_of(summed) or ranks & (ranks - 1):
            leaves = summed // leaf_of(summed)
            raise NotDeterministic(
                f"{summed} features are {leaves} leaves of {leaf_of(summed)}, which {ranks} ranks "
                "cannot share as subtrees",
                "take 1, 2, 4 or 8 ranks, and features that are a multiple of 8",
            )
        cut = Cut(device_mesh.get_group(), leaf_of(inputs), leaf_of(outputs), self.sums_in)
        places = {"weight": Shard(1 if self.sums_in else 0)}
        places["bias"] = Replicate() if self.sums_in else Shard(0)  # type: ignore[assignment]
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter.detach(), device_mesh, [places[name]])
            module.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))
        module.forward = partial(_forward, module, cut)  # type: ignore[method-assign]
        return module


class ColumnParallel(_Parallel):
    """The outputs are cut: every rank has the whole input and its share of the output features.
    As torch's ColwiseParallel; query, key, value, gate and up."""

    sums_in = False


class RowParallel(_Parallel):
    """The inputs are cut: every rank has its share of the input features and the whole output.
    As torch's RowwiseParallel; out and down."""

    sums_in = True


def _forward(module: nn.Linear, cut: Cut, x: Tensor) -> Tensor:
    active = enabled()
    if active is None or active.level != "shape":
        raise UsageError(
            'this layer is cut by mend.determinism: call it under enable(level="shape")'
        )
    weight, bias = (_local(parameter) for parameter in (module.weight, module.bias))
    assert weight is not None
    output: Tensor = ShardedLinear.apply(x, weight, bias, cut)  # type: ignore[no-untyped-call]
    return output


def _local(parameter: Tensor | None) -> Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
