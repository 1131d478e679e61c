"""Threads that run jobs, and how they end.

As concurrent.futures has them, with two differences: they never keep the process from ending, and
their own end has a limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Job = tuple[Future[Any], Callable[[], Any]]

OWN = "mend-"
"""How the names of all of mend's threads begin."""


def from_outside(close: Callable[[], None]) -> None:
    """Call `close`, which joins mend's threads: here, or, where this is one of them, in a thread of
    its own, and return at once. A finalizer runs wherever the last reference goes, and no thread
    can wait for its own end."""
    if threading.current_thread().name.startswith(OWN):
        threading.Thread(target=close, name=f"{OWN}end").start()
    else:
        close()


class Hands:
    """`count` threads called `name`, each of which begins with `begin`. Any thread may submit.

    They start with the first job: a witness, which has none, must not load what `begin` loads.
    """

    def __init__(self, count: int, name: str, begin: Callable[[], None]) -> None:
        self._begin, self._closed = begin, False
        # Reentrant, unlike queue.Queue: a finalizer may submit from inside.
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}_{number}", daemon=True)
            for number in range(count)
        ]
        self._starting = threading.RLock()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Cancelled at once where the end has begun."""
        future: Future[T] = Future()
        if self._closed:
            future.cancel()
        else:
            self._start()
            self._jobs.put((future, job))
        return future

    def _start(self) -> None:
        with self._starting:
            for thread in self._threads:
                if thread.ident is None:
                    thread.start()

    def close(self, limit_s: float) -> list[str]:
        """Cancel what has not begun, and wait for what has. Returns the names of threads that are
        still at it when the limit is over. Idempotent."""
        self._closed = True
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                break
            if job is not None:
                job[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        deadline_s = time.monotonic() + limit_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline_s - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _work(self) -> None:
        self._begin()
        while (taken := self._jobs.get()) is not None:
            future, job = taken
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del taken, future, job  # what they hold must not live until the next one
