"""Anchor + merged delta -> next anchor. Element-wise fp32, multiply and add as two roundings."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple, Protocol

from torch import Tensor


class Rates(NamedTuple):
    """Of one round's step; all are fp32."""

    lr: float
    momentum: float
    decay: float
    """What is left of the momentum's vector."""
    share: float
    """How much of the merged delta is added to it."""


class OuterOptimizer(Protocol):
    name: str

    @property
    def has_state(self) -> bool:
        """Whether one fp32 momentum vector per anchor is kept."""

    def rates(self, rounds: Fraction, part: Fraction, *, plain: bool) -> Rates:
        """Of the step of a fragment that has merged `rounds` before, by a merge that is `part` of a
        round, at most 1. `plain`: it is to be the mean of what the racks hold, as one rack is in it
        and no other trains, or as nothing is trained behind it."""

    def block(
        self,
        anchor_N: Tensor,
        state_N: Tensor | None,
        delta_N: Tensor,
        anchor_out_N: Tensor,
        state_out_N: Tensor | None,
        rates: Rates,
    ) -> None:
        """Write the next anchor (and state). Inputs are left as they are; delta_N may be used as
        scratch."""
