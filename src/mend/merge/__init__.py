"""merge: combines the deltas of the racks, by one of the registered rules."""

from __future__ import annotations

from collections.abc import Callable

from mend.errors import ConfigError
from mend.merge.average import Average, Made
from mend.merge.base import Measuring, Merge
from mend.merge.gram import PIECE_NUMEL_MAX, Gram, gram_by, nothing
from mend.merge.radial import Radial
from mend.registry import Registry

MERGES: Registry[Callable[[], Merge]] = Registry("merge", {"mean": Average, "rda": Radial})


def register(name: str, make: Callable[[], Merge]) -> None:
    """Register a rule for the setting `merge`, in this process. Every rack must do so, under the
    same name, before its MendConfig is built. Raises ConfigError if the name is taken or differs
    from the rule's own, if `make` does not return a rule, or needs arguments."""
    made = MERGES.tried(name, make)
    if not hasattr(made, "block"):
        rule = f"makes a {type(made).__name__}, which has no block"
        raise ConfigError("merge", name, rule, "Register a mend.merge.Merge.")
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
    "gram_by",
    "nothing",
    "register",
]
