"""Moves the parameters of a rank to a new anchor. Element-wise fp32 on the training thread; uses no
peers, clocks or files.

Legend: N elements of the span, n elements of a block.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from mend.errors import ConfigError, ensure

ApplyMode = Literal["carry", "overwrite", "blend"]
_BLOCK = 1 << 18
"""Elements per torch call and thread: scratch that stays in its cache."""


def realign(
    theta_N: Tensor,
    anchor_N: Tensor,
    delta_N: Tensor | None,
    next_N: Tensor,
    apply_mode: ApplyMode,
    alpha: float,
    out_N: Tensor,
) -> None:
    """Write the parameters that go with the anchor `next_N` to `out_N`, which may be `theta_N`
    itself. All fp32, N.

    anchor_N: the anchor this rack applied last. delta_N: its open offer, anchor - snapshot at
    capture, if one of the commits since then names it; None if not. Each line below is evaluated as
    written, every operation rounded:

      not named   next + (theta - anchor)
      carry       next + (theta - (anchor - delta))
      overwrite   next
      blend       next + alpha * (theta - next)
    """
    if apply_mode not in get_args(ApplyMode):
        rule = f"must be one of {get_args(ApplyMode)}"
        raise ConfigError("apply_mode", apply_mode, rule, "carry loses nothing.")
    numel = out_N.numel()
    given = (theta_N, anchor_N, next_N) if delta_N is None else (theta_N, anchor_N, next_N, delta_N)
    numels = [vector_N.numel() for vector_N in given]
    ensure(set(numels) == {numel}, "vectors of different length", numels=numels, out=numel)
    if delta_N is not None and apply_mode == "overwrite":
        out_N.copy_(next_N)
        return
    size = _BLOCK * torch.get_num_threads()
    scratch_n = torch.empty(min(size, numel), dtype=torch.float32, device="cpu")
    for start in range(0, numel, size):
        part = slice(start, min(start + size, numel))
        drift = scratch_n[: part.stop - part.start]
        if delta_N is None:
            torch.sub(theta_N[part], anchor_N[part], out=drift)
        elif apply_mode == "carry":
            torch.sub(anchor_N[part], delta_N[part], out=drift)
            torch.sub(theta_N[part], drift, out=drift)
        else:
            torch.sub(theta_N[part], next_N[part], out=drift)
            drift.mul_(alpha)  # torch rounds alpha to fp32 first
        torch.add(next_N[part], drift, out=out_N[part])
