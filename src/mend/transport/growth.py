"""How much of a payload is there while it is still being made."""

from __future__ import annotations

import threading


class Growth:
    """The leading bytes of a payload that do not change any more. One thread writes, any may wait.
    A payload without one is whole.

    A waiting thread is woken once: when its bytes are there, and not for those of another one.
    """

    def __init__(self) -> None:
        self.filled = 0
        self.failed = False
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, threading.Lock]] = []
        """The end that each waits for, and what wakes it."""

    def reach(self, end: int) -> None:
        """Bytes [0, end) are there."""
        self.filled = end
        self._wake()

    def fail(self) -> None:
        """No further byte will come."""
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
        """An exception means that the rest is not made."""
        if kind is not None:
            self.fail()

    def wait(self, end: int, timeout_s: float) -> bool:
        """Whether bytes [0, end) are there, within the time-out or until it fails."""
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
