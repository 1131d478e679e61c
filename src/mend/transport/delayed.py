"""A bulk lane with a simulated delay, drawn from the key of each payload."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, get_args

from mend.errors import ConfigError
from mend.transport.bulk_client import BulkLane
from mend.types import SECOND, Address, Extent, Meter, without_incarnation

Distribution = Literal["constant", "bimodal", "long_tail"]

COEFFICIENT_OF_VARIATION = 0.29
"""Standard deviation over mean, of both random distributions."""

_LOG_VARIANCE = math.log1p(COEFFICIENT_OF_VARIATION**2)


def delay_ns(mean_ns: int, distribution: Distribution, seed: int, key: bytes) -> int:
    """The delay of one payload. It depends on seed and key only, also across runs of the job: the
    `quantile` of a uniform number that is hashed from both."""
    if distribution == "constant":
        return mean_ns
    named = seed.to_bytes(16, "big", signed=True) + without_incarnation(key)
    draw = int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "big")
    uniform = ((draw >> 12) + 0.5) / 2**52  # 52 bits, so that neither 0 nor 1 can come out
    return round(quantile(mean_ns, distribution, uniform))


def quantile(mean: float, distribution: Distribution, uniform: float) -> float:
    """The quantile `uniform` (above 0, below 1) of the delays, in the unit of the mean.

    constant: the mean. bimodal: mean (1 - c) or mean (1 + c) with probability 1/2 each, so the mean
    is exact and the standard deviation is c times the mean. long_tail: lognormal. With s^2 =
    ln(1 + c^2) and m = ln(mean) - s^2 / 2, its mean is exp(m + s^2 / 2) = mean, and its squared
    coefficient of variation is exp(s^2) - 1 = c^2.
    """
    if distribution == "constant":
        return mean
    if distribution == "bimodal":
        sign = -1 if uniform < 0.5 else 1
        return mean * (1 + sign * COEFFICIENT_OF_VARIATION)
    normal = NormalDist().inv_cdf(uniform)
    return mean * math.exp(math.sqrt(_LOG_VARIANCE) * normal - _LOG_VARIANCE / 2)


@dataclass(frozen=True, slots=True)
class Delay:
    """The distribution of the delays. Raises ConfigError for a value that cannot work."""

    mean_ns: int
    distribution: Distribution
    seed: int

    def __post_init__(self) -> None:
        if self.mean_ns < 0:
            remedy = "Use 0 for no delay."
            raise ConfigError("mean_ns", self.mean_ns, "must not be negative", remedy)
        if self.distribution not in get_args(Distribution):
            remedy = "Use constant, bimodal or long_tail."
            raise ConfigError("distribution", self.distribution, "unknown", remedy)

    def of(self, key: bytes) -> int:
        return delay_ns(self.mean_ns, self.distribution, self.seed, key)


class DelayedLane(BulkLane):
    """A lane whose fetches end later, by a delay drawn from their keys.

    Offers and copies of states are both delayed. The bytes are in `into` before the delay; only the
    return of `fetch` is delayed.
    """

    def __init__(self, delay: Delay, *where: Any, **how: Any) -> None:
        self._delay = delay
        super().__init__(*where, **how)

    async def fetch(
        self,
        holders: Sequence[Address],
        key: bytes,
        checksum: str | None,
        into: memoryview,
        extent: Extent | None = None,
        meter: Meter | None = None,
    ) -> None:
        """A failure is not delayed."""
        await super().fetch(holders, key, checksum, into, extent, meter)
        await asyncio.sleep(self._delay.of(key) / SECOND)
