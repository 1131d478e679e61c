"""outer: anchor + merged delta -> next anchor. The names a configuration may use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature

from mend.errors import ConfigError
from mend.outer.base import OuterOptimizer, Rates
from mend.outer.nesterov import Nesterov
from mend.outer.replace import Replace

Make = Callable[[float, float, int], OuterOptimizer]
"""(lr, momentum, rounds of its ramp; 0: none) -> optimizer"""

OUTERS: dict[str, Make] = {Nesterov.name: Nesterov}

STATES_MAX = 8


def register(name: str, make: Make) -> None:
    """Let `outer_optimizer` name a rule of yours, in this process. Every rack must do so, under the
    same name, before its MendConfig is built. Raises ConfigError for a name that is taken, or that
    the rule does not have, for states that cannot be kept, and for a `make` that is not called with
    three arguments."""
    _refuse_arguments(name, make)
    made = make(1.0, 0.0, 0)
    if made.name != name:
        rule = f"makes an outer optimizer whose name is {made.name!r}"
        raise ConfigError("outer", name, rule, "Register it under the name that it has.")
    if OUTERS.get(name, make) is not make:
        raise ConfigError("outer", name, "is registered already", "Choose another name.")
    kept: tuple[Sequence[str], ...] = (made.states, make(1.0, 0.5, 0).states)
    for states in kept:
        if isinstance(states, str):  # else each letter were a state
            rule = f"has states {states!r}, which is a string"
            raise ConfigError("outer", name, rule, f"Write a tuple: ({states!r},).")
        if len(set(states)) < len(states) or len(states) > STATES_MAX:
            rule = f"has states {states}, not up to {STATES_MAX} different ones"
            raise ConfigError("outer", name, rule, "Give each vector a name of its own.")
    OUTERS[name] = make


def _refuse_arguments(name: str, make: Make) -> None:
    try:
        signature(make).bind(1.0, 0.0, 0)
    except TypeError as error:
        rule = f"cannot be made by {getattr(make, '__name__', make)!s} ({error})"
        remedy = "make is called with (lr, momentum, ramp)."
        raise ConfigError("outer", name, rule, remedy) from error
    except ValueError:
        pass  # written in C, says nothing of its arguments


__all__ = ["OUTERS", "Make", "Nesterov", "OuterOptimizer", "Rates", "Replace", "register"]
