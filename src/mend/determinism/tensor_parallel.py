"""Linear layers cut over ranks, to the bits of one rank. Moves tensors through torch.distributed;
for parallelize_module.

A rank's sums are whole subtrees of the uncut layer's (gemm.leaf_of cuts into 8 leaves and more);
the ranks' results, in fp32, are summed by the rest of the tree, in rank order, and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from mend.determinism.collectives import all_reduce
from mend.determinism.enabling import enabled
from mend.determinism.gemm import leaf_of
from mend.determinism.linear import Linear, Order
from mend.errors import NotDeterministic, UsageError


@dataclass(frozen=True, slots=True)
class Cut(Order):
    """Of a layer that is cut: `sums_in`: over ranks forward (the inputs are cut), otherwise
    backward (the outputs are)."""

    group: dist.ProcessGroup
    sums_in: bool

    def complete_output(self, product: Tensor) -> None:
        if self.sums_in:
            all_reduce(product, self.group)

    def complete_input_gradient(self, product: Tensor) -> None:
        if not self.sums_in:
            all_reduce(product, self.group)


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
        cut = Cut(leaf_of(inputs), leaf_of(outputs), device_mesh.get_group(), self.sums_in)
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
    output: Tensor = Linear.apply(x, weight, bias, cut)  # type: ignore[no-untyped-call]
    return output


def _local(parameter: Tensor | None) -> Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
