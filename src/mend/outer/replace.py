"""Moves the anchor to the merged value, completely or in part, for fragments whose offers are
values and not deltas."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from mend.outer.base import Rates


class Replace:
    """A' = A + s (M - A), where M is the merged value and s the fraction of the racks that it is of
    (`Numerics.rates` sets it as lr), so that one rack does not replace the average of all. If all
    racks are in it, A' = M. Every product and sum is rounded to fp32."""

    name = "replace"
    states = ()

    def rates(self, rounds: Fraction, part: Fraction, *, plain: bool) -> Rates:
        return Rates(1.0)

    def block(
        self,
        anchor_N: Tensor,
        states_N: Sequence[Tensor],
        delta_N: Tensor,
        anchor_out_N: Tensor,
        states_out_N: Sequence[Tensor],
        rates: Rates,
    ) -> None:
        if rates.lr == 1.0:
            anchor_out_N.copy_(delta_N)
        else:
            torch.sub(delta_N, anchor_N, out=anchor_out_N).mul_(rates.lr).add_(anchor_N)
