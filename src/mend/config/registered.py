"""Names that a script registers: what they may be depends on what this process has imported."""

from __future__ import annotations

from mend.config.kinds import Kind
from mend.config.sources import Named, misfit
from mend.errors import ConfigError

NESTEROV = "nesterov"


def is_codec(word: str) -> bool:
    """Whether a codec is registered under it."""
    from mend.codec import is_codec  # loads torch, which a witness has no use for

    return is_codec(word)


def is_outer(word: str) -> bool:
    """Whether an outer optimizer is registered under it."""
    if word == NESTEROV:
        return True
    from mend.outer import OUTERS  # loads torch as well

    return word in OUTERS


def refusal(name: str, kind: Kind, named: Named) -> ConfigError:
    """A value outside its rule; of an outer optimizer also what this process has registered."""
    if name != "outer_optimizer" or not isinstance(named.value, str):
        return misfit(name, kind, named)
    from mend.outer import OUTERS

    rule = f"needs one of {', '.join(OUTERS)} (what is registered in this process)"
    remedy = (
        f"Import what calls mend.outer.register({named.value!r}, ...) before MendConfig is built, "
        f"or change {named.origin}."
    )
    return ConfigError(name, named.value, rule, remedy)
