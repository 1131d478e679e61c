"""Threads that run jobs.

Two differences from concurrent.futures: they never keep the process from ending, and `close` has a
time limit.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Job = tuple[Future[Any], Callable[[], Any]]

OWN = "mend-"
"""Prefix of the names of mend's threads."""


def from_outside(close: Callable[[], None]) -> None:
    """Call `close`, which joins mend's threads. On one of these threads call it in a new thread and
    return at once: a thread cannot join itself, and a finalizer may run in any thread."""
    if threading.current_thread().name.startswith(OWN):
        threading.Thread(target=close, name=f"{OWN}end").start()
    else:
        close()


class DaemonExecutor:
    """`count` threads called `name`, each of which first calls `begin`, if there is one. Any thread
    may submit.

    They start with the first job: a witness, which has no jobs, must not load what `begin` loads.
    """

    def __init__(self, count: int, name: str, begin: Callable[[], None] | None = None) -> None:
        self._begin, self._closed = begin, False
        # Reentrant, unlike queue.Queue: a finalizer may submit from inside.
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}_{number}", daemon=True)
            for number in range(count)
        ]
        self._starting = threading.RLock()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job. After `close` its future is cancelled."""
        future: Future[T] = Future()
        if not self._closed:
            self._start()
            self._jobs.put((future, job))
        if self._closed:  # perhaps by another thread meanwhile, which may not have seen the job
            future.cancel()
        return future

    def _start(self) -> None:
        with self._starting:
            for thread in self._threads:
                if thread.ident is None:
                    thread.start()

    def close(self, limit_s: float) -> list[str]:
        """Cancel jobs that have not begun, and wait for the others. Returns the names of threads
        that still work after the limit. Idempotent."""
        self._closed = True
        with contextlib.suppress(Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        deadline_s = time.monotonic() + limit_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline_s - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _work(self) -> None:
        if self._begin is not None:
            self._begin()
        while (taken := self._jobs.get()) is not None:
            future, job = taken
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del taken, future, job  # free what they hold before waiting for the next job
