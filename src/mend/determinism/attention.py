"""Scaled dot product attention from products, softmax and sums that have one order."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from mend.determinism.coverage import unseen
from mend.determinism.fitting import refuse_heads
from mend.determinism.gemm import batch_product, refuse_wide
from mend.determinism.kernels import softmax, softmax_backward
from mend.determinism.layout import Layout, layout, pack, padded, unpack
from mend.determinism.linear import matmul, refuse_second_derivative, refuse_subclass
from mend.determinism.trees import tree_sum
from mend.errors import NotDeterministic


def operator_with(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return aten::scaled_dot_product_attention, which computes by `attend`."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        args = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return _attend_with(attend, *args)

    return scaled_dot_product_attention


def _attend_with(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """(..., H, T, D). Inside sequences(...) every packed sequence sees itself alone."""
    refuse_subclass("scaled_dot_product_attention", query, key, value)
    if is_causal and attn_mask is not None:
        raise RuntimeError("attention with is_causal=True and a mask: put both into the mask")
    at = layout()
    if not at.lengths or _is_padded(query, at):
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not _is_packed(query, at):
        raise NotDeterministic(
            f"attention of queries of {tuple(query.shape)} inside sequences(...) of {at.tokens} "
            "tokens would look across the borders of sequences",
            "pass (1, heads, tokens, features) with the lengths of all its sequences",
        )
    if attn_mask is not None or not (_is_packed(key, at) and _is_packed(value, at)):
        raise NotDeterministic(
            "attention over packed sequences with a mask, or with other keys than queries",
            "pass is_causal=True, or nothing, inside sequences(...)",
        )
    q, k, v = (_by_sequence(x, at) for x in (query, key, value))
    mask = None if is_causal else _present(at, query.device)
    with padded() if dropout_p else nullcontext():
        out = attend(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
    packed = pack(out.transpose(1, 2), at.lengths)  # (tokens, H, D)
    return packed.transpose(0, 1).reshape(query.shape[:-1] + value.shape[-1:])


def _is_packed(x: Tensor, at: Layout) -> bool:
    return x.shape[-2] == at.tokens and x.shape[:-3].numel() == 1


def _is_padded(x: Tensor, at: Layout) -> bool:
    """By the model itself: one row for every sequence."""
    return x.dim() > 3 and (x.shape[0], x.shape[-2]) == (len(at.lengths), max(at.lengths))


def _by_sequence(x: Tensor, at: Layout) -> Tensor:
    """(1, H, tokens, D) -> (sequences, H, longest, D)."""
    return unpack(x.reshape(-1, *x.shape[-2:]).transpose(0, 1), at.lengths).transpose(1, 2)


def _present(at: Layout, device: torch.device) -> Tensor:
    """(sequences, 1, 1, longest): which keys are not padding."""
    lengths = torch.tensor(at.lengths, device=device)
    return (torch.arange(max(at.lengths), device=device) < lengths[:, None])[:, None, None]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if is_causal:
        mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if not dropout_p and _fits(query, key, value, mask, enable_gqa):
        output: Tensor = Attention.apply(query, key, value, mask, factor)  # type: ignore[no-untyped-call]
        return output
    if enable_gqa:
        refuse_heads(query, key)
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    scores = matmul(query, key.transpose(-2, -1)) * factor
    if mask is None:
        weights = torch.softmax(scores, -1)
    else:
        scores = scores if mask.dtype == torch.bool else scores + mask
        hidden = ~mask if mask.dtype == torch.bool else scores == -math.inf
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
        weights = weights.masked_fill(hidden, 0.0)  # a query that sees no key is NaN until here
    if dropout_p:
        weights = torch.dropout(weights, dropout_p, True)
    return matmul(weights, value)


scaled_dot_product_attention = operator_with(_attention)


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, gqa: bool) -> bool:
    """Whether it is a case of Attention: no dimension is broadcast, and the mask is of booleans."""
    if query.dim() < 3 or query.dim() != key.dim() or key.shape[:-1] != value.shape[:-1]:
        return False
    lead = -3 if gqa else -2
    if query.shape[-1] != key.shape[-1] or query.shape[-3] % (key.shape[-3] or 1):
        return False
    if query.shape[:lead] != key.shape[:lead] or not query.numel() * key.numel() * value.numel():
        return False
    if not query.dtype == key.dtype == value.dtype:
        return False
    if mask is None:
        return True
    shape = (*query.shape[:-1], key.shape[-2])[-mask.dim() :]
    fits = mask.dim() <= query.dim() and all(
        size in (1, whole) for size, whole in zip(mask.shape, shape, strict=True)
    )
    return mask.dtype == torch.bool and fits


class Attention(torch.autograd.Function):
    """What _attention() composes, to the same bits, in one piece: a small one costs nothing but
    calls, a large one nothing but passes over its weights. Heads that share keys are rows of one
    product; the gradients of keys and values are a tree over them.

    Legend: N batch times groups of heads, R heads of a group times queries, S keys.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, factor: float
    ) -> Tensor:
        refuse_wide(query, key, value)
        with unseen():
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
            hidden = None if mask is None else ~mask
            k_NSD, v_NSE = key.flatten(0, -3), value.flatten(0, -3)
            q_NRD = query.view(len(k_NSD), -1, query.shape[-1])
            weights_NRS = batch_product(q_NRD, k_NSD.transpose(1, 2)).to(query.dtype).mul_(factor)
            if hidden is not None:
                weights_NRS.view(*query.shape[:-1], -1).masked_fill_(hidden, -math.inf)
            weights_NRS = softmax(weights_NRS, -1, False)
            if hidden is not None:  # a query that sees no key is NaN until here
                weights_NRS.view(*query.shape[:-1], -1).masked_fill_(hidden, 0.0)
            out = batch_product(weights_NRS, v_NSE).to(query.dtype)
            ctx.save_for_backward(query, key, value, weights_NRS, hidden)
            ctx.layout, ctx.factor = layout(), factor
            return out.view(*query.shape[:-1], value.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx.layout)
        query, key, value, weights_NRS, hidden = ctx.saved_tensors
        dtype, queries = query.dtype, query.shape[-2]
        with unseen():
            k_NSD, v_NSE = key.flatten(0, -3), value.flatten(0, -3)
            grad = grad.contiguous()
            grad_NRE = grad.view(*weights_NRS.shape[:2], -1)
            down = batch_product(grad_NRE, v_NSE.transpose(1, 2)).to(dtype)
            down = softmax_backward(down, weights_NRS, -1, dtype)
            if hidden is not None:
                down.view(*query.shape[:-1], -1).masked_fill_(hidden, 0.0)
            down.mul_(ctx.factor)
            dq = batch_product(down, k_NSD).to(dtype).view(query.shape)
            dk = _over_heads(down, query, queries).view(key.shape)
            dv = _over_heads(weights_NRS, grad, queries).view(value.shape)
        return dq, dk, dv, None, None


def _over_heads(weights_NRS: Tensor, x: Tensor, queries: int) -> Tensor:
    """(N, S, D): for each key the sum over the queries of each head, and a tree over heads."""
    groups, heads = len(weights_NRS), weights_NRS.shape[1] // queries
    by_head = weights_NRS.view(-1, queries, weights_NRS.shape[2]).transpose(1, 2)
    product = batch_product(by_head, x.flatten(0, -3)).to(x.dtype)
    return product if heads == 1 else tree_sum(product.view(groups, heads, *product.shape[1:]), 1)
