"""outer: anchor + merged delta -> next anchor. The names a configuration may use."""

from collections.abc import Callable

from mend.outer.base import OuterOptimizer, Rates
from mend.outer.nesterov import Nesterov
from mend.outer.replace import Replace

OUTERS: dict[str, Callable[..., OuterOptimizer]] = {"nesterov": Nesterov}
"""name -> (lr, momentum, rounds of its ramp; 0: none) -> optimizer"""

__all__ = ["OUTERS", "Nesterov", "OuterOptimizer", "Rates", "Replace"]
