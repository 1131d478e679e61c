"""Which of the drawn jobs `make test` runs, and which only `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from mend_lab.sim import draw

STEPS = 40
"""A job of more is long: a quarter of all, and three quarters of the time."""


def is_long(seed: int) -> bool:
    return max(draw(seed).steps) > STEPS


def by_length(seeds: Iterable[int]) -> list[object]:
    """As parameters of a test; the long ones are marked slow."""
    return [pytest.param(seed, marks=[pytest.mark.slow] * is_long(seed)) for seed in seeds]


def blocks(seeds: range, size: int, quick: int) -> list[object]:
    """The same, several to a parameter; those from `quick` on are marked slow, too."""
    found: list[object] = []
    for slow in (False, True):
        chosen = [seed for seed in seeds if (is_long(seed) or seed >= quick) is slow]
        for first in range(0, len(chosen), size):
            part = chosen[first : first + size]
            name = f"{part[0]} to {part[-1]}"
            found.append(pytest.param(part, id=name, marks=[pytest.mark.slow] * slow))
    return found
