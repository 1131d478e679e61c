"""Cross-entropy over a vocabulary that is cut over ranks, to the bits of F.cross_entropy of the
whole. Moves tensors through torch.distributed."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mend.determinism.collectives import all_gather, sum_over_shares
from mend.determinism.coverage import unseen
from mend.determinism.layout import layout
from mend.determinism.linear import refuse_second_derivative
from mend.determinism.tensor_parallel import refuse_other_levels
from mend.errors import UsageError


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """F.cross_entropy(whole, targets), on every rank. A collective, backward too.

    `logits`: (N, V / ranks), this rank's share of the words in rank order, as a head that is cut by
    ColumnParallel makes them; `targets`: (N), numbers of words of the whole vocabulary. Only sums
    and single numbers of each row go over the wire.
    """
    refuse_other_levels("this loss")
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise UsageError(
            f"logits of shape {tuple(logits.shape)} and targets of {tuple(targets.shape)}; "
            "flatten them to (N, words of this rank) and (N)"
        )
    kept, words = targets != ignore_index, logits.shape[1] * dist.get_world_size(group)
    if bool((kept & ((targets < 0) | (targets >= words))).any()):
        raise UsageError(
            f"targets has words outside of 0 to {words - 1} that are not ignore_index="
            f"{ignore_index}; correct them"
        )
    target_N = targets.where(kept, 0)
    losses: Tensor = _TargetLoss.apply(logits, target_N, group)  # type: ignore[no-untyped-call]
    losses = torch.where(kept, losses, 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / kept.to(losses.dtype).sum() if reduction == "mean" else total


class _TargetLoss(torch.autograd.Function):
    """(N): minus the logarithm of softmax at the target."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target_N: Tensor, group: dist.ProcessGroup | None
    ) -> Tensor:
        with unseen():
            words = logits.shape[1]
            local_N = target_N - dist.get_rank(group) * words
            mine_N = (local_N >= 0) & (local_N < words)
            index_N1 = local_N.where(mine_N, 0)[:, None]
            wide = logits.float()
            highest = all_gather(wide.amax(1, True), group, 1).amax(1, True)
            away = wide - highest
            log = (away - sum_over_shares(away.exp(), 1, group).log().unsqueeze(1)).to(logits.dtype)
            # One rank has the target: the others' zeros change no bit.
            at_target = log.gather(1, index_N1)[:, 0].where(mine_N, 0.0)
            found = all_gather(at_target[None], group).sum(0)
        ctx.save_for_backward(log, index_N1, mine_N)
        ctx.layout = layout()
        return -found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative(ctx.layout)
        log, index_N1, mine_N = ctx.saved_tensors
        with unseen():
            down = -grad.float()[:, None]
            at_target = torch.zeros_like(log, dtype=torch.float32)
            at_target.scatter_(1, index_N1, down.where(mine_N[:, None], 0.0))
            return (at_target - log.float().exp() * down).to(log.dtype), None, None
