"""Checks names that scripts may register. Which ones are valid depends on the process's imports."""

from __future__ import annotations

from typing import Any

from mend.config.kinds import Kind
from mend.config.sources import Named, misfit
from mend.errors import ConfigError
from mend.registry import Registry

NESTEROV = "nesterov"
OWN_MERGES = ("mean", "rda")
"""mend's own merge rules, which are known without loading torch."""


def is_codec(word: str) -> bool:
    """Return whether a codec is registered under this name."""
    from mend.codec import is_codec  # loads torch, which a witness has no use for

    return is_codec(word)


def is_outer(word: str) -> bool:
    """Return whether an outer optimizer is registered under this name."""
    return word == NESTEROV or word in _registry("outer_optimizer")


def is_merge(word: str) -> bool:
    """Return whether a merge rule is registered under this name."""
    return word in OWN_MERGES or word in _registry("merge")


def refusal(name: str, kind: Kind, named: Named) -> ConfigError:
    """The error for a value that breaks its rule. For a name that a script may register, it lists
    the names that are registered in this process."""
    if name not in ("outer_optimizer", "merge") or not isinstance(named.value, str):
        return misfit(name, kind, named)
    return _registry(name).unknown(name, named.value, f"Change {named.origin}")


def _registry(setting: str) -> Registry[Any]:
    from mend.merge import MERGES  # loads torch as well
    from mend.outer import OUTERS

    return MERGES if setting == "merge" else OUTERS
