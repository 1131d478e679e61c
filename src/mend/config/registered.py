"""Checks names that scripts may register. Which ones are valid depends on the process's imports."""

from __future__ import annotations

from mend.config.kinds import Kind
from mend.config.sources import Named, misfit
from mend.errors import ConfigError

NESTEROV = "nesterov"
OWN_MERGES = ("mean", "rda")
"""mend's own merge rules, which are known without loading torch."""


def is_codec(word: str) -> bool:
    """Return whether a codec is registered under this name."""
    from mend.codec import is_codec  # loads torch, which a witness has no use for

    return is_codec(word)


def is_outer(word: str) -> bool:
    """Return whether an outer optimizer is registered under this name."""
    if word == NESTEROV:
        return True
    from mend.outer import OUTERS  # loads torch as well

    return word in OUTERS


def is_merge(word: str) -> bool:
    """Return whether a merge rule is registered under this name."""
    if word in OWN_MERGES:
        return True
    from mend.merge import MERGES  # loads torch as well

    return word in MERGES


def refusal(name: str, kind: Kind, named: Named) -> ConfigError:
    """The error for a value that breaks its rule. For a name that a script may register, it lists
    the names that are registered in this process."""
    if name not in ("outer_optimizer", "merge") or not isinstance(named.value, str):
        return misfit(name, kind, named)
    from mend.merge import MERGES
    from mend.outer import OUTERS

    room, registered = ("merge", [*MERGES]) if name == "merge" else ("outer", [*OUTERS])
    rule = f"needs one of {', '.join(registered)} (the names registered in this process)"
    remedy = (
        f"Change {named.origin}, or import what calls mend.{room}.register({named.value!r}, ...) "
        "before MendConfig is built."
    )
    return ConfigError(name, named.value, rule, remedy)
