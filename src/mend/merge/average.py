"""The weighted mean. Element-wise, in the order given. Uses no peers, clocks or files.

Legend: N elements of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mend.errors import ensure


class Average:
    """sum_m weight_m * delta_m. The weights come from the log and sum to about one."""

    name = "mean"

    def __init__(self) -> None:
        # fp64 scratch, one pair per busy worker: fresh memory for every block would cost more than
        # the sums. list.pop and append are atomic, so workers may share an Average.
        self._idle: list[tuple[Tensor, Tensor]] = []

    def block(self, delta_N: Sequence[Tensor], weight: Sequence[float], out_N: Tensor) -> None:
        right = len(delta_N) == len(weight) > 0
        ensure(right, "not one weight per delta", deltas=len(delta_N), weights=weight)
        if tuple(weight) == (0.5, 0.5) and _half_of_sum(delta_N[0], delta_N[1], out_N):
            return
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
            scratch = (torch.empty(0, dtype=torch.float64, device="cpu"),) * 2
        if scratch[0].numel() < numel:
            sum_N, wide_N = torch.empty(2, numel, dtype=torch.float64, device="cpu").unbind()
            scratch = sum_N, wide_N
        return scratch


class Made:
    """Passes on a single delta that was merged elsewhere."""

    name = "made"

    def block(self, delta_N: Sequence[Tensor], weight: Sequence[float], out_N: Tensor) -> None:
        ensure(len(delta_N) == 1, "the deltas are not merged yet", deltas=len(delta_N))
        out_N.copy_(delta_N[0])


def _half_of_sum(first_N: Tensor, second_N: Tensor, out_N: Tensor) -> bool:
    """Write fl32((a + b) / 2): the same bits for two racks of equal weight, in a third of the time.

    fp64 has more than twice the digits of fp32, so rounding a sum to fp64 and then to fp32 gives
    the same as rounding it to fp32 (Figueroa 1995). Halving is exact, except for a sum below
    2^-125; then both ways round the exact a + b once. Only if a + b exceeds the range of fp32 and
    its half does not, the bits differ: then it returns False, and `out_N` has to be written again.
    """
    torch.add(first_N, second_N, out=out_N)
    out_N.mul_(0.5)
    # Infinity and NaN survive every product and addition. A square may overflow although the number
    # does not; then the caller computes the same bits again.
    return math.isfinite(out_N.dot(out_N).item())
