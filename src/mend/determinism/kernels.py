"""Operators of aten for the CPU, in an order that does not depend on shapes, strides or threads.
Each function has the signature of the aten operator that it replaces.

torch still computes elementwise kernels, whose bits do not depend on the place (laws.py), and
operators that add nothing: maxima, copies, gathers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from mend.determinism import fitting
from mend.determinism.collectives import sum_over_shares
from mend.determinism.gemm import ELEMENTS_MAX, batch_product, row_sums
from mend.determinism.layout import Layout, layout, unpack
from mend.determinism.trees import ZERO, tree_sum, wide_sum, wide_sum_dims, widen
from mend.errors import NotDeterministic

# sums


def _dims(x: Tensor, dim: Sequence[int] | None) -> list[int]:
    """The dimensions named, ascending and counted from the first; none named: all."""
    return fitting.places_of(dim, x.dim()) if dim else list(range(x.dim()))


def sum_dims(
    x: Tensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """aten::sum.dim_IntList. Sums over all tokens go by sequences where these are packed."""
    if not (dtype or x.dtype).is_floating_point:  # exact in any order: torch's own, by its `out`
        kind = dtype or (torch.int64 if not x.dtype.is_complex else x.dtype)
        return torch.sum(
            x, list(dim) if dim else None, keepdim, dtype=kind, out=x.new_empty(0, dtype=kind)
        )
    x = x if dtype is None else x.to(dtype)
    return _wide_sum(x, _dims(x, dim), keepdim).to(x.dtype)


def _wide_sum(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """In fp32 where `x` is narrower."""
    at, leading = layout(), bool(dims) and dims == list(range(len(dims)))
    if leading and at.token_group is not None and dims[:2] == [0, 1]:
        by_token = wide_sum_dims(x, dims[2:], True) if len(dims) > 2 else widen(x)
        total = wide_sum(sum_over_shares(by_token, 1, at.token_group), 0)
    elif lead := _packed_dims(x, dims, at):
        rows = unpack(x.flatten(0, lead - 1), at.lengths)
        inner = [each - lead + 2 for each in dims if each >= lead]
        total = wide_sum_dims(rows, (0, 1, *inner))
        kept = [1 if each in dims else size for each, size in enumerate(x.shape)]
        shape = kept if keepdim else [size for each, size in enumerate(kept) if each not in dims]
        return total.reshape(shape)
    elif leading and at.count and x.shape[0] % at.count == 0 and x.shape[0] != at.count:
        total = wide_sum_dims(at.unflatten(x), range(len(dims) + 1))
    else:
        return wide_sum_dims(x, dims, keepdim)
    rest = x.shape[len(dims) :]
    return total.reshape((1,) * len(dims) + rest if keepdim else rest)


def _packed_dims(x: Tensor, dims: Sequence[int], at: Layout) -> int:
    """How many of x's first dimensions are packed tokens, if a sum over `dims` adds them all; 0: it
    does not. Before them `dims` need not name those of size 1: of a parameter of (1, 1, D)."""
    if not at.lengths or not dims:
        return 0
    lead = at.packed_dims(x, dims[-1] + 1 if dims[0] == 0 else x.dim() - 1)
    if not lead and len(dims) < x.dim():
        at.refuse_inner_tokens(x, [each for each in dims if each < x.dim() - 1])
    return lead if all(each in dims or x.shape[each] == 1 for each in range(lead)) else 0


def sum_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """aten::sum."""
    return sum_dims(x, dtype=dtype)


def mean_dims(
    x: Tensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """aten::mean.dim."""
    x = x if dtype is None else x.to(dtype)
    dims = _dims(x, dim)
    count = math.prod(x.shape[each] for each in dims)
    return (_wide_sum(x, dims, keepdim) / count).to(x.dtype)


def mean_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """aten::mean."""
    return mean_dims(x, dtype=dtype)


def variance(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    """aten::var.correction."""
    dims = _dims(x, dim)
    count = math.prod(x.shape[each] for each in dims)
    away = widen(x) - mean_dims(widen(x), dims, True)
    total = sum_dims(away * away, dims, keepdim)
    return (total / max(0.0, count - (1 if correction is None else correction))).to(x.dtype)


def deviation(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    """aten::std.correction."""
    return variance(widen(x), dim, correction=correction, keepdim=keepdim).sqrt_().to(x.dtype)


def vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """aten::linalg_vector_norm."""
    x = x if dtype is None else x.to(dtype)
    if ord == math.inf:
        return x.abs().amax(_dims(x, dim), keepdim)
    if ord == 1:
        return sum_dims(x.abs(), dim, keepdim)
    if ord != 2:
        raise NotDeterministic(f"a vector norm of order {ord}", "use 1, 2 or infinity")
    if dim or x.dim() == 0:
        return sum_dims(widen(x) * widen(x), dim, keepdim).sqrt().to(x.dtype)
    norm = norms_of([x])[0]
    return norm.view((1,) * x.dim()) if keepdim else norm


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each."""
    norms = norms_by_rows(squares_by_row(tensors))
    return [norm.to(x.dtype) for norm, x in zip(norms, tensors, strict=True)]


def squares_by_row(tensors: Sequence[Tensor]) -> list[Tensor]:
    """(rows): the sums of squares over the last dimension, in fp32 where a tensor is narrower.

    Here and in norms_by_rows() tensors that fit together share calls: calls are what the norm of a
    model's many small gradients costs. A row's sum depends on that row alone.
    """
    if any(x.is_complex() for x in tensors):
        raise NotDeterministic("a norm of complex numbers", "take it of torch.view_as_real()")
    found = [widen(x).reshape(x.shape[:-1].numel(), *(x.shape[-1:] or (1,))) for x in tensors]
    for indices in _alike([(x.shape[1], x.dtype, x.device) for x in found]):
        for some in _pieces(indices, [found[index].numel() for index in indices]):
            rows = [found[index] for index in some]
            squares = torch.cat(rows).square_() if len(rows) > 1 else rows[0].square()
            sums = torch.split(row_sums(squares)[:, 0], [len(each) for each in rows])
            for index, each in zip(some, sums, strict=True):
                found[index] = each
    return found


def norms_by_rows(squares: Sequence[Tensor]) -> list[Tensor]:
    """The root of the tree over the rows of each."""
    found = list(squares)
    for indices in _alike([(each.shape, each.dtype, each.device) for each in squares]):
        sums = tree_sum(torch.stack([squares[index] for index in indices]), 1).sqrt_()
        for index, norm in zip(indices, sums.unbind(), strict=True):
            found[index] = norm
    return found


def _alike(keys: Sequence[object]) -> list[list[int]]:
    """The places of equal keys."""
    places: dict[object, list[int]] = {}
    for index, key in enumerate(keys):
        places.setdefault(key, []).append(index)
    return list(places.values())


def _pieces(indices: Sequence[int], numels: Sequence[int]) -> Iterator[list[int]]:
    """Neighbours of at most ELEMENTS_MAX elements together, or one larger one."""
    piece: list[int] = []
    total = 0
    for index, numel in zip(indices, numels, strict=True):
        if piece and total + numel > ELEMENTS_MAX:
            yield piece
            piece, total = [], 0
        piece.append(index)
        total += numel
    yield piece


def dot(x: Tensor, y: Tensor) -> Tensor:
    """aten::dot."""
    fitting.refuse_vectors(x, y)
    return sum_dims(widen(x) * widen(y)).to(x.dtype)


def foreach_norm(
    tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """aten::_foreach_norm.Scalar: what clip_grad_norm_ asks."""
    if ord == 2 and dtype is None:
        return norms_of(tensors)
    return [vector_norm(each, ord, dtype=dtype) for each in tensors]


# products without a weight; those with one are in linear.py


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """aten::bmm."""
    fitting.refuse_other_dims(a, b, 3)
    fitting.refuse_other_type(a, b)
    return batch_product(a, b).to(a.dtype)


def baddbmm(add: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """aten::baddbmm."""
    fitting.refuse_other_dims(a, b, 3)
    fitting.refuse_other_type(a, b)
    product = batch_product(a, b) * alpha
    total = product if beta == 0 else fitting.refuse_wider(add * beta + product, product)
    return total.to(a.dtype)


# softmax and losses

MEAN, SUM = 1, 2
"""How aten names this reduction of a loss. 0: none, 2: sum."""


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """aten::_softmax."""
    wide = widen(x)
    powers = (wide - wide.amax(dim, True)).exp_()
    return powers.div_(sums_along(powers, dim)).to(x.dtype)


def softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """aten::_softmax_backward_data."""
    out = widen(output)
    scaled = widen(grad) * out
    return scaled.sub_(out * sums_along(scaled, dim)).to(input_dtype)


def sums_along(x: Tensor, dim: int) -> Tensor:
    """row_sums() of another dimension, which stays with size 1."""
    return row_sums(x.movedim(dim, -1)).movedim(-1, dim)


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """aten::_log_softmax."""
    wide = widen(x)
    away = wide - wide.amax(dim, True)
    return (away - tree_sum(away.exp(), dim).log().unsqueeze(dim)).to(x.dtype)


def log_softmax_backward(
    grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    """aten::_log_softmax_backward_data."""
    wide = widen(grad)
    part = widen(output).exp() * tree_sum(wide, dim).unsqueeze(dim)
    return (wide - part).to(input_dtype)


def nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """aten::nll_loss_forward."""
    x_NC, target_N = (x[None], target.reshape(1)) if x.dim() == 1 else (x, target)
    fitting.refuse_targets(x_NC, target_N, weight)
    kept = target_N != ignore_index
    index = target_N.where(kept, 0)[:, None]
    weights = x_NC.new_ones(x_NC.shape[1]) if weight is None else weight
    each = torch.where(kept, weights[index[:, 0]], 0.0)
    losses = -x_NC.gather(1, index)[:, 0] * each
    if reduction == 0:
        return torch.where(kept, losses, 0.0).reshape(target.shape), x.new_zeros(())
    total, whole = (sum_dims(torch.where(kept, part, 0.0)) for part in (losses, each))
    return (total / whole if reduction == MEAN else total), whole


def mse_loss(x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    """aten::mse_loss."""
    away = widen(x) - widen(target)
    squares = away.square_()
    if reduction == 0:
        return squares.to(x.dtype)
    return (mean_all(squares) if reduction == MEAN else sum_all(squares)).to(x.dtype)


def mse_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    """aten::mse_loss_backward."""
    away = (widen(x) - widen(target)).mul_(2)
    away = away.div_(max(1, away.numel())) if reduction == MEAN else away
    return away.mul_(widen(grad)).to(x.dtype)


# roots: of bf16 and fp16 torch's kernels round the last elements of a vector once more


def rsqrt(x: Tensor) -> Tensor:
    """aten::rsqrt."""
    wide = widen(x) if x.is_floating_point() else x.float()
    root = torch.rsqrt(wide, out=torch.empty_like(wide))
    return root.to(x.dtype) if x.is_floating_point() else root


def rsqrt_(x: Tensor) -> Tensor:
    """aten::rsqrt_."""
    return x.copy_(rsqrt(x))


def power(x: Tensor, exponent: float) -> Tensor:
    """aten::pow.Tensor_Scalar, which makes roots of some exponents."""
    wide, kind = widen(x), torch.result_type(x, exponent)
    out = torch.empty_like(wide, dtype=torch.promote_types(kind, wide.dtype))
    return torch.pow(wide, exponent, out=out).to(kind)


def power_(x: Tensor, exponent: float) -> Tensor:
    """aten::pow_.Scalar."""
    return x.copy_(power(x, exponent))


# activations: torch's kernels round the last elements of a vector otherwise than its body


def sigmoid(x: Tensor) -> Tensor:
    """aten::sigmoid."""
    wide = widen(x) if x.is_floating_point() else x.float()
    return (1 / (1 + (-wide).exp())).to(x.dtype if x.is_floating_point() else torch.float32)


def silu(x: Tensor) -> Tensor:
    """aten::silu."""
    wide = widen(x)
    return (wide / wide.neg().exp_().add_(1)).to(x.dtype)


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """aten::silu_backward."""
    wide = widen(x)
    gate = 1 / wide.neg().exp_().add_(1)
    slope = (1 - gate).mul_(wide).add_(1).mul_(gate)
    return slope.mul_(widen(grad)).to(x.dtype)


_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """aten::gelu."""
    wide = widen(x)
    if approximate == "tanh":
        inner = _TANH_SCALE * (wide + _TANH_CUBE * (wide * wide * wide))
        return (0.5 * wide * (1 + inner.tanh())).to(x.dtype)
    return (0.5 * wide * (1 + (wide * math.sqrt(0.5)).erf())).to(x.dtype)


def gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """aten::gelu_backward."""
    wide = widen(x)
    if approximate == "tanh":
        inner = (_TANH_SCALE * (wide + _TANH_CUBE * (wide * wide * wide))).tanh()
        slope = _TANH_SCALE * (1 + 3 * _TANH_CUBE * (wide * wide))
        derivative = 0.5 * (1 + inner) + 0.5 * wide * ((1 - inner * inner) * slope)
    else:
        density = (wide * wide * -0.5).exp() * (1 / math.sqrt(2 * math.pi))
        derivative = 0.5 * (1 + (wide * math.sqrt(0.5)).erf()) + wide * density
    return (widen(grad) * derivative).to(x.dtype)


# layer norm; rms_norm is in norms.py


def sum_features(x: Tensor, dims: int) -> Tensor:
    """Over the last `dims` dimensions, which stay with size 1: those that a norm is over."""
    summed = row_sums(x.flatten(-dims))
    return summed.view(*x.shape[: x.dim() - dims], *(1,) * dims)


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::native_layer_norm."""
    fitting.refuse_norm(x, shape, weight, bias)
    wide, count = widen(x), math.prod(shape)
    mean = sum_features(wide, len(shape)) / count
    away = wide - mean
    rstd = 1 / (sum_features(away * away, len(shape)) / count + eps).sqrt()
    out = away * rstd
    if weight is not None:
        out = out * widen(weight)
    if bias is not None:
        out = out + widen(bias)
    return out.to(x.dtype), mean, rstd


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """aten::native_layer_norm_backward."""
    lead = x.dim() - len(shape)
    count = math.prod(shape)
    wide, normal = widen(grad), (widen(x) - mean) * rstd
    dx = dw = db = None
    if output_mask[0]:
        inner = wide if weight is None else wide * widen(weight)
        along = sum_features(inner * normal, len(shape)) / count
        whole = sum_features(inner, len(shape)) / count
        dx = ((inner - whole - normal * along) * rstd).to(x.dtype)
    tokens = list(range(lead))
    if output_mask[1] and weight is not None:
        dw = sum_dims(wide * normal, tokens).to(weight.dtype) if tokens else wide * normal
    if output_mask[2] and bias is not None:
        db = sum_dims(wide, tokens).to(bias.dtype) if tokens else wide
    return dx, dw, db


# sums into chosen places


def embedding_backward(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_by_freq: bool
) -> Tensor:
    """aten::embedding_dense_backward: for every word a tree over the places it stands at."""
    if scale_by_freq:
        raise NotDeterministic("an embedding with scale_grad_by_freq", "set it to False")
    at, width = layout(), grad.shape[-1]
    if lead := at.packed_dims(indices, indices.dim()):
        inner = indices.shape[lead:].numel()
        places = unpack(torch.ones(at.tokens, inner, dtype=torch.bool), at.lengths)
        place_N = places.reshape(-1).nonzero()[:, 0]
        longest = max(at.lengths) * inner
    else:
        at.refuse_inner_tokens(indices, range(indices.dim()))
        by_row = at.unflatten(indices)
        longest = by_row.shape[1:].numel()
        place_N = torch.arange(indices.numel())
    # Sequences begin at multiples of a power of two, so that their sums are nodes of the tree.
    stride = 1 << (longest - 1).bit_length()
    place_N = place_N // longest * stride + place_N % longest
    word_N = indices.reshape(-1)
    total = sum_by_place(widen(grad).reshape(-1, width), word_N, place_N, num_weights)
    if padding_idx >= 0:
        total[padding_idx] = 0
    return total.to(grad.dtype)


def sum_by_place(x_ND: Tensor, row_N: Tensor, place_N: Tensor, rows: int) -> Tensor:
    """(rows, D): for each row the tree over its entries; an entry is leaf number `place`."""
    total = x_ND.new_zeros(rows, x_ND.shape[1])
    if not len(row_N):
        return total
    # What meets whom is settled in numpy: on small arrays torch spends far longer on each call.
    place, device = place_N.cpu().numpy(), x_ND.device
    height = int(place.max()).bit_length()
    key = (row_N.cpu().numpy().astype(np.int64) << height) + place
    order = key.argsort()  # no two are equal
    key, nodes = key[order], x_ND[torch.from_numpy(order).to(device)]
    at = np.arange(len(key))
    for _ in range(height):
        key = key >> 1
        second = np.flatnonzero(key[1:] == key[:-1]) + 1
        if not len(second):
            continue
        first = torch.from_numpy(at[second - 1]).to(device)
        sums = nodes.index_select(0, first).add_(nodes[torch.from_numpy(at[second]).to(device)])
        nodes.index_copy_(0, first, sums)
        left = np.ones(len(key), dtype=bool)
        left[second] = False
        key, at = key[left], at[left]
    last = nodes[torch.from_numpy(at).to(device)].add_(ZERO)
    total[torch.from_numpy(key).to(device)] = last
    return total


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """aten::index_add: x plus, for every row, a tree over the entries of `source`."""
    if not x.is_floating_point():  # exact in any order
        return torch.index_add(x, dim, index, source, alpha=alpha, out=torch.empty_like(x))
    dim = fitting.place_of(dim, x.dim())
    fitting.refuse_source(x, dim, index, source)
    _refuse_outside(index, x, dim)
    moved = source.movedim(dim, 0)
    flat_ND = moved.reshape(moved.shape[0], -1) * alpha
    added = sum_by_place(widen(flat_ND), index, torch.arange(len(index)), x.shape[dim])
    rest = x.movedim(dim, 0).shape
    return (widen(x) + added.view(rest).movedim(0, dim)).to(x.dtype)


def _refuse_outside(index: Tensor, x: Tensor, dim: int) -> None:
    """Raises IndexError where torch does; here it would be another row, or another end of x."""
    size = x.shape[dim] if x.dim() else 1
    if bool(((index < 0) | (index >= size)).any()):
        raise IndexError(f"index out of range: of dimension {dim}, which has {size} places")


def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """aten::scatter_add: every element of x plus a tree over the entries along `dim`."""
    if not x.is_floating_point():  # exact in any order
        return torch.scatter_add(x, dim, index, source, out=torch.empty_like(x))
    dim = fitting.place_of(dim, x.dim())
    fitting.refuse_index(x, dim, index, source)
    _refuse_outside(index, x, dim)
    source = source[tuple(slice(0, size) for size in index.shape)]
    device = index.device
    grids = torch.meshgrid(
        *(torch.arange(size, device=device) for size in index.shape), indexing="ij"
    )
    target, stride = torch.zeros_like(index), 1
    for axis in reversed(range(x.dim())):
        target = target + (index if axis == dim else grids[axis]) * stride
        stride *= x.shape[axis]
    place = grids[dim].reshape(-1)
    flat = widen(source).reshape(-1, 1)
    added = sum_by_place(flat, target.reshape(-1), place, x.numel())
    return (widen(x) + added.view(x.shape)).to(x.dtype)


def index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """aten::index_put: what x[index] is differentiated by."""
    result = x.clone()
    if not accumulate or not x.is_floating_point():
        return result.index_put_(list(indices), values, accumulate)
    places = torch.arange(x.numel(), device=x.device).view(x.shape)
    chosen = torch.ops.aten.index.Tensor(places, indices)
    flat = widen(values.expand(chosen.shape)).reshape(-1, 1)
    order = torch.arange(chosen.numel())
    added = sum_by_place(flat, chosen.reshape(-1), order, x.numel())
    return (widen(x) + added.view(x.shape)).to(x.dtype)


def index_add_(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """aten::index_add_."""
    return x.copy_(index_add(x, dim, index, source, alpha=alpha))


def scatter_add_(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """aten::scatter_add_."""
    return x.copy_(scatter_add(x, dim, index, source))
