"""Matrix products and linear layers for CUDA at level shape.

A product of bf16 or fp16 is made by cuBLASLt with split-K forbidden: on the GPUs that pass
keeps_law() its bits depend on the order over K alone, which is one chain. fp32, sides that are no
multiple of 8, and GPUs that do not pass take the kernel of one fixed tile. A product with one row
or column is made with two, because cuBLAS has kernels for vectors.

The gradient of a weight: one chain over the tokens of a leaf, which is `leaf_rows` rows of the
batch, and a tree over leaves, in fp32.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mend.determinism.autocasting import compute_type
from mend.determinism.coverage import unseen
from mend.determinism.digests import same_bits
from mend.determinism.fitting import refuse_other_dims, refuse_other_type, refuse_wider
from mend.determinism.gemm import refuse_wide
from mend.determinism.layout import Layout, by_sequence, layout
from mend.determinism.linear import (
    addmm_with,
    matmul_with,
    refuse_other_weight,
    refuse_second_derivative,
    refuse_subclass,
)
from mend.determinism.trees import Stack
from mend.determinism.uses import slots_of
from mend.errors import NotDeterministic

TORCH_MIN = "2.10"
"""The first torch that can forbid split-K."""

BYTES_MAX = 1 << 30
"""Of leaves' products at once."""

SLAB_ROWS = 128
"""What is made at once has a multiple of it: tiles of cuBLASLt."""

ALIGNED = 8
"""cuBLASLt's kernels for tensor cores want sides of a multiple of it."""

HALF = (torch.bfloat16, torch.float16)

SPLIT_K = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
)
"""torch's switches. A pair of False also forbids split-K."""

_fixed_tiles = False
_leaf_rows = 0
"""0: no kernels are in place."""


def set_products(fixed_tiles: bool, leaf_rows: int) -> None:
    """Choose the kernels of this process, and how many rows of the batch are a leaf; 0: the
    kernels are gone."""
    global _fixed_tiles, _leaf_rows
    _fixed_tiles, _leaf_rows = fixed_tiles, leaf_rows


def refuse_without_kernels() -> None:
    """What is called by no operator asks whether level shape has a GPU at all."""
    if not _leaf_rows:
        raise NotDeterministic(
            "level shape has no kernels on this GPU", "look at enable(...).settings for the reason"
        )


def leaves_of(x: Tensor, at: Layout) -> Tensor:
    """(..., D) -> (leaves, tokens, D), contiguous."""
    x_BTD = by_sequence(x, at)
    if _leaf_rows > 1:
        rows, tokens, features = x_BTD.shape
        if rows % _leaf_rows or at.lengths:
            raise NotDeterministic(
                f"a microbatch of {rows} rows{', packed,' if at.lengths else ''} in leaves of "
                f"{_leaf_rows} rows",
                "take a microbatch that is a multiple, or enable(..., leaf_rows=1)",
            )
        x_BTD = x_BTD.reshape(rows // _leaf_rows, _leaf_rows * tokens, features)
    return x_BTD.contiguous()


def leaf_sum(nodes: Tensor, out: Tensor | None = None) -> Tensor:
    """The tree over leaves, the first dimension, of contiguous fp32; zeros where there is none.
    Written into `out`, contiguous and rounded to its type, where it is given."""
    kernels = _kernels()
    if out is None:
        out = torch.empty(nodes.shape[1:], device=nodes.device, dtype=torch.float32)
    most = kernels.LEAVES_MAX
    while nodes.shape[0] > most:
        groups = torch.split(nodes, most)
        nodes = nodes.new_empty(len(groups), *nodes.shape[1:])
        for group, node in zip(groups, nodes, strict=True):
            kernels.tree(group, node)
    if nodes.shape[0]:
        kernels.tree(nodes, out)
    else:
        out.zero_()
    return out


def product(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """a @ b (+ bias) in the type of `a`."""
    (rows, pairs), columns = a_MK.shape, b_KN.shape[1]
    if not rows * columns * pairs or not _is_for_blas(a_MK, pairs, columns):
        wide = _tiles(a_MK[None], b_KN[None])[0]
        return (wide if bias_N is None else wide.add_(bias_N)).to(a_MK.dtype)
    if rows == 1:
        a_MK = torch.cat([a_MK, torch.zeros_like(a_MK)])
    # The forms with `out` are the library's own; mm() may be ours.
    out = torch.empty(a_MK.shape[0], columns, device=a_MK.device, dtype=a_MK.dtype)
    if bias_N is None:
        torch.mm(a_MK, b_KN, out=out)
    else:
        torch.addmm(bias_N, a_MK, b_KN, out=out)
    return out[:1] if rows == 1 else out


def outer_product(a_LTN: Tensor, b_LTK: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The tree over leaves of a.T @ b, (N, K), rounded once to `dtype`: the gradient of a weight.

    The leaves of some rows of it are made, then summed: each is written once and read once. Where
    there are too many leaves for SLAB_ROWS rows, as of a batch without tokens, a power of two of
    them is.
    """
    (leaves, _, rows), columns = a_LTN.shape, b_LTK.shape[2]
    out = torch.empty(rows, columns, device=a_LTN.device, dtype=dtype)
    if not leaves:
        return out.zero_()
    together = _leaves_at_once(leaves, 4 * min(rows, SLAB_ROWS) * columns)
    for some in _slabs(rows, 4 * together * columns):
        if together >= leaves:
            leaf_sum(_outer_products(a_LTN[:, :, some], b_LTK), out[some])
            continue
        stack = Stack()
        for first in range(0, leaves, together):
            part = slice(first, first + together)
            stack.push(leaf_sum(_outer_products(a_LTN[part, :, some], b_LTK[part])))
        out[some].copy_(stack.total())
    return out


def _leaves_at_once(leaves: int, leaf_bytes: int) -> int:
    """All of them, or a power of two: of BYTES_MAX at most, but at least one."""
    most = max(1, BYTES_MAX // max(1, leaf_bytes))
    return leaves if leaves <= most else 1 << (most.bit_length() - 1)


def _slabs(rows: int, row_bytes: int) -> list[slice]:
    """Parts of about equal size, of about BYTES_MAX at most."""
    parts = math.ceil(rows / max(1, BYTES_MAX // max(1, row_bytes)))
    step = math.ceil(rows / max(1, parts) / SLAB_ROWS) * SLAB_ROWS
    return [slice(row, min(rows, row + step)) for row in range(0, rows, step)] if rows else []


def _outer_products(a_LTN: Tensor, b_LTK: Tensor) -> Tensor:
    """(L, N, K) in fp32; `a_LTN` may be columns of a wider tensor."""
    a_LNT = a_LTN.transpose(1, 2)
    (leaves, rows, tokens), columns = a_LNT.shape, b_LTK.shape[2]
    if not tokens or not _is_for_blas(a_LNT, rows, columns, a_LTN.stride(1)):
        return _tiles(a_LNT, b_LTK)
    if leaves == 1:  # a large one alone is faster than a batch of one
        return torch.mm(a_LNT[0], b_LTK[0], out_dtype=torch.float32)[None]
    shape = (leaves, rows, columns)
    out = torch.empty(shape, device=a_LTN.device, dtype=torch.float32)
    return torch.bmm(a_LNT, b_LTK, out_dtype=torch.float32, out=out)


def batch_product(a_ZMK: Tensor, b_ZKN: Tensor) -> Tensor:
    """a @ b in fp32, always by the fixed tile: sides of such products are often of one row."""
    return _tiles(a_ZMK, b_ZKN)


def _is_for_blas(a: Tensor, *sides: int) -> bool:
    return a.dtype in HALF and not _fixed_tiles and not any(side % ALIGNED for side in sides)


def _tiles(a_ZMK: Tensor, b_ZKN: Tensor) -> Tensor:
    made: Tensor = _kernels().products(a_ZMK, b_ZKN)
    return made


class LinearFunction(torch.autograd.Function):
    """x @ weight.T + bias, by the order of this file."""

    @staticmethod
    def forward(
        ctx: Any,  # torch's FunctionCtx has no fields that mypy knows
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        dtype = compute_type() or x.dtype
        with unseen():
            x_NK = x.reshape(-1, x.shape[-1]).to(dtype)
            narrow = weight.to(dtype)
            out = product(x_NK, narrow.t(), None if bias is None else bias.to(dtype))
            ctx.save_for_backward(x_NK, narrow)
            ctx.layout, ctx.x_shape, ctx.x_type = layout(), x.shape, x.dtype
            ctx.has_bias, ctx.slots = bias is not None, slots_of(weight)
            ctx.dw_type = torch.float32 if ctx.slots is not None else gradient_type(weight)
            # Not view(): FSDP2 warns of a module whose output is one.
            shaped: Tensor = torch.ops.aten._unsafe_view(out, (*x.shape[:-1], weight.shape[0]))
            return shaped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx.layout)
        x_NK, weight = ctx.saved_tensors
        dx = None
        with unseen():
            grad_NM = grad.reshape(-1, grad.shape[-1]).contiguous()
            if ctx.needs_input_grad[0]:
                dx = product(grad_NM, weight).view(ctx.x_shape).to(ctx.x_type)
            dw, db = weight_gradients(
                grad_NM.view(grad.shape),
                lambda: x_NK.view(ctx.x_shape),
                ctx.layout,
                needs_weight=ctx.needs_input_grad[1],
                needs_bias=ctx.has_bias and ctx.needs_input_grad[2],
                dtype=ctx.dw_type,
            )
            if dw is not None and ctx.slots is not None:
                ctx.slots.put("linear", dw)
                dw = None
        return dx, dw, db


def gradient_type(weight: Tensor) -> torch.dtype:
    """What autograd rounds the gradient of `weight` to."""
    if not weight.is_leaf:
        return weight.dtype
    asked: torch.dtype | None = weight.grad_dtype
    return asked or torch.float32  # None: any type


def weight_gradients(
    grad: Tensor,
    x_of: Callable[[], Tensor],
    at: Layout,
    *,
    needs_weight: bool,
    needs_bias: bool,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor | None, Tensor | None]:
    """Of a weight (N, K), in `dtype`, and a bias (N), in fp32; `grad`: (..., N); `x_of`: makes
    (..., K)."""
    dw = db = None
    if needs_weight or needs_bias:
        grad_LTN = leaves_of(grad, at)
        if needs_weight:
            dw = outer_product(grad_LTN, leaves_of(x_of(), at), dtype)
        if needs_bias:
            db = leaf_sum(_kernels().column_sums(grad_LTN))
    return dw, db


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """aten::linear."""
    refuse_subclass("linear", x, weight)
    refuse_wide(x, weight)
    refuse_other_weight(x, weight)
    if weight.dim() == 1:
        return linear(x, weight[None], bias).squeeze(-1)
    result: Tensor = LinearFunction.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """aten::matmul."""
    return matmul_with(linear, a, b)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """aten::mm."""
    refuse_other_dims(a, b, 2)
    return linear(a, b.t())


def addmm(add: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """aten::addmm."""
    return addmm_with(linear, add, a, b, beta, alpha)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """aten::bmm."""
    refuse_wide(a, b)
    refuse_other_dims(a, b, 3)
    refuse_other_type(a, b)
    return batch_product(a, b).to(a.dtype)


def baddbmm(add: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """aten::baddbmm."""
    refuse_wide(a, b)
    refuse_other_dims(a, b, 3)
    refuse_other_type(a, b)
    made = batch_product(a, b) * alpha
    return (made if beta == 0 else refuse_wider(add * beta + made, made)).to(a.dtype)


def missing_requirement() -> str | None:
    """What level shape lacks on this machine's GPU; None: nothing."""
    if not hasattr(torch.backends.cuda.matmul, f"{SPLIT_K[0]}_split_k"):
        return f"torch {TORCH_MIN} or newer, to forbid split-K; this is {torch.__version__}"
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        return f"a GPU of compute capability 9.0 or newer; this has {major}.{minor}"
    try:
        _kernels()
    except ImportError:
        return "Triton; pip install triton"
    return None


def pin_blas() -> Callable[[], None]:
    """cuBLASLt, and no split-K; returns a function that restores what was."""
    backend: Any = torch.backends.cuda.matmul
    was = {name: (getattr(backend, name), getattr(backend, f"{name}_split_k")) for name in SPLIT_K}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: that this switch may change
        library = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
    for name in SPLIT_K:
        setattr(backend, name, (False, False))

    def restore() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.backends.cuda.preferred_blas_library(library)
        for name, value in was.items():
            setattr(backend, name, value)

    return restore


LAW_SHAPES = ((3072, 768), (64, 4096), (512, 3584), (1536, 8960))
"""(Outputs, inputs): deep and narrow ones, for which cuBLAS likes to split K."""

LAW_ROWS = (2, 5, 16, 33, 64, 100, 128, 300)


@cache
def keeps_law(device: torch.device) -> bool:
    """Whether cuBLASLt makes one chain over K on this GPU, whatever the number of rows or leaves;
    compared with the fixed tile, which does by construction."""
    generator = torch.Generator(device).manual_seed(33)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    for outputs, inputs in LAW_SHAPES:
        x, weight, bias = draw(512, inputs), draw(outputs, inputs), draw(outputs)
        chain = _tiles(x[None], weight.t()[None])[0]
        if not same_bits(product(x, weight.t()), chain.bfloat16()):
            return False
        biased = product(x, weight.t(), bias)
        flipped = weight.t().contiguous()
        for rows in LAW_ROWS:
            with_bias = [product(x[:rows], each, bias) for each in (weight.t(), flipped)]
            if not all(same_bits(each, biased[:rows]) for each in with_bias):
                return False
            if not same_bits(product(x[:rows], flipped), chain[:rows].bfloat16()):
                return False
        grad_LTN, x_LTK = draw(4, 512, outputs), draw(4, 512, inputs)
        together = _outer_products(grad_LTN, x_LTK)
        alone = [_outer_products(grad_LTN[i : i + 1], x_LTK[i : i + 1])[0] for i in range(4)]
        if not same_bits(together, torch.stack(alone)):
            return False
        if not same_bits(together, _tiles(grad_LTN.transpose(1, 2), x_LTK)):
            return False
        slab = _outer_products(grad_LTN[:, :, outputs // 2 :], x_LTK)
        if not same_bits(slab, together[:, outputs // 2 :]):
            return False
    return True


def _kernels() -> Any:
    """Triton, which comes with torch where it is built for CUDA."""
    from mend.determinism import gpu_kernels

    return gpu_kernels
