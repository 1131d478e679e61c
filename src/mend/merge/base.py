"""The interface of merge rules: they combine deltas in the order given (ascending rack).

The sum is element-wise, and what a rule needs from whole tensors comes from exact sums. So any
division into blocks gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from mend.merge.gram import Gram


class Merge(Protocol):
    name: str

    def block(self, delta_N: Sequence[Tensor], weight: Sequence[float], out_N: Tensor) -> None:
        """out (fp32, N) = sum_m weight_m * delta_m, computed in fp64 with two roundings per term,
        and rounded to fp32 at the end.

        Every weight is float32-representable, so each product is exact in fp64 (FMA or not).
        """


@runtime_checkable
class Measuring(Merge, Protocol):
    """A rule whose weights differ between tensors: `block` gets those of `factors`."""

    def measure(self, delta_N: Sequence[Tensor]) -> Gram:
        """The Gram matrix of a contiguous part of a tensor (fp32, N). Those of all parts add up to
        that of the tensor."""

    def factors(self, gram: Gram, weight: Sequence[float]) -> tuple[float, ...]:
        """The weight of each delta for `block`, from the Gram matrix of the whole tensor.

        The weights are float32-representable, and computed from Python floats in a fixed order, so
        they are the same in every process.
        """
