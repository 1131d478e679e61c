"""The cause of a slowdown, from micro-benchmarks now and while the rank was healthy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COMPUTE, LINK, INPUT, UNKNOWN = "compute", "link", "input", "unknown"

EXPLAINED_MIN = 0.5
"""A cause is named only if it explains at least this share of the extra step time."""

COMPUTE_MIN = 1.1
"""Below this ratio to its healthy time a matrix product is healthy."""

LINK_MIN = 2.0
"""A pull over the lane varies more than arithmetic does."""


@dataclass(frozen=True, slots=True)
class Cause:
    """`rack`: at the other end of the link, where that is the cause; else -1."""

    kind: str
    rack: int = -1


def cause_of(ratio: float, gemm: float, waited: float, lanes: Mapping[int, float]) -> Cause:
    """The first of input, compute, link that explains a slowdown, or unknown.

    `ratio`: step time over that of the past, above 1. `gemm`: time of a matrix product over that of
    the past; 0: not known. `waited`: of the time that steps take longer, the share before the first
    forward; it is a part of the steps themselves, so it goes before what is measured beside them.
    `lanes`: by other rack, time of a pull over that of the past.
    """
    if waited >= EXPLAINED_MIN:
        return Cause(INPUT)
    if gemm >= COMPUTE_MIN and gemm - 1.0 >= EXPLAINED_MIN * (ratio - 1.0):
        return Cause(COMPUTE)
    worst = max(sorted(lanes), key=lambda rack: lanes[rack], default=-1)
    if worst >= 0 and lanes[worst] >= LINK_MIN:
        return Cause(LINK, worst)
    return Cause(UNKNOWN)
