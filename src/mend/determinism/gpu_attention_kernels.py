"""Triton kernels for attention at level shape. Touches tensors only.

A sequence's bits depend on its own queries, keys and values: not on the batch, the number of heads,
or padding on the right of a causal sequence. No atomics: one pass makes dk and dv (a program for a
block of keys; queries ascending, the heads of a group one after another), one makes dq (a program
for a block of queries, keys ascending); both recompute the scores. The blocks are those of
FlashAttention-2 (Dao 2023), and part of the order.

Tensors are (B * S, heads * D), rows may be strided; S is a multiple of BLOCK. `length` keys are
there, the others are padding. Scores are scaled for exponentials of base 2.

Legend: B sequences, S tokens, H heads, G heads that share keys, D features of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mend.determinism.gpu_kernels import jit

BLOCK = 64
"""Queries and keys of a tile."""
_BLOCK = tl.constexpr(BLOCK)

LOG2_E = 1.4426950408889634


@jit
def _seen(
    query: tl.tensor, key: tl.tensor, length: tl.tensor, IS_CAUSAL: tl.constexpr
) -> tl.tensor:
    if IS_CAUSAL:
        return query >= key
    else:
        return (key < length) & (query >= 0)


@jit
def _forward_over(
    first: tl.tensor,
    end: tl.tensor,
    q: tl.tensor,
    k_d: tl.tensor,
    v_d: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    query: tl.tensor,
    length: tl.tensor,
    scale: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    IS_CAUSAL: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Goes on over the keys first to end."""
    for at in tl.range(first, end, _BLOCK):
        score = tl.dot(q, k_d.load([row + at, column]).T, input_precision="ieee")
        if IS_MASKED:
            key = at + tl.arange(0, _BLOCK)
            seen = _seen(query[:, None], key[None, :], length, IS_CAUSAL)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1) * scale)
        weight = tl.math.exp2(score * scale - higher[:, None])
        fade = tl.math.exp2(top - higher)
        total = total * fade + tl.sum(weight, 1)
        out = out * fade[:, None]
        out = tl.dot(weight.to(q.dtype), v_d.load([row + at, column]), out, input_precision="ieee")
        top = higher
    return top, total, out


@jit
def _forward(
    q_d: tl.tensor,
    k_d: tl.tensor,
    v_d: tl.tensor,
    out_d: tl.tensor,
    log_sum_p: tl.tensor,
    S: tl.tensor,
    H: tl.tensor,
    G: tl.tensor,
    length: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
) -> None:
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = tl.program_id(1) // H
    head = tl.program_id(1) % H
    first = block * _BLOCK
    q = q_d.load([sequence * S + first, head * D])
    query = first + tl.arange(0, _BLOCK)
    top = tl.full((_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((_BLOCK,), tl.float32)
    out = tl.zeros((_BLOCK, D), tl.float32)
    row = sequence * S
    column = (head // G) * D
    if IS_CAUSAL:
        middle = first
        end = first + _BLOCK
    else:
        middle = length // _BLOCK * _BLOCK
        end = length
    top, total, out = _forward_over(
        0, middle, q, k_d, v_d, row, column, query, length, scale, top, total, out,
        IS_CAUSAL, False,
    )  # fmt: skip
    top, total, out = _forward_over(
        middle, end, q, k_d, v_d, row, column, query, length, scale, top, total, out,
        IS_CAUSAL, True,
    )  # fmt: skip
    out_d.store([sequence * S + first, head * D], (out / total[:, None]).to(q.dtype))
    tl.store(log_sum_p + tl.program_id(1) * S + query, top + tl.math.log2(total))


@jit
def _out_times_grad(
    out_p: tl.tensor, grad_p: tl.tensor, delta_p: tl.tensor, S: tl.tensor, H: tl.tensor,
    D: tl.constexpr,
) -> None:  # fmt: skip
    s = tl.program_id(0) * 32 + tl.arange(0, 32)
    sequence = tl.program_id(1) // H
    head = tl.program_id(1) % H
    d = tl.arange(0, D)
    place = (sequence * S + s).to(tl.int64)[:, None] * (H * D) + head * D + d[None, :]
    out = tl.load(out_p + place).to(tl.float32)
    delta = tl.sum(out * tl.load(grad_p + place).to(tl.float32), 1)
    tl.store(delta_p + tl.program_id(1) * S + s, delta)


@jit
def _keys_over(
    first: tl.tensor,
    end: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    q_d: tl.tensor,
    grad_d: tl.tensor,
    log_sum_p: tl.tensor,
    delta_p: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    key: tl.tensor,
    length: tl.tensor,
    scale: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    IS_CAUSAL: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    for at in tl.range(first, end, _BLOCK):
        query = at + tl.arange(0, _BLOCK)
        q = q_d.load([row + at, column])
        grad = grad_d.load([row + at, column])
        log_sum = tl.load(log_sum_p + query)
        delta = tl.load(delta_p + query)
        score = tl.dot(k, q.T, input_precision="ieee")
        weight = tl.math.exp2(score * scale - log_sum[None, :])
        if IS_MASKED:
            seen = _seen(query[None, :], key[:, None], length, IS_CAUSAL)
            weight = tl.where(seen, weight, 0.0)
        down = tl.dot(v, grad.T, input_precision="ieee")
        dv = tl.dot(weight.to(q.dtype), grad, dv, input_precision="ieee")
        slope = weight * (down - delta[None, :])
        dk = tl.dot(slope.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@jit
def _backward_keys(
    q_d: tl.tensor,
    k_d: tl.tensor,
    v_d: tl.tensor,
    grad_d: tl.tensor,
    log_sum_p: tl.tensor,
    delta_p: tl.tensor,
    dk_d: tl.tensor,
    dv_d: tl.tensor,
    S: tl.tensor,
    H: tl.tensor,
    G: tl.tensor,
    length: tl.tensor,
    scale: tl.tensor,
    factor: tl.tensor,
    D: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
) -> None:
    first = tl.program_id(0) * _BLOCK
    groups = H // G
    sequence = tl.program_id(1) // groups
    group = tl.program_id(1) % groups
    row = sequence * S
    k = k_d.load([row + first, group * D])
    v = v_d.load([row + first, group * D])
    key = first + tl.arange(0, _BLOCK)
    dk = tl.zeros((_BLOCK, D), tl.float32)
    dv = tl.zeros((_BLOCK, D), tl.float32)
    for each in range(G):
        head = group * G + each
        place = (sequence * H + head) * S
        if IS_CAUSAL:
            dk, dv = _keys_over(
                first, first + _BLOCK, k, v, q_d, grad_d, log_sum_p + place, delta_p + place, row,
                head * D, key, length, scale, dk, dv, True, True,
            )  # fmt: skip
            dk, dv = _keys_over(
                first + _BLOCK, S, k, v, q_d, grad_d, log_sum_p + place, delta_p + place, row,
                head * D, key, length, scale, dk, dv, True, False,
            )  # fmt: skip
        else:
            dk, dv = _keys_over(
                0, S, k, v, q_d, grad_d, log_sum_p + place, delta_p + place, row,
                head * D, key, length, scale, dk, dv, False, True,
            )  # fmt: skip
    dk_d.store([row + first, group * D], (dk * factor).to(k.dtype))
    dv_d.store([row + first, group * D], dv.to(k.dtype))


@jit
def _queries_over(
    first: tl.tensor,
    end: tl.tensor,
    q: tl.tensor,
    grad: tl.tensor,
    k_d: tl.tensor,
    v_d: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    query: tl.tensor,
    length: tl.tensor,
    log_sum: tl.tensor,
    delta: tl.tensor,
    scale: tl.tensor,
    dq: tl.tensor,
    IS_CAUSAL: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tl.tensor:
    for at in tl.range(first, end, _BLOCK):
        k = k_d.load([row + at, column])
        score = tl.dot(q, k.T, input_precision="ieee")
        weight = tl.math.exp2(score * scale - log_sum[:, None])
        if IS_MASKED:
            key = at + tl.arange(0, _BLOCK)
            seen = _seen(query[:, None], key[None, :], length, IS_CAUSAL)
            weight = tl.where(seen, weight, 0.0)
        down = tl.dot(grad, v_d.load([row + at, column]).T, input_precision="ieee")
        slope = weight * (down - delta[:, None])
        dq = tl.dot(slope.to(q.dtype), k, dq, input_precision="ieee")
    return dq


@jit
def _backward_queries(
    q_d: tl.tensor,
    k_d: tl.tensor,
    v_d: tl.tensor,
    grad_d: tl.tensor,
    log_sum_p: tl.tensor,
    delta_p: tl.tensor,
    dq_d: tl.tensor,
    S: tl.tensor,
    H: tl.tensor,
    G: tl.tensor,
    length: tl.tensor,
    scale: tl.tensor,
    factor: tl.tensor,
    D: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
) -> None:
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = tl.program_id(1) // H
    head = tl.program_id(1) % H
    first = block * _BLOCK
    row = sequence * S
    column = (head // G) * D
    query = first + tl.arange(0, _BLOCK)
    q = q_d.load([row + first, head * D])
    grad = grad_d.load([row + first, head * D])
    log_sum = tl.load(log_sum_p + tl.program_id(1) * S + query)
    delta = tl.load(delta_p + tl.program_id(1) * S + query)
    dq = tl.zeros((_BLOCK, D), tl.float32)
    if IS_CAUSAL:
        middle = first
        end = first + _BLOCK
    else:
        middle = length // _BLOCK * _BLOCK
        end = length
    dq = _queries_over(
        0, middle, q, grad, k_d, v_d, row, column, query, length, log_sum, delta, scale, dq,
        IS_CAUSAL, False,
    )  # fmt: skip
    dq = _queries_over(
        middle, end, q, grad, k_d, v_d, row, column, query, length, log_sum, delta, scale, dq,
        IS_CAUSAL, True,
    )  # fmt: skip
    dq_d.store([row + first, head * D], (dq * factor).to(q.dtype))


def _stages(dtype: torch.dtype, features: int) -> int:
    """A third stage of the passes back halves their speed at 128 features."""
    return 3 if features == 64 and dtype != torch.float32 else 2


def _tiles(x: Tensor, features: int) -> Any:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [BLOCK, features])


def _call(kernel: Any, blocks: int, programs: int, *args: Any, stages: int) -> None:
    kernel[(blocks, programs)](*args, num_stages=stages, num_warps=4)


def forward(
    q: Tensor, k: Tensor, v: Tensor, batch: int, length: int, features: int, factor: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output as (B * S, H * D), and log2 of the sum of every row's exponentials, (B, H, S)."""
    tokens, heads = q.shape[0] // batch, q.shape[1] // features
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    log_sum = torch.empty(batch, heads, tokens, device=q.device, dtype=torch.float32)
    _call(
        _forward, tokens // BLOCK, batch * heads,
        *(_tiles(each, features) for each in (q, k, v, out)), log_sum, tokens, heads, group,
        length, factor * LOG2_E, features, is_causal, stages=3 if q.dtype != torch.float32 else 2,
    )  # fmt: skip
    return out, log_sum


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, grad: Tensor, length: int,
    features: int, factor: float, is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv, contiguous; `grad` is contiguous."""
    batch, heads, tokens = log_sum.shape
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.empty(each.shape, device=q.device, dtype=q.dtype) for each in (q, k, v))
    delta = torch.empty_like(log_sum)
    _out_times_grad[(tokens // 32, batch * heads)](
        out, grad, delta, tokens, heads, features, num_warps=4
    )
    tiles = [_tiles(each, features) for each in (q, k, v, grad)]
    sizes = (tokens, heads, group, length, factor * LOG2_E, factor, features, is_causal)
    stages = _stages(q.dtype, features)
    _call(
        _backward_keys, tokens // BLOCK, batch * heads // group, *tiles, log_sum, delta,
        _tiles(dk, features), _tiles(dv, features), *sizes, stages=stages,
    )  # fmt: skip
    _call(
        _backward_queries, tokens // BLOCK, batch * heads, *tiles, log_sum, delta,
        _tiles(dq, features), *sizes, stages=stages,
    )  # fmt: skip
    return dq, dk, dv
