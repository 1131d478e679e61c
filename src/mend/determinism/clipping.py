"""The norm of all gradients in one order, whole or sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mend.determinism.coverage import unseen
from mend.determinism.kernels import norms_by_rows, norms_of, squares_by_row
from mend.determinism.sharding import local_of, share_of, whole_of, whole_tensor


def clip_grad_norm(parameters: Iterable[Tensor], norm_max: float) -> Tensor:
    """Scale all gradients so that their 2-norm is at most `norm_max`; returns what it was.

    What torch.nn.utils.clip_grad_norm_ does, to the same bits at level shape. Where gradients are
    DTensors all ranks call it together: the sums of their rows go over the wire, and of gradients
    whose rows are cut the gradients.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    if not gradients:
        return torch.zeros(())
    local = [local_of(each) for each in gradients]
    squares = _squares(gradients)
    with unseen():
        norms = [
            norm.to(each.dtype) for norm, each in zip(norms_by_rows(squares), local, strict=True)
        ]
        total = norms_of([torch.stack(norms)])[0]
        factor = torch.clamp(norm_max / (total + 1e-6), max=1.0)
        torch._foreach_mul_(local, factor)
    return total


def _squares(gradients: list[Tensor]) -> list[Tensor]:
    """squares_by_row() of the whole gradients."""
    shares = {number: share_of(each) for number, each in enumerate(gradients)}
    here = {
        number: whole_tensor(gradients[number]) if share is None else share.local
        for number, share in shares.items()
        if share is None or share.has_rows
    }
    with unseen():
        found = dict(zip(here, squares_by_row(list(here.values())), strict=True))
        moved = {
            number: share.of_rows(found[number]) if number in found else share.wide()
            for number, share in shares.items()
            if share is not None
        }
        for number, whole in zip(moved, whole_of(list(moved.values())), strict=True):
            found[number] = whole.reshape(-1) if number in found else squares_by_row([whole])[0]
    return [found[number] for number in shares]
