"""The norm of all gradients in one order, whole or sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mend.determinism.digests import whole_tensor
from mend.determinism.kernels import vector_norm


def clip_grad_norm(parameters: Iterable[Tensor], norm_max: float) -> Tensor:
    """Scale all gradients so that their 2-norm is at most `norm_max`; returns what it was.

    What torch.nn.utils.clip_grad_norm_ does, to the same bits at level shape. A gradient that is a
    DTensor is gathered for its norm, one at a time: all ranks call it together.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = [vector_norm(whole_tensor(gradient)) for gradient in gradients]
    total = vector_norm(torch.stack(norms))
    factor = torch.clamp(norm_max / (total + 1e-6), max=1.0)
    for gradient in gradients:
        local: Tensor = getattr(gradient, "to_local", lambda whole=gradient: whole)()
        local.mul_(factor)
    return total
