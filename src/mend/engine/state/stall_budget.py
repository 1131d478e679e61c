"""How long training has waited for results, and how long it still may. Training thread."""

from __future__ import annotations


class StallBudget:
    """The budget of one rank. One outage may hold up training for `limit_ns` in total, over however
    many apply points; the next applied version ends the outage."""

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = self.left_ns = limit_ns
        self.total_ns = self.last_ns = 0

    def waited(self, ns: int) -> None:
        """Count a wait that is over."""
        self.last_ns = ns
        self.total_ns += ns

    def spend(self, ns: int) -> None:
        self.left_ns = max(0, self.left_ns - ns)

    def renew(self) -> None:
        self.left_ns = self._limit_ns
