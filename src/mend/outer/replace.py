"""The merged value itself, for fragments whose offers are values and no deltas."""

from __future__ import annotations

from fractions import Fraction

from torch import Tensor

from mend.outer.base import Rates


class Replace:
    """A' = what was merged; the anchor before it, and how much of a round it was, do not matter."""

    name = "replace"
    has_state = False

    def rates(self, rounds: Fraction, part: Fraction, *, plain: bool) -> Rates:
        return Rates(1.0, 0.0, 1.0, 1.0)

    def block(
        self,
        anchor_N: Tensor,
        state_N: Tensor | None,
        delta_N: Tensor,
        anchor_out_N: Tensor,
        state_out_N: Tensor | None,
        rates: Rates,
    ) -> None:
        anchor_out_N.copy_(delta_N)
