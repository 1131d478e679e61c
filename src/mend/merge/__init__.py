"""merge: combines the deltas of the racks, by one of the registered rules."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

from mend.errors import ConfigError
from mend.merge.average import Average, Made
from mend.merge.base import Measuring, Merge
from mend.merge.gram import PIECE_NUMEL_MAX, Gram, gram_by, nothing
from mend.merge.radial import Radial

MERGES: dict[str, Callable[[], Merge]] = {"mean": Average, "rda": Radial}


def register(name: str, make: Callable[[], Merge]) -> None:
    """Register a rule for the setting `merge`, in this process. Every rack must do so, under the
    same name, before its MendConfig is built. Raises ConfigError if the name is taken or differs
    from the rule's own, if `make` does not return a rule, or needs arguments."""
    _refuse_arguments(name, make)
    if MERGES.get(name, make) is not make:
        raise ConfigError("merge", name, "is registered already", "Choose another name.")
    made = make()
    for part in ("name", "block"):
        if not hasattr(made, part):
            rule = f"makes a {type(made).__name__}, which has no {part}"
            raise ConfigError("merge", name, rule, "Register a mend.merge.Merge.")
    if made.name != name:
        rule = f"makes a rule whose name is {made.name!r}"
        raise ConfigError("merge", name, rule, "Register it under the name that it has.")
    MERGES[name] = make


def _refuse_arguments(name: str, make: Callable[[], Merge]) -> None:
    try:
        signature(make).bind()
    except TypeError as error:
        rule = f"cannot be made by {getattr(make, '__name__', make)!s} ({error})"
        raise ConfigError("merge", name, rule, "make is called without arguments.") from error
    except ValueError:
        pass  # written in C, without a signature


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
