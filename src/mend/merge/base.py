"""merge: many deltas -> one, in the order given (ascending rack). Element-wise, so any blocking
gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Merge(Protocol):
    name: str

    def block(self, delta_N: Sequence[Tensor], weight: Sequence[float], out_N: Tensor) -> None:
        """out (fp32, N) = sum_m weight_m * delta_m, fp64 inside, two roundings per term, one cast
        at the end.

        Every weight is float32-representable, so each product is exact in fp64 (FMA or not).
        """
