"""Scales of a chart: ticks, units, and places in thousandths of its width or height. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TICKS = 5
"""About how many ticks an axis has."""
PLACES = 1000
"""A chart is so many units wide and high, whatever its size on the screen."""

Floats = npt.NDArray[np.float64]
Tick = tuple[float, str]
"""(place, label)."""


@dataclass(frozen=True, slots=True)
class Scale:
    """From `low` to `high`; `log`: both are positive, and equal ratios are equal distances."""

    low: float
    high: float
    log: bool = False

    def places(self, values: Floats) -> Floats:
        """0 is `low`, PLACES is `high`."""
        low, high = self.low, self.high
        if self.log:
            values, low, high = np.log10(values), math.log10(low), math.log10(high)
        return PLACES * (values - low) / ((high - low) or 1.0)

    def ticks(self) -> list[Tick]:
        values = self._powers() if self.log else []
        if len(values) < 3:
            values = _steps(self.low, self.high)
        places = self.places(np.array(values)) if values else ()
        return [(float(at), f"{v:.6g}") for at, v in zip(places, values, strict=True)]

    def _powers(self) -> list[float]:
        """1, 2 and 5 times the powers of ten in between; where these are many, some powers."""
        first, last = math.floor(math.log10(self.low)), math.floor(math.log10(self.high))
        powers = [10.0**p for p in range(first, last + 1, 1 + (last - first) // TICKS)]
        fine, coarse = (
            [v for p in powers for m in factors if self.low <= (v := m * p) <= self.high]
            for factors in ((1, 2, 5), (1,))
        )
        return fine if len(fine) <= 2 * TICKS else coarse


def _steps(low: float, high: float) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten."""
    if not 0 < high - low < math.inf:
        return [low]
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= 0.7 * rough)
    if not step or high / step > 2**53:  # denormal, or so far from 0 that no multiple is exact
        return [low]
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def unit_of(values: Floats | Sequence[float]) -> tuple[float, str]:
    """(divisor, prefix) so that the largest has few digits."""
    most = max((abs(float(v)) for v in values if np.isfinite(v)), default=0.0)
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if most >= size:
            return size, prefix
    return 1.0, ""


def time_unit(seconds: float) -> tuple[float, str]:
    """(seconds of a unit, its name) for an axis of that length."""
    for unit_s, name in ((3600.0, "h"), (60.0, "min")):
        if seconds > 5 * unit_s:
            return unit_s, name
    return 1.0, "s"
