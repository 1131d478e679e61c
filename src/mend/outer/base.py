"""Anchor + merged delta -> next anchor. Element-wise fp32, multiply and add as two roundings."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

from torch import Tensor


class Rates(NamedTuple):
    """Of one round's step; all are fp32."""

    lr: float
    momentum: float = 0.0
    """Shown in events and reports."""
    decay: float = 1.0
    """Factor of the momentum's vector."""
    share: float = 1.0
    """Factor of the merged delta that is added to it."""
    more: tuple[float, ...] = ()
    """Further numbers for `block`."""
    stretch: float = 1.0
    """How much longer the merged delta should be, as racks that made unequal numbers of steps are
    in it; at least 1. mend sets it after `rates`; `block` may use it or not."""


class OuterOptimizer(Protocol):
    """One instance serves all fragments and several threads, so it keeps nothing from call to call:
    what a step hands on to the next is in the state vectors.

    Equal inputs give equal bits on every machine, wherever a vector is cut into blocks: element by
    element, every product and sum rounded to fp32 by itself, no library function whose last bit
    differs between processors.
    """

    name: str

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the fp32 vectors that an anchor has beside its values, as long as these and zero
        at first. They have the anchor's version, are in its digest, and travel with it to racks
        that join and into checkpoints."""

    def rates(self, rounds: Fraction, part: Fraction, *, plain: bool) -> Rates:
        """Of the step of a fragment that has merged `rounds` before, by a merge that is `part` of a
        round, at most 1. `plain`: it is to be the mean of what the racks hold, as one rack is in it
        and no other trains, or as no training follows."""

    def block(
        self,
        anchor_N: Tensor,
        states_N: Sequence[Tensor],
        delta_N: Tensor,
        anchor_out_N: Tensor,
        states_out_N: Sequence[Tensor],
        rates: Rates,
    ) -> None:
        """Write all of the next anchor and of its states, which are in the order of `states`.
        Inputs are left as they are; delta_N may be used as scratch. Outputs overlap no input."""
