"""The analytic line: the cost that a delay should have. Pure arithmetic.

A round takes L = D + X: the delay D of its latest transfer and the exchange X itself (encode, pull,
merge, digest, votes). Blocking, training waits L in every round. Concurrent, tau steps of t_step
hide it, and training waits for what is left: max(0, L - tau t_step), shared by the rounds that are
in flight at once. Source: the overlap of Streaming DiLoCo, 2501.18512, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from mend.transport.delayed import Distribution, quantile

POINTS = 2_000
"""Points of the midpoint rule over a delay's quantiles: errors below a per mille of the mean."""

USUAL = 0.95
"""Share of the rounds that an overlap should hide."""


def mean_over_rounds(
    mean_ms: float, distribution: Distribution, pulls: int, of: Callable[[float], float]
) -> float:
    """E[of(D)], where D is the latest of `pulls` independent delays: P(D < q(u^(1/pulls))) = u."""
    if distribution == "constant" or not mean_ms:
        return of(mean_ms)
    shares = ((point + 0.5) / POINTS for point in range(POINTS))
    delays = (quantile(mean_ms, distribution, share ** (1 / pulls)) for share in shares)
    return math.fsum(map(of, delays)) / POINTS


def usual_delay_ms(mean_ms: float, distribution: Distribution, pulls: int) -> float:
    """The delay that the latest transfer of a round stays below in USUAL of all rounds."""
    return quantile(mean_ms, distribution, USUAL ** (1 / pulls)) if mean_ms else 0.0


def covering_steps(round_ms: float, step_ms: float) -> int:
    """The least tau with tau * t_step >= round_ms."""
    return max(1, math.ceil(round_ms / step_ms))


def blocking_stall_ms(
    mean_ms: float, distribution: Distribution, pulls: int, exchange_ms: float
) -> float:
    """Per round: the whole of it."""
    return exchange_ms + mean_over_rounds(mean_ms, distribution, pulls, lambda delay: delay)


def concurrent_stall_ms(
    mean_ms: float,
    distribution: Distribution,
    pulls: int,
    exchange_ms: float,
    *,
    hidden_ms: float,
    in_flight: int,
) -> float:
    """Per round, for hidden_ms = tau * t_step. A wait for one round is time for all others that
    are in flight, so each pays its share; exact for constant delays, else an approximation."""
    left = mean_over_rounds(
        mean_ms, distribution, pulls, lambda delay: max(0.0, delay + exchange_ms - hidden_ms)
    )
    return left / in_flight


def rounds_in_flight(overlap_steps: int, gap_steps: int) -> int:
    """Apply points within tau steps of a capture, its own among them."""
    return max(1, math.ceil(overlap_steps / gap_steps))


def throughput_share(stall_ms: float, step_ms: float, gap_steps: int) -> float:
    """Return the share of the throughput without exchange, if every round costs stall_ms."""
    training_ms = gap_steps * step_ms
    return training_ms / (training_ms + stall_ms)
