"""Cross-entropy over a vocabulary that is cut over ranks, to the bits of F.cross_entropy of the
whole. Moves tensors through torch.distributed."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mend.determinism.collectives import Gathered, all_gather, sum_over_shares
from mend.determinism.coverage import unseen
from mend.determinism.gpu_layers import Losses, reduced
from mend.determinism.gpu_parallel import OwnRows
from mend.determinism.gpu_products import refuse_without_kernels
from mend.determinism.kernels import MEAN, SUM
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
    ColumnParallel makes them; `targets`: (N), numbers of words of the whole vocabulary. On the CPU
    only sums and single numbers of each row go over the wire; on a GPU, where no sum is cut, a rank
    gets all words of its share of the rows. There a target that is not a word gives NaN, as in
    F.cross_entropy, and on the CPU raises.
    """
    refuse_other_levels("this loss")
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise UsageError(
            f"logits of shape {tuple(logits.shape)} and targets of {tuple(targets.shape)}; "
            "flatten them to (N, words of this rank) and (N)"
        )
    if logits.is_cuda:
        return _on_gpu(logits, targets, group, reduction, ignore_index)
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


def _on_gpu(
    logits: Tensor,
    target_N: Tensor,
    group: dist.ProcessGroup | None,
    reduction: str,
    ignored: int,
) -> Tensor:
    refuse_without_kernels()
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    mine: Tensor = OwnRows.apply(logits, group)  # type: ignore[no-untyped-call]
    padded = torch.nn.functional.pad(target_N, (0, -len(target_N) % ranks), value=ignored)
    losses: Tensor = Losses.apply(mine, padded.chunk(ranks)[rank], ignored)  # type: ignore[no-untyped-call]
    whole: Tensor = Gathered.apply(losses, group, 0)  # type: ignore[no-untyped-call]
    losses = whole[: len(target_N)]
    if reduction == "none":
        return losses
    return reduced(losses, target_N, MEAN if reduction == "mean" else SUM, ignored)


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
