"""outer: anchor + merged delta -> next anchor. The names a configuration may use."""

from collections.abc import Callable

from mend.outer.base import OuterOptimizer
from mend.outer.nesterov import Nesterov

OUTERS: dict[str, Callable[[float, float], OuterOptimizer]] = {"nesterov": Nesterov}
"""name -> (lr, momentum) -> optimizer"""

__all__ = ["OUTERS", "Nesterov", "OuterOptimizer"]
