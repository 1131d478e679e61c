"""Embeddings as one operator with one gradient, which knows the weight: it may also be the head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mend.determinism.coverage import unseen
from mend.determinism.gemm import has_whole_chains
from mend.determinism.kernels import embedding_backward
from mend.determinism.layout import Layout, layout
from mend.determinism.linear import refuse_second_derivative, refuse_subclass
from mend.determinism.uses import slots_of
from mend.errors import NotDeterministic


class Embedding(torch.autograd.Function):
    """weight[words], and for each word a sum over the places it stands at."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, words: Tensor, padding: int) -> Tensor:
        with unseen():
            ctx.save_for_backward(words)
            ctx.layout, ctx.slots, ctx.vocabulary = layout(), slots_of(weight), weight.shape[0]
            ctx.padding, ctx.dtype = padding, weight.dtype
            return weight.index_select(0, words.reshape(-1)).view(*words.shape, weight.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx.layout)
        (words,) = ctx.saved_tensors
        with unseen():
            if grad.is_cuda and not has_whole_chains():
                dw = _on_gpu(words, grad, ctx.vocabulary, ctx.layout)
                if ctx.padding >= 0:
                    dw[ctx.padding] = 0
            else:
                dw = embedding_backward(grad, words, ctx.vocabulary, ctx.padding, False)
        if ctx.slots is not None:
            ctx.slots.put("embedding", dw)
            return None, None, None
        return dw, None, None


def _on_gpu(words: Tensor, grad: Tensor, vocabulary: int, at: Layout) -> Tensor:
    """(V, D) in fp32."""
    from mend.determinism import gpu_kernels
    from mend.determinism.gpu_products import leaves_of

    if not at.lengths and at.count and (not words.dim() or words.shape[0] % at.count):
        # Not of the batch, such as positions: what autograd has summed over rows already.
        words_LT, grad_LTD = words.reshape(1, -1), grad.reshape(1, -1, grad.shape[-1])
        made: Tensor = gpu_kernels.word_sums(words_LT, grad_LTD.contiguous(), vocabulary)
        return made
    words_LT = leaves_of(words[..., None], at)[..., 0]
    total: Tensor = gpu_kernels.word_sums(words_LT, leaves_of(grad, at), vocabulary)
    return total


def embedding(
    weight: Tensor,
    words: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """aten::embedding."""
    refuse_subclass("embedding", weight)
    if scale_grad_by_freq or sparse:
        raise NotDeterministic(
            "a sparse embedding, or one scaled by frequency, has no order at level shape",
            "use a plain one",
        )
    found: Tensor = Embedding.apply(weight, words, padding_idx)  # type: ignore[no-untyped-call]
    return found
