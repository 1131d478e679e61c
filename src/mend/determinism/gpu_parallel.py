"""Tensor parallelism for CUDA at level shape, to the bits of one GPU. Moves tensors through
torch.distributed.

cuBLASLt makes one chain over all pairs, so a sum is never cut: where a layer's pairs are spread
over ranks, an all-to-all gives every rank all pairs of its share of the tokens, and the shares of
the weight are gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mend.determinism.autocasting import compute_type
from mend.determinism.collectives import all_gather
from mend.determinism.coverage import unseen
from mend.determinism.gpu_products import product, refuse_without_kernels, weight_gradients
from mend.determinism.layout import layout
from mend.determinism.linear import refuse_second_derivative
from mend.errors import NotDeterministic

if TYPE_CHECKING:
    from mend.determinism.tensor_parallel import Cut

TOKENS = 1
"""The dimension that ranks share between layers; (rows, tokens, features)."""


class CutLinear(torch.autograd.Function):
    """x @ weight.T + bias of a layer that is cut as `cut` says; x, weight, bias: this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
        refuse_without_kernels()
        if weight.dtype != torch.float32:
            raise NotDeterministic(
                f"tensor parallelism with weights in {weight.dtype} has no order at level shape on "
                "a GPU: the gradients of microbatches would be rounded one by one",
                "use fp32 weights with torch.autocast",
            )
        dtype = compute_type() or x.dtype
        with unseen():
            mine, narrow = x.to(dtype), weight.to(dtype)
            added = None if bias is None else bias.to(dtype)
            ctx.save_for_backward(mine, narrow)
            ctx.layout, ctx.cut, ctx.x_type = layout(), cut, x.dtype
            ctx.has_bias = bias is not None
            if cut.sums_in:
                out = full_sums(mine, narrow.t(), added, cut)
            else:
                out = _local_sums(cut.whole_input(mine), narrow.t(), added)
            # Not view(): FSDP2 warns of a module whose output is one.
            shaped: Tensor = torch.ops.aten._unsafe_view(out, out.shape)
            return shaped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx.layout)
        (x, weight), cut = ctx.saved_tensors, ctx.cut
        dx = None
        with unseen():
            grad = cut.whole_gradient(grad).contiguous()
            if ctx.needs_input_grad[0]:
                sums = _local_sums if cut.sums_in else full_sums
                dx = sums(grad, weight, None, *(() if cut.sums_in else (cut,))).to(ctx.x_type)
            dw, db = weight_gradients(
                grad,
                lambda: cut.whole_input(x),
                ctx.layout,
                needs_weight=ctx.needs_input_grad[1],
                needs_bias=ctx.has_bias and ctx.needs_input_grad[2],
            )
        return dx, dw, db, None


def _local_sums(a: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    """a @ b (+ bias), all of whose pairs are here; (..., N)."""
    made = product(a.reshape(-1, a.shape[-1]), b_KN, bias_N)
    return made.view(*a.shape[:-1], b_KN.shape[1])


def full_sums(a: Tensor, b_KN: Tensor, bias_N: Tensor | None, cut: Cut) -> Tensor:
    """a @ b (+ bias) over the pairs of all ranks, which have a share of them in `a` and `b`, for
    all tokens or, where these are cut, for this rank's. A collective."""
    ranks = dist.get_world_size(cut.group)
    by_token = a if cut.tokens_cut else _padded(a.reshape(1, -1, a.shape[-1]), ranks)
    mine = pairs_of_own_tokens(by_token, cut.group, cut.fused)
    whole = all_gather(b_KN, cut.group)
    if cut.fused > 1:
        whole = whole.view(ranks, cut.fused, -1, whole.shape[1]).transpose(0, 1).flatten(0, 2)
    made = product(mine.flatten(0, 1), whole, bias_N)
    if cut.tokens_cut:
        return made.view(*mine.shape[:2], made.shape[1])
    numel = a.shape[:-1].numel()
    return all_gather(made, cut.group)[:numel].view(*a.shape[:-1], made.shape[1])


def _padded(x: Tensor, ranks: int) -> Tensor:
    """Zeros behind the tokens, so that ranks have equal shares."""
    missing = -x.shape[TOKENS] % ranks
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def pairs_of_own_tokens(x: Tensor, group: dist.ProcessGroup, fused: int = 1) -> Tensor:
    """(rows, tokens, K / ranks) -> (rows, tokens / ranks, K). A collective.

    `fused`: layers whose features lie one after another in K; a rank has its share of each.
    """
    ranks = dist.get_world_size(group)
    rows, tokens, features = x.shape
    sent = x.view(rows, ranks, tokens // ranks, features).movedim(1, 0).contiguous()
    parts = torch.empty_like(sent)
    dist.all_to_all_single(parts, sent, group=group)
    pieces = parts.view(*parts.shape[:3], fused, features // fused)
    return pieces.permute(1, 2, 3, 0, 4).reshape(rows, tokens // ranks, ranks * features)


def tokens_of_own_pairs(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of pairs_of_own_tokens() without `fused`. A collective."""
    ranks = dist.get_world_size(group)
    rows, tokens, features = x.shape
    sent = x.view(rows, tokens, ranks, features // ranks).movedim(2, 0).contiguous()
    parts = torch.empty_like(sent)
    dist.all_to_all_single(parts, sent, group=group)
    return parts.movedim(0, 1).reshape(rows, ranks * tokens, features // ranks)


class OwnRows(torch.autograd.Function):
    """(N, V / ranks) -> (ceil(N / ranks), V): every rank has all words of its share of the rows,
    zeros behind the last. A collective, backward too."""

    @staticmethod
    def forward(ctx: Any, x_NV: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.rows = group, len(x_NV)
        with unseen():
            return pairs_of_own_tokens(_padded(x_NV[None], dist.get_world_size(group)), group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with unseen():
            return tokens_of_own_pairs(grad[None].contiguous(), ctx.group)[0, : ctx.rows], None
