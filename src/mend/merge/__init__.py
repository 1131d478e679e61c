"""merge: many deltas -> one. The names a configuration may use."""

from __future__ import annotations

from collections.abc import Callable

from mend.errors import ConfigError
from mend.merge.average import Average, Made
from mend.merge.base import Measuring, Merge
from mend.merge.gram import PIECE_NUMEL_MAX, Gram, nothing
from mend.merge.radial import Radial

MERGES: dict[str, Callable[[], Merge]] = {"mean": Average, "rda": Radial}


def register(name: str, make: Callable[[], Merge]) -> None:
    """Let `merge` name a rule of yours, in this process. Every rack must do so, under the same
    name, before its MendConfig is built. Raises ConfigError for a name that is taken, or that the
    rule does not have."""
    if MERGES.get(name, make) is not make:
        raise ConfigError("merge", name, "is registered already", "Choose another name.")
    if (made := make()).name != name:
        rule = f"makes a rule whose name is {made.name!r}"
        raise ConfigError("merge", name, rule, "Register it under the name that it has.")
    MERGES[name] = make


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
    "register",
]
