"""A lane that is late on purpose. Draws the delay from the key; moves no byte."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal, Protocol

from mend.errors import ConfigError
from mend.transport.base import Lane
from mend.types import SECOND, Address, Extent, without_incarnation

Distribution = Literal["constant", "bimodal", "long_tail"]

COEFFICIENT_OF_VARIATION = 0.29
"""Standard deviation over mean, of both random distributions."""

_LOG_VARIANCE = math.log1p(COEFFICIENT_OF_VARIATION**2)


class CountedLane(Lane, Protocol):
    """A lane that says where it listens and how much it moved."""

    @property
    def address(self) -> Address: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...


def delay_ns(mean_ns: int, distribution: Distribution, seed: int, key: bytes) -> int:
    """The delay of one payload: the same for the same seed and key, also in a later run of the
    job. Drawn as `quantile` of a uniform number that is hashed from both."""
    if distribution == "constant":
        return mean_ns
    named = seed.to_bytes(16, "big", signed=True) + without_incarnation(key)
    draw = int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "big")
    uniform = ((draw >> 12) + 0.5) / 2**52  # 52 bits, so that neither 0 nor 1 can come out
    return round(quantile(mean_ns, distribution, uniform))


def quantile(mean: float, distribution: Distribution, uniform: float) -> float:
    """What a share of `uniform` (above 0, below 1) of all delays stays below; unit of the mean.

    constant: the mean. bimodal: mean (1 - c) or mean (1 + c), each half of the time; the mean is
    exact and the standard deviation is c mean. long_tail: lognormal; with s^2 = ln(1 + c^2) and m =
    ln(mean) - s^2 / 2 its mean is exp(m + s^2 / 2) = mean, and its squared coefficient of variation
    exp(s^2) - 1 = c^2.
    """
    if distribution == "constant":
        return mean
    if distribution == "bimodal":
        sign = -1 if uniform < 0.5 else 1
        return mean * (1 + sign * COEFFICIENT_OF_VARIATION)
    normal = NormalDist().inv_cdf(uniform)
    return mean * math.exp(math.sqrt(_LOG_VARIANCE) * normal - _LOG_VARIANCE / 2)


class DelayedLane:
    """`inner`, but each fetch ends later than it would by a delay drawn from its key (`delay_ns`).

    Offers and state copies are both delayed. The bytes are in `into` before the delay: it is the
    news that is late.
    """

    def __init__(
        self, inner: CountedLane, mean_ns: int, distribution: Distribution, seed: int
    ) -> None:
        if mean_ns < 0:
            raise ConfigError("mean_ns", mean_ns, "must not be negative", "Use 0 for no delay.")
        if distribution not in ("constant", "bimodal", "long_tail"):
            remedy = "Use constant, bimodal or long_tail."
            raise ConfigError("distribution", distribution, "unknown", remedy)
        self._inner = inner
        self._mean_ns = mean_ns
        self._distribution: Distribution = distribution
        self._seed = seed

    @property
    def address(self) -> Address:
        """Where the inner lane listens."""
        return self._inner.address

    @property
    def bytes_sent(self) -> int:
        """Of the inner lane."""
        return self._inner.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Of the inner lane."""
        return self._inner.bytes_received

    def serve(self, key: bytes, view: memoryview) -> None:
        """Not delayed: see the inner lane."""
        self._inner.serve(key, view)

    def drop(self, key: bytes) -> None:
        """Not delayed: see the inner lane."""
        self._inner.drop(key)

    async def fetch(
        self,
        holders: Sequence[Address],
        key: bytes,
        checksum: str,
        into: memoryview,
        extent: Extent | None = None,
    ) -> None:
        """The inner fetch, then the delay. A failure is not delayed."""
        await self._inner.fetch(holders, key, checksum, into, extent)
        await asyncio.sleep(delay_ns(self._mean_ns, self._distribution, self._seed, key) / SECOND)

    def close(self) -> None:
        """Close the inner lane."""
        self._inner.close()
