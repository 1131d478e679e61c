"""merge: many deltas -> one. The names a configuration may use."""

from collections.abc import Callable

from mend.merge.average import Average, Made
from mend.merge.base import Measuring, Merge
from mend.merge.gram import PIECE_NUMEL_MAX, Gram, nothing
from mend.merge.radial import Radial

MERGES: dict[str, Callable[[], Merge]] = {"mean": Average, "rda": Radial}

__all__ = [
    "MERGES",
    "PIECE_NUMEL_MAX",
    "Average",
    "Gram",
    "Made",
    "Measuring",
    "Merge",
    "Radial",
    "nothing",
]
