"""RMSNorm as one operator with one gradient. aten composes it from five, whose gradients autograd
adds in an order that depends on what else uses the input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mend.determinism.coverage import unseen
from mend.determinism.fitting import refuse_norm
from mend.determinism.kernels import sum_dims, sum_features
from mend.determinism.layout import layout
from mend.determinism.linear import refuse_second_derivative, refuse_subclass
from mend.determinism.trees import widen


class RmsNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight over the last `dims` dimensions, in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int, eps: float) -> Tensor:
        with unseen():
            wide, count = widen(x), math.prod(x.shape[-dims:])
            rstd = (sum_features(wide * wide, dims) / count).add_(eps).rsqrt_()
            out = wide * rstd
            if weight is not None:
                out.mul_(widen(weight))
            ctx.save_for_backward(x, weight, rstd)
            ctx.layout, ctx.dims, ctx.count = layout(), dims, count
            return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx.layout)
        x, weight, rstd = ctx.saved_tensors
        dx = dw = None
        with unseen():
            normal, wide = widen(x) * rstd, widen(grad)
            if ctx.needs_input_grad[0]:
                inner = wide if weight is None else wide * widen(weight)
                along = sum_features(inner * normal, ctx.dims) / ctx.count
                dx = (inner - normal * along).mul_(rstd).to(x.dtype)
            if ctx.needs_input_grad[1]:
                lead, product = list(range(x.dim() - ctx.dims)), wide * normal
                dw = (sum_dims(product, lead) if lead else product).to(weight.dtype)
        return dx, dw, None, None


def rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """aten::rms_norm."""
    refuse_subclass("rms_norm", x, *(() if weight is None else (weight,)))
    refuse_norm(x, shape, weight)
    small = torch.finfo(x.dtype).eps if eps is None else eps
    output: Tensor = RmsNorm.apply(x, weight, len(shape), small)  # type: ignore[no-untyped-call]
    return output
