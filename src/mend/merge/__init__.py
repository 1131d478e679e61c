"""merge: many deltas -> one. The names a configuration may use."""

from collections.abc import Callable

from mend.merge.average import Average
from mend.merge.base import Merge

MERGES: dict[str, Callable[[], Merge]] = {"mean": Average}

__all__ = ["MERGES", "Average", "Merge"]
