"""outer: makes the next anchor from the merged delta, by one of the registered optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mend.errors import ConfigError
from mend.outer.base import OuterOptimizer, Rates
from mend.outer.nesterov import Nesterov
from mend.outer.replace import Replace
from mend.registry import Registry

Make = Callable[[float, float, int], OuterOptimizer]
"""(lr, momentum, rounds of its ramp; 0: none) -> optimizer"""

OUTERS: Registry[Make] = Registry("outer", {Nesterov.name: Nesterov}, lr=1.0, momentum=0.0, ramp=0)

STATES_MAX = 8


def register(name: str, make: Make) -> None:
    """Register an optimizer for the setting `outer_optimizer`, in this process. Every rack must do
    so, under the same name, before its MendConfig is built. Raises ConfigError if the name is taken
    or differs from the optimizer's own, if its states cannot be kept, or if `make` does not take
    three arguments."""
    made = OUTERS.tried(name, make)
    kept: tuple[Sequence[str], ...] = (made.states, make(1.0, 0.5, 0).states)
    for states in kept:
        if isinstance(states, str):  # otherwise each letter would be a state
            rule = f"has states {states!r}, which is a string"
            raise ConfigError("outer", name, rule, f"Write a tuple: ({states!r},).")
        if len(set(states)) < len(states) or len(states) > STATES_MAX:
            rule = f"has states {states}, not up to {STATES_MAX} different ones"
            raise ConfigError("outer", name, rule, "Give each vector a name of its own.")
    OUTERS[name] = make


__all__ = ["OUTERS", "Make", "Nesterov", "OuterOptimizer", "Rates", "Replace", "register"]
