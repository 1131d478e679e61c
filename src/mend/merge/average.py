"""merge.average: the weighted mean. Element-wise, in the order given; never peers, clocks, files.

Legend: N elements of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Average:
    """sum_m weight_m * delta_m. The weights sum to one already: shares, made by the protocol."""

    name = "mean"

    def __init__(self) -> None:
        # fp64 scratch, one pair per worker that is at it: fresh memory for every block would cost
        # more than the sums. list.pop and append are atomic, so workers may share an Average.
        self._idle: list[tuple[Tensor, Tensor]] = []

    def block(self, delta_N: Sequence[Tensor], weight: Sequence[float], out_N: Tensor) -> None:
        assert len(delta_N) == len(weight) > 0, f"{len(delta_N)} deltas for {len(weight)} weights"
        scratch = self._scratch(out_N.numel())
        sum_N, wide_N = (room[: out_N.numel()] for room in scratch)
        sum_N.copy_(delta_N[0]).mul_(weight[0])
        for delta, share in zip(delta_N[1:], weight[1:], strict=True):
            # `alpha` may be fused with the addition on some machines and not on others. Both give
            # the same bits: a float32 times a float32-representable weight is exact in fp64.
            sum_N.add_(wide_N.copy_(delta), alpha=share)
        out_N.copy_(sum_N)
        self._idle.append(scratch)

    def _scratch(self, numel: int) -> tuple[Tensor, Tensor]:
        try:
            scratch = self._idle.pop()
        except IndexError:
            scratch = (torch.empty(0), torch.empty(0))
        if scratch[0].numel() < numel:
            scratch = (
                torch.empty(numel, dtype=torch.float64),
                torch.empty(numel, dtype=torch.float64),
            )
        return scratch
