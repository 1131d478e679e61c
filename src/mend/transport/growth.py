"""How much of a payload is there while it is still being made."""

from __future__ import annotations

import threading


class Growth:
    """The leading bytes of a payload that do not change any more. One thread writes, any may wait.
    A payload without one is whole."""

    def __init__(self) -> None:
        self.filled = 0
        self.failed = False
        self._news = threading.Condition()

    def reach(self, end: int) -> None:
        """Bytes [0, end) are there."""
        with self._news:
            self.filled = end
            self._news.notify_all()

    def fail(self) -> None:
        """No further byte will come."""
        with self._news:
            self.failed = True
            self._news.notify_all()

    def __enter__(self) -> Growth:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """An exception means that the rest is not made."""
        if kind is not None:
            self.fail()

    def wait(self, end: int, timeout_s: float) -> bool:
        """Whether bytes [0, end) are there, within the time-out or until it fails."""
        with self._news:
            self._news.wait_for(lambda: self.failed or self.filled >= end, timeout_s)
            return self.filled >= end
