"""Many deltas -> one, in the order given (ascending rack). The sum is element-wise; what a rule
needs from whole tensors comes from exact sums. So any blocking gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from mend.merge.gram import Gram


class Merge(Protocol):
    name: str

    def block(self, delta_N: Sequence[Tensor], weight: Sequence[float], out_N: Tensor) -> None:
        """out (fp32, N) = sum_m weight_m * delta_m, fp64 inside, two roundings per term, one cast
        at the end.

        Every weight is float32-representable, so each product is exact in fp64 (FMA or not).
        """


@runtime_checkable
class Measuring(Merge, Protocol):
    """A rule whose weights differ from tensor to tensor: `block` is given those of `factors`."""

    def measure(self, delta_N: Sequence[Tensor]) -> Gram:
        """The gram of one stretch of a tensor (fp32, N). Grams of stretches add up to that of the
        tensor."""

    def factors(self, gram: Gram, weight: Sequence[float]) -> tuple[float, ...]:
        """From the gram of the whole tensor: what `block` is to multiply each delta with.

        Float32-representable. Plain Python floats in fixed order: the same in every process.
        """
