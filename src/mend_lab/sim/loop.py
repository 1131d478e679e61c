"""A virtual clock with a queue of jobs. Jobs of equal times run in the order of their calls."""

from __future__ import annotations

import heapq
from collections.abc import Callable

EVENTS_MAX = 2_000_000

INSTANT_MAX = 10_000
"""Jobs at one time of the clock. More come only from a process whose deadline has passed and stays:
a real one would take a whole core."""


class Loop:
    """`now_ns` only moves when a job is taken from the queue, so idle time costs nothing."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.taken = 0
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = 0

    def at(self, due_ns: int, job: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (max(due_ns, self.now_ns), self._serial, job))

    def run(self, until: Callable[[], bool], limit_ns: int) -> bool:
        """Run until `until()`; False when the time or the limit of events is reached. Raises
        RuntimeError after INSTANT_MAX jobs at one time."""
        at_once = 0
        while self._queue and not until():
            due_ns, _, job = heapq.heappop(self._queue)
            if due_ns > limit_ns or self.taken > EVENTS_MAX:
                return until()
            at_once = at_once + 1 if due_ns == self.now_ns else 0
            if at_once > INSTANT_MAX:
                raise RuntimeError(
                    f"{at_once} jobs at {due_ns} ns: a deadline has passed and stays"
                )
            self.now_ns = due_ns
            self.taken += 1
            job()
        return until()
