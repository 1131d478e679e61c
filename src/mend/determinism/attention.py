"""Scaled dot product attention from products, softmax and sums that have one order. Autograd goes
through it as through any composite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mend.determinism.layout import Layout, layout, pack, unpack
from mend.determinism.linear import matmul, refuse_subclass
from mend.errors import NotDeterministic


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
    """aten::scaled_dot_product_attention; (..., H, T, D). Inside sequences(...) every packed
    sequence sees itself alone."""
    refuse_subclass("scaled_dot_product_attention", query, key, value)
    at = layout()
    if not at.packs(query, query.dim() - 1) and not _packed(query, key, at):
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None or query.shape[-2] != key.shape[-2]:
        raise NotDeterministic(
            "attention over packed sequences with a mask, or with other keys than queries",
            "pass is_causal=True, or nothing, inside sequences(...)",
        )
    q, k, v = (_by_sequence(x, at) for x in (query, key, value))
    mask = None if is_causal else _present(at)
    out = _attention(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
    packed = pack(out.transpose(1, 2), at.lengths)  # (tokens, H, D)
    return packed.transpose(0, 1).reshape(query.shape[:-1] + value.shape[-1:])


def _packed(query: Tensor, key: Tensor, at: Layout) -> bool:
    return bool(at.lengths) and query.shape[-2] == at.tokens and query.shape[:-3].numel() == 1


def _by_sequence(x: Tensor, at: Layout) -> Tensor:
    """(1, H, tokens, D) -> (sequences, H, longest, D)."""
    return unpack(x.reshape(x.shape[-3:]).transpose(0, 1), at.lengths).transpose(1, 2)


def _present(at: Layout) -> Tensor:
    """(sequences, 1, 1, longest): which keys are not padding."""
    lengths = torch.tensor(at.lengths)
    return (torch.arange(max(at.lengths)) < lengths[:, None])[:, None, None]


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
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    if is_causal:
        mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = matmul(query, key.transpose(-2, -1)) * factor
    if mask is not None:
        hidden = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else None
        scores = scores + mask if hidden is None else hidden
    weights = torch.softmax(scores, -1)
    if dropout_p:
        weights = torch.dropout(weights, dropout_p, True)
    return matmul(weights, value)
