"""outer: anchor + merged delta -> next anchor. Element-wise fp32, multiply and add as two
roundings."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Rates(NamedTuple):
    """Of one round's step; both are fp32."""

    lr: float
    momentum: float


class OuterOptimizer(Protocol):
    name: str

    @property
    def has_state(self) -> bool:
        """Whether one fp32 momentum vector per anchor is kept."""

    def rates(self, rounds: int) -> Rates:
        """Of the step of a fragment that has merged `rounds` before."""

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
