"""Sequence parallelism: between layers that are cut over ranks every rank has its share of the
tokens, with the bits of one rank. Moves tensors through torch.distributed; styles for
parallelize_module.

    SplitTokens       cuts the output of a module: the embedding
    SequenceParallel  a norm or dropout of tokens that are cut
    GatherTokens      gathers the input of a module: a head that is not cut

and ColumnParallel(tokens_cut=True), RowParallel(tokens_cut=True) in between.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from mend.determinism.collectives import Gathered, all_gather, own_share
from mend.determinism.gpu_parallel import TOKENS
from mend.determinism.layout import layout, share_of_tokens
from mend.determinism.linear import refuse_second_derivative
from mend.determinism.tensor_parallel import group_of, refuse_other_levels, refuse_tokens
from mend.errors import UsageError

NORMS = (nn.RMSNorm, nn.LayerNorm)
KINDS = (*NORMS, nn.Dropout)


class SplitTokens(ParallelStyle):
    """Every rank computes what the module returns, and keeps its share of the tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = group_of(device_mesh)
        module.register_forward_hook(lambda _, args, output: _split_tokens(output, group))
        return module


class GatherTokens(ParallelStyle):
    """The module is given all tokens; every rank computes all of it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = group_of(device_mesh)
        module.register_forward_pre_hook(
            lambda _, args: (_gather_tokens(args[0], group), *args[1:])
        )
        return module


class SequenceParallel(ParallelStyle):
    """nn.RMSNorm, nn.LayerNorm or nn.Dropout of this rank's share of the tokens. As torch's style
    of this name; the gradients of a norm's parameters are sums over the tokens of all ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, KINDS):
            known = ", ".join(kind.__name__ for kind in KINDS)
            raise UsageError(f"SequenceParallel knows {known}, not {type(module).__name__}")
        group, inner = group_of(device_mesh), module.forward
        forward = _forward_norm if isinstance(module, NORMS) else _forward_dropout
        module.forward = partial(forward, module, inner, group)  # type: ignore[method-assign]
        return module


def _forward_norm(module: nn.Module, inner: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    _refuse(x)
    output: Tensor = _OnShare.apply(x, inner, group, *module.parameters())  # type: ignore[no-untyped-call]
    return output


def _forward_dropout(module: nn.Module, inner: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    _refuse(x)
    with share_of_tokens(group, dist.get_rank(group) * x.shape[TOKENS]):
        output: Tensor = inner(x)
    return output


class _OnShare(torch.autograd.Function):
    """A module whose parameters' gradients are sums over all tokens; it is computed once more in
    the backward pass, where these sums are completed over ranks (layout.Layout.token_group)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, inner: Any, group: dist.ProcessGroup, *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layout, ctx.inner, ctx.group, ctx.parameters = layout(), inner, group, parameters
        output: Tensor = inner(x)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx.layout)
        x = ctx.saved_tensors[0].detach().requires_grad_()
        asked = [x, *(each for each in ctx.parameters if each.requires_grad)]
        with torch.enable_grad(), share_of_tokens(ctx.group, 0):
            found = iter(torch.autograd.grad(ctx.inner(x), asked, grad))
        dx = next(found)
        gradients = (next(found) if each.requires_grad else None for each in ctx.parameters)
        return dx, None, None, *gradients


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return own_share(x, group, TOKENS)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group, TOKENS), None


def _split_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    refuse_tokens(x, dist.get_world_size(group))
    output: Tensor = _Split.apply(x, group)  # type: ignore[no-untyped-call]
    return output


def _gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    _refuse(x)
    output: Tensor = Gathered.apply(x, group, TOKENS)  # type: ignore[no-untyped-call]
    return output


def _refuse(x: Tensor) -> None:
    refuse_other_levels("this model")
    refuse_tokens(x, 1)
    if layout().lengths:
        raise UsageError(
            "ranks cannot share the tokens of packed sequences: their borders would be lost; pad "
            "them, or leave tokens_cut and SequenceParallel out"
        )
