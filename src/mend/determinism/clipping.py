"""The norm of all gradients in one order, whole or sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mend.determinism.coverage import unseen
from mend.determinism.digests import whole_tensor
from mend.determinism.kernels import norms_by_rows, norms_of, squares_by_row


def clip_grad_norm(parameters: Iterable[Tensor], norm_max: float) -> Tensor:
    """Scale all gradients so that their 2-norm is at most `norm_max`; returns what it was.

    What torch.nn.utils.clip_grad_norm_ does, to the same bits at level shape. A gradient that is a
    DTensor is gathered for its norm, one at a time: all ranks call it together.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    if not gradients:
        return torch.zeros(())
    local = [getattr(each, "to_local", lambda whole=each: whole)() for each in gradients]
    squares = []
    for some in _apart(gradients):
        whole = [whole_tensor(gradient) for gradient in some]
        with unseen():
            squares += squares_by_row(whole)
    with unseen():
        norms = [
            norm.to(each.dtype) for norm, each in zip(norms_by_rows(squares), local, strict=True)
        ]
        total = norms_of([torch.stack(norms)])[0]
        factor = torch.clamp(norm_max / (total + 1e-6), max=1.0)
        torch._foreach_mul_(local, factor)
    return total


def _apart(gradients: list[Tensor]) -> list[list[Tensor]]:
    """All together, or one by one where each is to be gathered."""
    sharded = any(hasattr(each, "to_local") for each in gradients)
    return [[each] for each in gradients] if sharded else [gradients]
