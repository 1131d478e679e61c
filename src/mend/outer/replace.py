"""The merged value itself, for fragments whose offers are values and no deltas."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from torch import Tensor

from mend.outer.base import Rates


class Replace:
    """A' = what was merged; the anchor before it, and how much of a round it was, do not matter."""

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
        anchor_out_N.copy_(delta_N)
