"""The cause of a slowdown, from micro-benchmarks now and while the rank was healthy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["compute", "link", "input", "unknown"]
COMPUTE: Final = "compute"
LINK: Final = "link"
INPUT: Final = "input"
UNKNOWN: Final = "unknown"

EXPLAINED_MIN = 0.5
"""A cause is named only if it explains at least this fraction of the extra step time."""

COMPUTE_MIN = 1.1
"""Below this ratio to its healthy time, a matrix product counts as healthy."""

LINK_MIN = 2.0
"""The same for a pull over the lane, which varies more than arithmetic."""


@dataclass(frozen=True, slots=True)
class Cause:
    """`rack`: the other end of the link, if the cause is a link; otherwise -1."""

    kind: Kind
    rack: int = -1


def cause_of(ratio: float, gemm: float, waited: float, lanes: Mapping[int, float]) -> Cause:
    """The first of input, compute, link that explains a slowdown, or unknown.

    `ratio`: step time over that of the past, above 1. `gemm`: time of a matrix product over that of
    the past; 0: unknown. `waited`: the fraction of the extra step time before the first forward; it
    is checked first, because it is a part of the steps themselves. `lanes`: by other rack, time of
    a pull over that of the past.
    """
    if waited >= EXPLAINED_MIN:
        return Cause(INPUT)
    if gemm >= COMPUTE_MIN and gemm - 1.0 >= EXPLAINED_MIN * (ratio - 1.0):
        return Cause(COMPUTE)
    worst = max(sorted(lanes), key=lambda rack: lanes[rack], default=-1)
    if worst >= 0 and lanes[worst] >= LINK_MIN:
        return Cause(LINK, worst)
    return Cause(UNKNOWN)


def cause_in_words(cause: str, rank: int, link_to: int) -> str:
    """The cause in words, for people; empty before it was validated."""
    if cause not in (COMPUTE, INPUT, LINK):
        return cause and "for an unknown reason"
    if cause == LINK:
        return f"by its link to rack {link_to}"
    whose = " (its device, its clock or a neighbour)" if cause == COMPUTE else ""
    return f"by the {cause} of rank {rank}{whose}"
