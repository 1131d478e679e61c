"""The interface of outer optimizers. They work element by element in fp32, and round every product
and every sum."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

from torch import Tensor


class Rates(NamedTuple):
    """The numbers of one outer step; all are fp32."""

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
    """Factor that corrects the length of the merged delta of racks that made unequal numbers of
    steps; at least 1. mend sets it after `rates`. `block` may ignore it."""


class OuterOptimizer(Protocol):
    """One instance serves all fragments and several threads, so it must not keep anything between
    calls: what a step passes on to the next is in the state vectors.

    Equal inputs must give equal bits on every machine, wherever a vector is divided into blocks. So
    it works element by element, rounds every product and sum to fp32, and calls no library function
    whose last bit differs between processors.
    """

    name: str

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the fp32 vectors that an anchor has besides its values. They have the length of
        the values and begin with zeros. They belong to the anchor's version and digest, and go with
        it to joining racks and into checkpoints."""

    def rates(self, rounds: Fraction, part: Fraction, *, plain: bool) -> Rates:
        """The rates of a step, for a fragment that has merged `rounds` before and a merge that
        counts as `part` of a round, at most 1. `plain`: the result must be the mean of what the
        racks hold, because only one rack trains, or no training follows."""

    def block(
        self,
        anchor_N: Tensor,
        states_N: Sequence[Tensor],
        delta_N: Tensor,
        anchor_out_N: Tensor,
        states_out_N: Sequence[Tensor],
        rates: Rates,
    ) -> None:
        """Write the whole next anchor and its states, in the order of `states`. Must not change its
        inputs, except that delta_N may be used as scratch. Outputs do not overlap inputs."""
