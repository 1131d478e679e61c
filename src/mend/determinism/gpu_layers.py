"""Attention, norms and cross-entropy for CUDA at level shape: one operator each, with one gradient.
Sums over tokens are those of gpu_products.py. Variances over features, below autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mend.determinism import kernels
from mend.determinism.attention import operator_with
from mend.determinism.collectives import all_gather, own_share
from mend.determinism.coverage import unseen
from mend.determinism.fitting import refuse_norm, refuse_targets
from mend.determinism.gemm import refuse_wide
from mend.determinism.gpu_products import _kernels, leaf_sum, leaves_of
from mend.determinism.kernels import MEAN, sum_all
from mend.determinism.layout import layout, pack
from mend.determinism.linear import refuse_second_derivative, refuse_subclass
from mend.determinism.trees import ROW_TYPES
from mend.errors import NotDeterministic

HEAD_WIDTHS = (64, 128)
"""Narrower heads are padded with zeros, which change no bits. In fp32 the wider one takes minutes
to compile, and is refused."""

FEATURES_MAX = 1 << 14
"""Norms and variances keep a row in registers."""


# attention


class AttentionFunction(torch.autograd.Function):
    """(B, H, S, D), causal or whole."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, factor: float, is_causal: bool
    ) -> Tensor:
        with unseen():
            kernels = _attention_kernels()
            batch, _, tokens, features = query.shape
            width = next(each for each in HEAD_WIDTHS if features <= each)
            flat = [_flat(x, width, kernels.BLOCK) for x in (query, key, value)]
            out, log_sum = kernels.forward(*flat, batch, tokens, width, factor, is_causal)
            ctx.save_for_backward(*flat, out, log_sum)
            ctx.layout, ctx.args = layout(), (tokens, width, factor, is_causal)
            ctx.features = features
            return _heads(out, batch, tokens, width, features)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx.layout)
        *saved, log_sum = ctx.saved_tensors
        tokens, width, _, _ = ctx.args
        with unseen():
            kernels = _attention_kernels()
            down = _flat(grad, width, kernels.BLOCK).contiguous()
            made = kernels.backward(*saved, log_sum, down, *ctx.args)
            batch = log_sum.shape[0]
            dq, dk, dv = (_heads(each, batch, tokens, width, ctx.features) for each in made)
        return dq, dk, dv, None, None


def _flat(x: Tensor, width: int, block: int) -> Tensor:
    """(B, H, S, D) -> (B * S, H * width), S padded to a multiple of `block`. A view where the heads
    of a token are neighbours in memory, as linear layers leave them."""
    batch, heads, tokens, features = x.shape
    more = -tokens % block
    if more or features != width:
        x = F.pad(x, (0, width - features, 0, more))
    by_token = x.transpose(1, 2)
    rows, step = batch * (tokens + more), by_token.stride(1)
    aligned = x.data_ptr() % 16 == 0 and step * x.element_size() % 16 == 0
    packed = by_token.stride()[2:] == (width, 1) and by_token.stride(0) == step * (tokens + more)
    if not (packed and aligned):
        by_token, step = by_token.contiguous(), heads * width
    return by_token.as_strided((rows, heads * width), (step, 1))


def _heads(x: Tensor, batch: int, tokens: int, width: int, features: int) -> Tensor:
    """The inverse of _flat()."""
    by_token = x.view(batch, -1, x.shape[1] // width, width)
    return by_token[:, :tokens, :, :features].transpose(1, 2)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    refuse_wide(query, key, value)
    features = query.shape[-1]
    widest = HEAD_WIDTHS[0] if query.dtype == torch.float32 else HEAD_WIDTHS[-1]
    alike = (
        query.dim() == key.dim() == 4
        and key.shape == value.shape
        and query.shape[::2] == key.shape[::2]
        and query.dtype == key.dtype == value.dtype
        and (query.shape[1] == key.shape[1] or enable_gqa)
        and query.shape[1] % max(1, key.shape[1]) == 0
        and query.shape[-1] == key.shape[-1]
    )
    for is_unknown, what in (
        (mask is not None, "with a mask"),
        (dropout_p > 0, "with dropout"),
        (features > widest, f"of {features} features in a head, in {query.dtype}"),
        (not alike, "whose queries, keys and values differ in batch, tokens, features or type"),
    ):
        if is_unknown:
            raise NotDeterministic(
                f"attention {what} has no order at level shape on a GPU",
                "use causal or whole self-attention of (B, H, T, D), D at most 128, or 64 in fp32",
            )
    if not query.numel():
        return torch.zeros_like(query)
    factor = 1 / math.sqrt(features) if scale is None else scale
    output: Tensor = AttentionFunction.apply(query, key, value, factor, is_causal)  # type: ignore[no-untyped-call]
    return output


scaled_dot_product_attention = operator_with(_attend)


# norms


class Norm(torch.autograd.Function):
    """RMSNorm, or LayerNorm, over the last `dims` dimensions, in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: int,
        eps: float, is_rms: bool,
    ) -> Tensor:  # fmt: skip
        with unseen():
            features = math.prod(x.shape[-dims:])
            flat = x.reshape(-1, features).contiguous()
            if weight is None:
                scale = torch.ones(features, device=x.device)
            else:
                scale = weight.reshape(-1)
            if is_rms:
                shift = None
            else:
                shift = torch.zeros_like(scale) if bias is None else bias.reshape(-1)
            out, mean, rstd = _kernels().norm_forward(flat, scale, shift, eps)
            ctx.save_for_backward(flat, scale, mean, rstd)
            ctx.layout, ctx.shape, ctx.is_rms = layout(), x.shape, is_rms
            ctx.lead = x.shape[:-dims] or (1,)
            ctx.shapes = tuple(None if each is None else each.shape for each in (weight, bias))
            shaped: Tensor = out.view(x.shape)
            return shaped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx.layout)
        flat, scale, mean, rstd = ctx.saved_tensors
        at, lead = ctx.layout, ctx.lead
        with unseen():
            x, grad = flat.view(*lead, flat.shape[1]), grad.reshape(*lead, flat.shape[1])
            if at.token_group is not None:
                x, grad, mean, rstd = _of_all_tokens(at.token_group, x, grad, mean, rstd)
            is_packed = bool(at.packed_dims(x, len(lead)))
            if not is_packed and ctx.shapes == (None, None):  # nothing is summed over tokens
                at = replace(at, lengths=())
            if is_packed:
                mean, rstd = (leaves_of(each.view(*lead, 1), at).view(-1) for each in (mean, rstd))
            dx, dw, db = _kernels().norm_backward(
                leaves_of(grad, at), leaves_of(x, at), scale, mean, rstd, ctx.is_rms
            )
            if is_packed:
                rows, longest = len(at.lengths), max(at.lengths)
                dx = pack(dx.view(rows, longest, -1, dx.shape[-1]), at.lengths)
            if at.token_group is not None:
                dx = own_share(dx.view(x.shape), at.token_group, 1)
            sums = (
                None if shape is None or each is None else leaf_sum(each).view(shape)
                for shape, each in zip(ctx.shapes, (dw, db), strict=True)
            )
        return (dx.reshape(ctx.shape), *sums, None, None, None)


def _of_all_tokens(
    group: dist.ProcessGroup, x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, ...]:
    """A chain over tokens is not cut: every rank adds those of all."""
    by_row = (each.view(*x.shape[:2], -1) for each in (mean, rstd))
    mean, rstd = (all_gather(each, group, 1).reshape(-1) for each in by_row)
    return all_gather(x, group, 1), all_gather(grad, group, 1), mean, rstd


def _refuse_features(features: int) -> None:
    if features > FEATURES_MAX:
        raise NotDeterministic(
            f"a norm over {features} features has no order at level shape on a GPU",
            f"use at most {FEATURES_MAX}",
        )


def rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """aten::rms_norm."""
    refuse_subclass("rms_norm", x, *(() if weight is None else (weight,)))
    refuse_norm(x, shape, weight)
    small = torch.finfo(x.dtype).eps if eps is None else eps
    _refuse_features(math.prod(shape))
    output: Tensor = Norm.apply(x, weight, None, len(shape), small, True)  # type: ignore[no-untyped-call]
    return output


def layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """aten::layer_norm."""
    refuse_subclass("layer_norm", x, *(each for each in (weight, bias) if each is not None))
    refuse_norm(x, shape, weight, bias)
    _refuse_features(math.prod(shape))
    output: Tensor = Norm.apply(x, weight, bias, len(shape), eps, False)  # type: ignore[no-untyped-call]
    return output


# cross-entropy


class Losses(torch.autograd.Function):
    """-log softmax at the target of every row, in fp32."""

    @staticmethod
    def forward(ctx: Any, x_NV: Tensor, target_N: Tensor, ignored: int) -> Tensor:
        with unseen():
            x_NV, target_N = x_NV.contiguous(), target_N.contiguous()
            losses, log_sum = _kernels().loss_forward(x_NV, target_N, ignored)
            ctx.save_for_backward(x_NV, target_N, log_sum)
            ctx.layout, ctx.ignored = layout(), ignored
            found: Tensor = losses
            return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx.layout)
        x_NV, target_N, log_sum = ctx.saved_tensors
        with unseen():
            grad_N = grad.contiguous()
            dx = _kernels().loss_backward(x_NV, target_N, log_sum, grad_N, ctx.ignored)
        return dx, None, None


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """aten::cross_entropy_loss, of (N, V) or (V). The sum over rows is the tree of sum()."""
    refuse_subclass("cross_entropy", x, target)
    refuse_wide(x)
    if weight is not None or label_smoothing or x.dim() > 2 or target.is_floating_point():
        raise NotDeterministic(
            "cross_entropy with weights, label smoothing, targets that are probabilities or more "
            "than two dimensions has no order at level shape on a GPU",
            "flatten to (N, V) and use plain targets",
        )
    x_NV, target_N = (x[None], target.reshape(1)) if x.dim() == 1 else (x, target)
    refuse_targets(x_NV, target_N)
    losses: Tensor = Losses.apply(x_NV, target_N, ignore_index)  # type: ignore[no-untyped-call]
    return (
        losses.view(target.shape)
        if not reduction
        else reduced(losses, target_N, reduction, ignore_index)
    )


def reduced(losses: Tensor, target_N: Tensor, reduction: int, ignore_index: int) -> Tensor:
    """The sum or MEAN of the losses of all rows."""
    total = losses.sum()
    if reduction == MEAN:
        return total / sum_all((target_N != ignore_index).float())
    return total


# variances


def variance(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """aten::var.correction, with the bits of kernels.py; over features one pass over x. `dtype`: of
    the result, at least as wide as that of x."""
    dtype = dtype or x.dtype
    features = x.shape[-1] if x.dim() else 0
    is_over_features = x.dim() > 1 and dim is not None and [*dim] in ([-1], [x.dim() - 1])
    if x.dtype not in ROW_TYPES or not is_over_features or not 0 < features <= FEATURES_MAX:
        return kernels.variance(x.to(dtype), dim, correction=correction, keepdim=keepdim)
    found = _kernels().row_variances(
        x.reshape(-1, features).contiguous(),
        _reciprocal(features),
        _reciprocal(max(0.0, features - (1 if correction is None else correction))),
        dtype,
    )
    shaped: Tensor = found.view(*x.shape[:-1], *((1,) if keepdim else ()))
    return shaped


def deviation(x: Tensor, dim: Sequence[int] | None = None, **how: Any) -> Tensor:
    """aten::std.correction, of a variance that is not rounded to a narrow type."""
    wide = torch.float32 if x.dtype in ROW_TYPES else x.dtype
    return variance(x, dim, **how, dtype=wide).sqrt_().to(x.dtype)


def _reciprocal(number: float) -> float:
    """torch divides by a number on a GPU as a product with this: found in double, then rounded."""
    return 1.0 / number if number else math.inf


def _attention_kernels() -> Any:
    from mend.determinism import gpu_attention_kernels

    return gpu_attention_kernels
