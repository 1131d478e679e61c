"""Tracks how much of a payload exists while it is still being made."""

from __future__ import annotations

import threading


class Growth:
    """The number of leading bytes of a payload that are final. One thread writes, any may wait. A
    payload without a Growth is complete.

    A waiting thread wakes up only once, when its own bytes are there.
    """

    def __init__(self) -> None:
        self.filled = 0
        self.failed = False
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, threading.Lock]] = []
        """For each waiting thread, the end that it waits for, and a lock whose release wakes it."""

    def reach(self, end: int) -> None:
        """Record that bytes [0, end) are final."""
        self.filled = end
        self._wake()

    def fail(self) -> None:
        """Record that no further byte will follow."""
        self.failed = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            for waiting in [each for each in self._waiting if self._ends(each[0])]:
                self._waiting.remove(waiting)
                waiting[1].release()

    def _ends(self, end: int) -> bool:
        return self.failed or self.filled >= end

    def __enter__(self) -> Growth:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """After an exception, the rest will not follow."""
        if kind is not None:
            self.fail()

    def wait(self, end: int, timeout_s: float) -> bool:
        """Wait for bytes [0, end), until the time-out or a failure. Returns whether they are
        there."""
        bell = threading.Lock()
        bell.acquire()
        waiting = end, bell
        with self._lock:
            if self._ends(end):
                return self.filled >= end
            self._waiting.append(waiting)
        if not bell.acquire(timeout=timeout_s):
            with self._lock:
                if waiting in self._waiting:
                    self._waiting.remove(waiting)
        return self.filled >= end
