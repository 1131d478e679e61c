"""Bayesian online change-point detection (Adams and MacKay, arXiv 0710.3742).

A *run* is the stretch of samples since the last change. The detector keeps, for every length that
the current run may have, its probability and a Normal-inverse-gamma posterior of its level. A
sample that fits no run begins a new one. Unlike in the paper, the first sample of a run counts as
one of it, so that a sharp change shows in the sample in which it happens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

PRIOR_KAPPA = 0.01
"""Weight of the prior level, in samples: a new run may lie anywhere within a factor of about
1.6."""

PRIOR_ALPHA = 2.0
"""Half the weight of the prior spread, in samples."""

PRIOR_SIGMA = 0.05
"""Prior standard deviation inside a run, of log step time."""

RUNS_MAX = 16
"""The most probable run lengths that are kept; their number bounds the work per sample."""


@dataclass(slots=True)
class ChangePoints:
    """`hazard`: probability of a change per sample. `length_max`: longest run that is
    distinguished; a longer one counts as that long and forgets its oldest samples."""

    hazard: float
    length_max: int
    lengths: list[int] = field(default_factory=list)
    """Ascending; the other lists have one entry per length."""
    probabilities: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    betas: list[float] = field(default_factory=list)
    count: int = 0
    """Samples so far."""
    _norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        alphas = [PRIOR_ALPHA + n / 2 for n in range(self.length_max + 1)]
        self._norms = [
            math.exp(math.lgamma(alpha + 0.5) - math.lgamma(alpha)) / math.sqrt(math.pi)
            for alpha in alphas
        ]

    def observe(self, x: float, prior_mean: float) -> None:
        """Take one sample. `prior_mean`: where a new run is expected to lie."""
        self.count += 1
        beta = PRIOR_ALPHA * PRIOR_SIGMA**2
        born = self.hazard * self._density(x, 0, prior_mean, beta) if self.lengths else 1.0
        lengths, weights, means, betas = [1], [born], [0.0], [0.0]
        means[0], betas[0] = _absorb(x, PRIOR_KAPPA, prior_mean, beta)
        stay, longest = 1.0 - self.hazard, self.length_max
        for n, p, mean, beta in zip(
            self.lengths, self.probabilities, self.means, self.betas, strict=True
        ):
            weight = p * stay * self._density(x, n, mean, beta)
            kappa = PRIOR_KAPPA + n
            mean, beta = _absorb(x, kappa, mean, beta)
            if n == longest:
                beta *= longest / (longest + 1)
                if lengths[-1] == longest:
                    if weight > weights[-1]:
                        means[-1], betas[-1] = mean, beta
                    weights[-1] += weight
                    continue
            lengths.append(min(n + 1, longest))
            weights.append(weight)
            means.append(mean)
            betas.append(beta)
        self._keep(lengths, weights, means, betas)

    def changed_within(self, samples: int) -> float:
        """Probability that the level changed, and the current run has at most so many samples."""
        pairs = zip(self.lengths, self.probabilities, strict=True)
        return min(sum(p for n, p in pairs if n <= samples and n < self.count), 1.0)

    def likeliest_length(self, samples: int) -> int:
        """Length of the likeliest run of at most so many samples; 0: none is left."""
        pairs = zip(self.probabilities, self.lengths, strict=True)
        return max((pair for pair in pairs if pair[1] <= samples), default=(0.0, 0))[1]

    def _density(self, x: float, n: int, mean: float, beta: float) -> float:
        """Density of the next sample of a run of n: a Student t."""
        kappa = PRIOR_KAPPA + n
        q = 2 * beta * (kappa + 1) / kappa
        d = x - mean
        power = -(PRIOR_ALPHA + n / 2 + 0.5)
        return self._norms[n] / math.sqrt(q) * math.pow(1.0 + d * d / q, power)

    def _keep(
        self, lengths: list[int], weights: list[float], means: list[float], betas: list[float]
    ) -> None:
        kept: Sequence[int] = range(len(weights))
        if len(weights) > RUNS_MAX:
            likely = sorted(kept, key=lambda i: (-weights[i], lengths[i]))
            kept = sorted(likely[:RUNS_MAX])
        total = sum(weights[i] for i in kept)
        if total <= 0.0:  # no run explains it, so a new one begins
            kept, weights, total = range(1), [1.0], 1.0
        self.lengths = [lengths[i] for i in kept]
        self.probabilities = [weights[i] / total for i in kept]
        self.means = [means[i] for i in kept]
        self.betas = [betas[i] for i in kept]


def _absorb(x: float, kappa: float, mean: float, beta: float) -> tuple[float, float]:
    """Posterior (mean, beta) after one more sample."""
    d = x - mean
    return mean + d / (kappa + 1), beta + kappa * d * d / (2 * (kappa + 1))
