"""Triton kernels for level shape on a GPU. Touches tensors only.

A row's result depends on that row alone. A sum over tokens is a chain over chunks of a leaf, whose
order depends on the leaf alone; trees over leaves are added by tree() or by trees.py. Block sizes
that are part of an order are constants here: another value gives other bits.

Legend: L leaves, T tokens of a leaf, C chunks of CHUNK tokens, D features, V words, N rows;
_p: pointers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mend.determinism.fitting import no_product

CHUNK = 32
"""Tokens of a partial sum."""
_CHUNK = tl.constexpr(CHUNK)

LEAVES_MAX = 64
"""Of one call of tree()."""

_COLUMNS = 64
_WORDS = 4096
_ROW = 1024
_ROW_BYTES_AHEAD = 16 << 10


# Triton looks names of annotations up: they must be its own.


def jit(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


# products of one fixed tile: fp32, what cuBLASLt has no aligned kernel for, and the fallback


@jit
def _products(
    a_p: tl.tensor,
    b_p: tl.tensor,
    c_p: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    a_z: tl.tensor,
    a_m: tl.tensor,
    a_k: tl.tensor,
    b_z: tl.tensor,
    b_k: tl.tensor,
    b_n: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """c[z] = a[z] @ b[z]: one chain over K."""
    z = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_p += z * a_z + m[:, None].to(tl.int64) * a_m
    b_p += z * b_z + n[None, :].to(tl.int64) * b_n
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        at = (first + k).to(tl.int64)
        inside = first + k < K
        a = tl.load(a_p + at[None, :] * a_k, mask=(m[:, None] < M) & inside[None, :], other=0.0)
        b = tl.load(b_p + at[:, None] * b_k, mask=(n[None, :] < N) & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    place = z * M * N + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(c_p + place, total, mask=(m[:, None] < M) & (n[None, :] < N))


def products(a_ZMK: Tensor, b_ZKN: Tensor) -> Tensor:
    """a @ b as (Z, M, N) in fp32; any strides."""
    (batch, rows, pairs), (others, inputs, columns) = a_ZMK.shape, b_ZKN.shape
    if batch != others or pairs != inputs:
        raise no_product(a_ZMK, b_ZKN)
    out = torch.empty(batch, rows, columns, device=a_ZMK.device, dtype=torch.float32)
    if out.numel():
        grid = (triton.cdiv(rows, 64), triton.cdiv(columns, 64), batch)
        sizes = (rows, columns, pairs)
        strides = (*a_ZMK.stride(), *b_ZKN.stride())
        _products[grid](a_ZMK, b_ZKN, out, *sizes, *strides, 64, 64, 32, num_warps=4)
    return out


# sums


@jit
def _row_sums(x_p: tl.tensor, out_p: tl.tensor, D: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, D, BLOCK):
        total += tl.load(x_p + row * D + first + d, mask=first + d < D, other=0.0)
    tl.store(out_p + row, tl.sum(total, 0))


def row_sums(x_ND: Tensor) -> Tensor:
    """(N): sums over the last dimension, of contiguous fp32."""
    rows, features = x_ND.shape
    out = torch.empty(rows, device=x_ND.device, dtype=torch.float32)
    if rows:
        block = min(_ROW, triton.next_power_of_2(max(1, features)))
        _row_sums[(rows,)](x_ND, out, features, block, num_warps=4)
    return out


@jit
def _halves(x: tl.tensor, L: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """(L, BLOCK) -> (L / 2, BLOCK): sums of neighbours; a sum of two is one addition."""
    return tl.sum(tl.reshape(x, (L // 2, 2, BLOCK)), 1)


@jit
def _tree(
    nodes_p: tl.tensor,
    out_p: tl.tensor,
    numel: tl.tensor,
    leaves: tl.tensor,
    L: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    leaf = tl.arange(0, L)
    inside = (leaf[:, None] < leaves) & (at[None, :] < numel)
    place = leaf[:, None].to(tl.int64) * numel + at[None, :]  # numel 1 is a number of Python's
    x = tl.load(nodes_p + place, mask=inside, other=0.0)
    if L == 64:
        x = _halves(x, 64, BLOCK)
    if L >= 32:
        x = _halves(x, 32, BLOCK)
    if L >= 16:
        x = _halves(x, 16, BLOCK)
    if L >= 8:
        x = _halves(x, 8, BLOCK)
    if L >= 4:
        x = _halves(x, 4, BLOCK)
    x = tl.reshape(_halves(x, 2, BLOCK), (BLOCK,)) + 0.0
    tl.store(out_p + at, x.to(out_p.dtype.element_ty), mask=at < numel)


def tree(nodes: Tensor, out: Tensor) -> None:
    """The tree over the first dimension, 1 to LEAVES_MAX, of contiguous fp32, into `out`, which is
    contiguous: one pass, rounded once to the type of `out`."""
    leaves = max(2, triton.next_power_of_2(nodes.shape[0]))
    block = 8192 // leaves
    grid = (triton.cdiv(out.numel(), block),)
    if out.numel():
        _tree[grid](nodes, out, out.numel(), nodes.shape[0], leaves, block, num_warps=4)


@jit
def _pairs(x: tl.tensor, R: tl.constexpr, D: tl.constexpr) -> tl.tensor:
    """(R, D) -> (R, D / 2): sums of neighbours."""
    return tl.sum(tl.reshape(x, (R, D // 2, 2)), 2)


@jit
def _tree_of_rows(x: tl.tensor, R: tl.constexpr, LEVELS: tl.constexpr) -> tl.tensor:
    """(R, 2 ** LEVELS) -> (R): the tree over every row."""
    for level in tl.static_range(LEVELS):
        x = _pairs(x, R, 1 << (LEVELS - level))
    return tl.reshape(x, (R,)) + 0.0


@jit
def _row_trees(
    x_p: tl.tensor,
    out_p: tl.tensor,
    N: tl.tensor,
    D: tl.tensor,
    LEVELS: tl.constexpr,
    R: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    d = tl.program_id(1) * (1 << LEVELS) + tl.arange(0, 1 << LEVELS)
    inside = (row[:, None] < N) & (d[None, :] < D)
    x = tl.load(x_p + row[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(out_p + place, _tree_of_rows(x, R, LEVELS), mask=row < N)


def row_trees(x_ND: Tensor) -> Tensor:
    """(N) in fp32: the tree over the last dimension of contiguous fp32, bf16 or fp16, with the bits
    of trees.py; one pass for every 1,024 features."""
    rows, features = x_ND.shape
    levels = max(1, (min(_ROW, features) - 1).bit_length())
    parts, together = triton.cdiv(features, 1 << levels), 4096 >> levels
    out = torch.empty(rows, parts, device=x_ND.device, dtype=torch.float32)
    grid = (triton.cdiv(rows, together), parts)
    _row_trees[grid](x_ND, out, rows, features, levels, together, num_warps=4)
    return out[:, 0] if parts == 1 else row_trees(out)


@jit
def _row_variances(
    x_p: tl.tensor,
    out_p: tl.tensor,
    N: tl.tensor,
    D: tl.tensor,
    for_mean: tl.tensor,
    for_variance: tl.tensor,
    LEVELS: tl.constexpr,
    R: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    d = tl.arange(0, 1 << LEVELS)
    inside = (row[:, None] < N) & (d[None, :] < D)
    x = tl.load(x_p + row[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = _tree_of_rows(x, R, LEVELS) * for_mean
    away = tl.where(inside, x - mean[:, None], 0.0)
    variance = _tree_of_rows(away * away, R, LEVELS) * for_variance
    tl.store(out_p + row, variance.to(out_p.dtype.element_ty), mask=row < N)


def row_variances(x_ND: Tensor, for_mean: float, for_variance: float, dtype: torch.dtype) -> Tensor:
    """(N) in `dtype`: the tree over the squares of x less its mean, times `for_variance`; the mean
    is the tree over x times `for_mean`. One pass over x, contiguous, of fp32, bf16 or fp16, with
    1 to 16,384 features. Every operation is rounded by itself, as in passes over fp32."""
    rows, features = x_ND.shape
    levels = max(1, (features - 1).bit_length())
    together, warps = max(1, 4096 >> levels), max(4, (1 << levels) // 1024)
    out = torch.empty(rows, device=x_ND.device, dtype=dtype)
    if rows:
        _row_variances[(triton.cdiv(rows, together),)](
            x_ND, out, rows, features, for_mean, for_variance, levels, together,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@jit
def _column_sums(
    x_p: tl.tensor,
    out_p: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    C: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """Sums of every chunk of every leaf."""
    d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    chunk = tl.program_id(1)
    leaf = tl.program_id(2).to(tl.int64)
    t = chunk * _CHUNK + tl.arange(0, _CHUNK)
    inside = (t[:, None] < T) & (d[None, :] < D)
    x = tl.load(x_p + (leaf * T + t[:, None]) * D + d[None, :], mask=inside, other=0.0)
    tl.store(out_p + (leaf * C + chunk) * D + d, tl.sum(x.to(tl.float32), 0), mask=d < D)


@jit
def _chains(
    parts_p: tl.tensor, out_p: tl.tensor, C: tl.tensor, D: tl.tensor, COLUMNS: tl.constexpr
) -> None:
    """Chains over the chunks of every leaf. Adding 0 after the last one changes nothing."""
    d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    leaf = tl.program_id(1).to(tl.int64)
    parts_p += leaf * C * D + d
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, C, 8):
        for each in tl.static_range(8):
            inside = d < tl.where(first + each < C, D, 0)
            total += tl.load(parts_p + (first + each) * D, mask=inside, other=0.0)
    tl.store(out_p + leaf * D + d, total, mask=d < D)


def _chain_chunks(parts_LCD: Tensor) -> Tensor:
    leaves, chunks, features = parts_LCD.shape
    out = torch.empty(leaves, features, device=parts_LCD.device, dtype=torch.float32)
    grid = (triton.cdiv(features, _COLUMNS), leaves)
    _chains[grid](parts_LCD, out, chunks, features, _COLUMNS, num_warps=2)
    return out


def column_sums(x_LTD: Tensor) -> Tensor:
    """(L, D) in fp32: the sum over the tokens of every leaf, of a contiguous tensor."""
    leaves, tokens, features = x_LTD.shape
    chunks = triton.cdiv(tokens, CHUNK)
    parts = torch.empty(leaves, chunks, features, device=x_LTD.device, dtype=torch.float32)
    grid = (triton.cdiv(features, _COLUMNS), chunks, leaves)
    _column_sums[grid](x_LTD, parts, tokens, features, chunks, _COLUMNS, num_warps=4)
    return _chain_chunks(parts)


# norms


@jit
def _norm_forward(
    x_p: tl.tensor,
    weight_p: tl.tensor,
    bias_p: tl.tensor,
    out_p: tl.tensor,
    mean_p: tl.tensor,
    rstd_p: tl.tensor,
    N: tl.tensor,
    D: tl.tensor,
    eps: tl.tensor,
    IS_RMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = (n[:, None] < N) & (d[None, :] < D)
    x = tl.load(x_p + n[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_p + d, mask=d < D, other=0.0).to(tl.float32)
    if IS_RMS:
        rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
        out = x * rstd[:, None] * weight[None, :]
    else:
        mean = tl.sum(x, 1) / D
        away = tl.where(inside, x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(away * away, 1) / D + eps)
        bias = tl.load(bias_p + d, mask=d < D, other=0.0).to(tl.float32)
        out = away * rstd[:, None] * weight[None, :] + bias[None, :]
        tl.store(mean_p + n, mean, mask=n < N)
    tl.store(rstd_p + n, rstd, mask=n < N)
    place = out_p + n[:, None] * D + d[None, :]
    tl.store(place, out.to(out_p.dtype.element_ty), mask=inside)


def norm_forward(
    x_ND: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm, or LayerNorm where there is a bias: the output, means (of RMSNorm: not written) and
    1 / deviations."""
    rows, features = x_ND.shape
    out = torch.empty_like(x_ND)
    rstd = torch.empty(rows, device=x_ND.device, dtype=torch.float32)
    mean = rstd if bias is None else torch.empty_like(rstd)
    block = triton.next_power_of_2(features)
    per = max(1, 4096 // block)
    _norm_forward[(triton.cdiv(rows, per),)](
        x_ND, weight, weight if bias is None else bias, out, mean, rstd, rows, features, eps,
        bias is None, per, block, num_warps=8,
    )  # fmt: skip
    return out, mean, rstd


@jit
def _add_both(
    a: tl.tensor, b: tl.tensor, other_a: tl.tensor, other_b: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    return a + other_a, b + other_b


@jit
def _norm_backward(
    grad_p: tl.tensor,
    x_p: tl.tensor,
    weight_p: tl.tensor,
    mean_p: tl.tensor,
    rstd_p: tl.tensor,
    dx_p: tl.tensor,
    weight_parts_p: tl.tensor,
    bias_parts_p: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    C: tl.tensor,
    IS_RMS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """dx of a chunk's rows, and the chunk's sums for weight and bias."""
    chunk = tl.program_id(0)
    leaf = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    weight = tl.load(weight_p + d, mask=inside, other=0.0).to(tl.float32)
    for_weight = tl.zeros((BLOCK,), tl.float32)
    for_bias = tl.zeros((BLOCK,), tl.float32)
    for t in tl.range(chunk * _CHUNK, tl.minimum(chunk * _CHUNK + _CHUNK, T), num_stages=STAGES):
        row = leaf * T + t
        grad = tl.load(grad_p + row * D + d, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_p + row * D + d, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_p + row)
        inner = weight * grad
        if IS_RMS:
            normal = x * rstd
            dx = (inner - normal * (tl.sum(normal * inner, 0) / D)) * rstd
        else:
            normal = tl.where(inside, (x - tl.load(mean_p + row)) * rstd, 0.0)
            along, level = tl.reduce((normal * inner, inner), 0, _add_both)
            dx = (inner - (normal * (along / D) + level / D)) * rstd
        tl.store(dx_p + row * D + d, dx.to(dx_p.dtype.element_ty), mask=inside)
        for_weight += grad * normal
        for_bias += grad
    place = (leaf * C + chunk) * D + d
    tl.store(weight_parts_p + place, for_weight, mask=inside)
    if not IS_RMS:
        tl.store(bias_parts_p + place, for_bias, mask=inside)


def norm_backward(
    grad_LTD: Tensor, x_LTD: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, is_rms: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx, and for weight and bias the sum over every leaf, (L, D) in fp32."""
    leaves, tokens, features = x_LTD.shape
    chunks = triton.cdiv(tokens, CHUNK)
    dx = torch.empty_like(x_LTD)
    parts = torch.empty(
        1 if is_rms else 2, leaves, chunks, features, device=dx.device, dtype=torch.float32
    )
    block = triton.next_power_of_2(features)
    # Rows are loaded ahead while shared memory leaves room for several programs.
    stages = 3 if block * x_LTD.element_size() <= _ROW_BYTES_AHEAD else 1
    _norm_backward[(chunks, leaves)](
        grad_LTD, x_LTD, weight, mean, rstd, dx, parts[0], parts[-1], tokens, features, chunks,
        is_rms, block, stages, num_warps=4,
    )  # fmt: skip
    sums = _chain_chunks(parts.view(-1, chunks, features))
    return dx, sums[:leaves], None if is_rms else sums[leaves:]


# cross-entropy


@jit
def _loss_forward(
    x_p: tl.tensor,
    target_p: tl.tensor,
    loss_p: tl.tensor,
    log_sum_p: tl.tensor,
    V: tl.tensor,
    ignored: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, BLOCK)
    target = tl.load(target_p + row)
    x_p += row * V
    top = tl.load(x_p).to(tl.float32)
    total = 0.0
    for first in range(0, V, BLOCK):
        x = tl.load(x_p + first + v, mask=first + v < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    log_sum = top + tl.log(total)
    kept = (target != ignored) & (target >= 0) & (target < V)
    chosen = tl.load(x_p + target, mask=kept, other=0.0).to(tl.float32)
    outside = tl.where(target == ignored, 0.0, float("nan"))
    tl.store(loss_p + row, tl.where(kept, log_sum - chosen, outside))
    tl.store(log_sum_p + row, log_sum)


@jit
def _loss_backward(
    x_p: tl.tensor,
    target_p: tl.tensor,
    log_sum_p: tl.tensor,
    grad_p: tl.tensor,
    dx_p: tl.tensor,
    V: tl.tensor,
    ignored: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_p + row)
    grad = tl.where(target == ignored, 0.0, tl.load(grad_p + row))
    x = tl.load(x_p + row * V + at, mask=at < V, other=0.0).to(tl.float32)
    chance = tl.exp(x - tl.load(log_sum_p + row))
    dx = (chance - tl.where(at == target, 1.0, 0.0)) * grad
    tl.store(dx_p + row * V + at, dx.to(dx_p.dtype.element_ty), mask=at < V)


def loss_forward(x_NV: Tensor, target_N: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """-log softmax at the target, and log of the sum of exponentials, (N) in fp32. An ignored row
    has loss 0; a target outside of the vocabulary gives NaN."""
    rows, words = x_NV.shape
    loss = torch.empty(rows, device=x_NV.device, dtype=torch.float32)
    log_sum = torch.empty_like(loss)
    if rows:
        _loss_forward[(rows,)](x_NV, target_N, loss, log_sum, words, ignored, _WORDS, num_warps=8)
    return loss, log_sum


def loss_backward(
    x_NV: Tensor, target_N: Tensor, log_sum_N: Tensor, grad_N: Tensor, ignored: int
) -> Tensor:
    rows, words = x_NV.shape
    dx = torch.empty_like(x_NV)
    if rows:
        grid = (rows, triton.cdiv(words, _WORDS))
        _loss_backward[grid](
            x_NV, target_N, log_sum_N, grad_N, dx, words, ignored, _WORDS, num_warps=8
        )
    return dx


# the gradient of an embedding


@jit
def _word_chains(
    order_p: tl.tensor,
    key_p: tl.tensor,
    grad_p: tl.tensor,
    nodes_p: tl.tensor,
    length_p: tl.tensor,
    N: tl.tensor,
    D: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """For each run of equal keys, a word in a leaf, the chain over its tokens, 16 at a time; kept
    at the run's first place, with its length."""
    start = tl.program_id(0)
    key = tl.load(key_p + start)
    before = tl.load(key_p + start - 1, mask=start > 0, other=-1)
    if key != before:
        d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        q = tl.arange(0, 16)
        total = tl.zeros((BLOCK,), tl.float32)
        at = start
        more = 1
        while more > 0:
            same = tl.load(key_p + at + q, mask=at + q < N, other=-1) == key
            row = tl.load(order_p + at + q, mask=same, other=0)
            inside = same[:, None] & (d < D)[None, :]
            grad = tl.load(grad_p + row[:, None] * D + d[None, :], mask=inside, other=0.0)
            total += tl.sum(grad.to(tl.float32), 0)
            count = tl.sum(same.to(tl.int32), 0)
            more = tl.where(count == 16, 1, 0)
            at += count
        tl.store(nodes_p + start.to(tl.int64) * D + d, total, mask=d < D)
        tl.store(length_p + start, at - start)


@jit
def _word_trees(
    key_p: tl.tensor,
    nodes_p: tl.tensor,
    length_p: tl.tensor,
    out_p: tl.tensor,
    N: tl.tensor,
    D: tl.tensor,
    leaves: tl.tensor,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """For each word the tree over its leaves: a binary counter of finished nodes, as trees.Stack.
    A leaf that the word is not in counts as 0."""
    start = tl.program_id(0)
    word = tl.load(key_p + start) // leaves
    before = tl.load(key_p + start - 1, mask=start > 0, other=-leaves) // leaves
    if (start == 0) | (word != before):
        d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        rows = tl.arange(0, ROWS)
        finished = tl.zeros((ROWS, BLOCK), tl.float32)
        node = tl.zeros((BLOCK,), tl.float32)
        at = start
        for leaf in range(0, 1 << LEVELS):
            key = tl.load(key_p + at, mask=at < N, other=-1)
            here = (key == word * leaves + leaf) & (leaf < leaves)
            node = tl.load(
                nodes_p + at.to(tl.int64) * D + d, mask=d < tl.where(here, D, 0), other=0.0
            )
            at += tl.load(length_p + at, mask=here, other=0)
            carried = 1
            for level in tl.static_range(LEVELS):
                odd = (leaf >> level) & 1
                mine = (rows == level)[:, None]
                left = tl.sum(tl.where(mine, finished, 0.0), 0)
                finished = tl.where(mine & (carried == 1) & (odd == 0), node[None, :], finished)
                carried = carried & odd
                node = tl.where(carried == 1, left + node, node)
        tl.store(out_p + word.to(tl.int64) * D + d, node + 0.0, mask=d < D)


def word_sums(words_LT: Tensor, grad_LTD: Tensor, vocabulary: int) -> Tensor:
    """(V, D) in fp32: for every word a tree over leaves of the chains over its tokens."""
    leaves, tokens = words_LT.shape
    count, features = leaves * tokens, grad_LTD.shape[-1]
    device = grad_LTD.device
    out = torch.zeros(vocabulary, features, device=device, dtype=torch.float32)
    if not count:
        return out
    leaf_L1 = torch.arange(leaves, device=device)[:, None]
    key, order = torch.sort((words_LT * leaves + leaf_L1).reshape(-1), stable=True)
    nodes = torch.empty(count, features, device=device, dtype=torch.float32)
    length = torch.empty(count, device=device, dtype=torch.int32)
    block = min(512, triton.next_power_of_2(features))
    grid = (count, triton.cdiv(features, block))
    _word_chains[grid](order, key, grad_LTD, nodes, length, count, features, block, num_warps=4)
    levels = (leaves - 1).bit_length()
    rows = triton.next_power_of_2(max(1, levels))
    _word_trees[grid](
        key, nodes, length, out, count, features, leaves, levels, rows, block, num_warps=4
    )
    return out
