"""A bounded queue to a slow writer. Items that do not fit are replaced by a gap."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Backlog(Generic[T]):
    """Any thread puts, one thread takes. `most`: limit of waiting items; further ones are lost, and
    `gap(count)` takes their place. Reentrant, because a finalizer that runs inside may put, too."""

    def __init__(self, most: int, gap: Callable[[int], T]) -> None:
        self.lost = 0
        """Items that were dropped."""
        self.over = False
        self._most, self._gap = most, gap
        self._missed = 0
        self._waiting: deque[T] = deque()
        self._changed = threading.Condition()  # its lock is reentrant

    def __len__(self) -> int:
        return len(self._waiting)

    # -------------------------------------------------------------- any thread

    def put(self, item: T) -> None:
        """Add an item. Never blocks."""
        with self._changed:
            if self.over or len(self._waiting) >= self._most:
                self.lost += 1
                self._missed += 1
                return
            if self._missed:
                self._say_gap()
            self._waiting.append(item)
            self._changed.notify()

    def end(self) -> None:
        """Accept no more items; waiting ones may still be taken."""
        with self._changed:
            self.over = True
            self._changed.notify_all()

    # -------------------------------------------------------------- the writer

    def take(self, most: int) -> Sequence[T]:
        """Return up to `most` items, oldest first. Waits for the first; empty once the queue has
        ended."""
        with self._changed:
            while not self._waiting and not self._missed and not self.over:
                self._changed.wait()
            if self._missed and not self._waiting:
                self._say_gap()
            return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def pause(self, limit_s: float) -> None:
        """Wait until the queue has ended, at most `limit_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self.over, limit_s)

    def abandon(self, more: int = 0) -> None:
        """Drop the items that wait; `more` items that were taken are lost, too."""
        with self._changed:
            self.lost += len(self._waiting) + more
            self._waiting.clear()

    def _say_gap(self) -> None:
        self._waiting.append(self._gap(self._missed))
        self._missed = 0
