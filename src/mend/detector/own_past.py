"""Compares a rank with its own past.

Bayesian change-point detection proposes a change of step time per token. It is verified if more
than half of the newest samples, and of the newest run, are more than 10 % off. Without verification
a few slow steps in a row would count as a slowdown (FALCON, arXiv 2410.12588). Relief needs more
than half of the newest samples.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from mend.detector.change_point import PRIOR_SIGMA, ChangePoints

SHIFT_MIN = 0.10
"""A slowdown of steps: |before - after| / max is above it. Half of it counts as relief."""

SIGMA_MIN = 0.01
"""Least standard deviation of log step time; clock and scheduler are no more precise."""

HORIZON = 3
"""A proposed change may be verified within this many times `samples_min` samples."""

HAZARD_WINDOWS = 4
"""Expected windows between two changes (prior)."""

PAST_WINDOWS = 3
"""Windows of its own past that a rank is compared with."""

PAST_EVERY = 8
"""Samples between two updates of the past's level, which moves slowly."""

_MAD_TO_SIGMA = 1.4826
_MEDIAN_TO_MEAN = 1.2533
"""Standard error of a median over that of a mean, for a normal distribution."""


@dataclass(frozen=True, slots=True)
class DetectorOptions:
    """`window`: samples that the speed is judged by; the prior expects a change every four of them,
    and three of them are the past. `zscore`: a sample so many standard deviations out is an outlier
    and is cut to that distance; a change is proposed when its probability exceeds that of lying
    inside (3.0: 99.7 %). `samples_min`: fewest samples on either side of a change. `validates`: a
    verdict is followed by a micro-benchmark that finds its cause. `shift_min`: a change is |before
    - after| / max above it; half of it counts as relief."""

    window: int = 64
    zscore: float = 3.0
    samples_min: int = 8
    validates: bool = False
    shift_min: float = SHIFT_MIN

    @property
    def lately(self) -> int:
        """Samples within which a proposed change may be verified."""
        return HORIZON * self.samples_min

    @property
    def probability_min(self) -> float:
        return math.erf(self.zscore / math.sqrt(2))


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A verdict. `since`: the sample number, from 0, at which it began; `ratio`: step time per
    token over that of the past; `probability`: that there was a change, when it was found."""

    since: int
    ratio: float
    probability: float


@dataclass(frozen=True, slots=True)
class MeasuredPace:
    """`time` per token, of one step; 0: unknown. `margin`: its uncertainty, as a fraction: `zscore`
    standard errors."""

    time: float
    margin: float


@dataclass(slots=True)
class OwnPast:
    """State of one rank. `observe` returns whether the verdict changed; `slowdown` is the verdict
    in force, None while the rank is as fast as it was."""

    options: DetectorOptions = field(default_factory=DetectorOptions)
    slowdown: Slowdown | None = None
    count: int = 0
    _points: ChangePoints = field(init=False)
    _past: deque[float] = field(init=False)
    _recent: deque[float] = field(init=False)
    _level: float = 0.0
    _sigma: float = 0.0

    def __post_init__(self) -> None:
        options = self.options
        self._points = ChangePoints(
            hazard=1 / (HAZARD_WINDOWS * options.window), length_max=PAST_WINDOWS * options.window
        )
        self._past = deque(maxlen=PAST_WINDOWS * options.window)
        self._recent = deque(maxlen=options.samples_min)

    def observe(self, time: float) -> bool:
        """`time`: of one step, per token; any unit, above 0."""
        x, options = math.log(time), self.options
        leaving = self._recent[0] if len(self._recent) == options.samples_min else None
        self._recent.append(x)
        self.count += 1
        if leaving is not None and self.slowdown is None:
            self._past.append(leaving)
            if self.count % PAST_EVERY == 0 or len(self._past) <= options.samples_min:
                self._level, self._sigma = _level_and_sigma(self._past)
        known = len(self._past) >= options.samples_min
        level = self._level if known else median(self._recent)
        if known:
            reach = options.zscore * max(self._sigma, PRIOR_SIGMA)
            self._points.observe(min(max(x, level - reach), level + reach), level)
        else:
            self._points.observe(x, level)
            return False
        return self._judge()

    @property
    def proposed(self) -> float:
        """Probability that the level changed lately, before any verification."""
        return self._points.changed_within(self.options.lately)

    @property
    def pace(self) -> MeasuredPace:
        """The pace of the newest samples; unknown before there are enough."""
        samples, recent = self.options.samples_min, self._recent
        if len(recent) < samples:
            return MeasuredPace(0.0, 0.0)
        sigma = self._sigma if self._past else _level_and_sigma(recent)[1]
        error = _MEDIAN_TO_MEAN * sigma / math.sqrt(samples)
        return MeasuredPace(math.exp(median(recent)), self.options.zscore * error)

    def _judge(self) -> bool:
        shift = _shift(self._recent, self._level)
        change, limit = 1.0 - math.exp(-abs(shift)), self.options.shift_min
        if self.slowdown is not None:
            before, ratio = self.slowdown, math.exp(median(self._recent) - self._level)
            if shift <= 0.0 or change <= limit / 2:
                self.slowdown = None
                return True
            self.slowdown = Slowdown(before.since, ratio, before.probability)
            return False
        probability = self.proposed
        if probability <= self.options.probability_min or change <= limit:
            return False
        length = max(self._points.likeliest_length(self.options.lately), 1)
        run = list(self._recent)[-length:]
        newest = _shift(run, self._level)
        if newest * shift < 0.0 or 1.0 - math.exp(-abs(newest)) <= limit:
            return False  # the newest run is back to normal: a few slow steps, no slowdown
        if shift < 0.0:  # faster: the new past to compare with
            self._past.clear()
            return False
        ratio = math.exp(median(run) - self._level)
        self.slowdown = Slowdown(self.count - length, ratio, probability)
        return True


def _shift(recent: Sequence[float] | deque[float], level: float) -> float:
    """Distance from the level that more than half of the samples have on the same side; otherwise
    0."""
    ordered = sorted(recent)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return max(low - level, 0.0) or min(high - level, 0.0)


def _level_and_sigma(past: deque[float]) -> tuple[float, float]:
    """Median, and the standard deviation from the median distance to it."""
    level = median(past)
    distance = median([abs(x - level) for x in past])
    return level, max(_MAD_TO_SIGMA * distance, SIGMA_MIN)
