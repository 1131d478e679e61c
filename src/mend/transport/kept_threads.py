"""Daemon threads that are kept for a while for the next jobs: to start one takes the interpreter's
lock several times, and the one who starts it waits meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

KEPT_S = 15.0
"""How long a thread without a job stays."""

Job = Callable[[], None]


class _Free:
    """A thread that waits for its next job; none: it ends."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.bell = threading.Lock()
        self.bell.acquire()


class KeptThreads:
    """Not an executor of concurrent.futures: the interpreter joins their threads at its end, before
    anything has stopped their jobs, and no new job could begin from then on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._free: list[_Free] = []
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def run(self, job: Job) -> None:
        """Run it at once, beside all others. It must not raise. Raises RuntimeError where no thread
        can be started."""
        with self._lock:
            free = self._free.pop() if self._free else None
        if free is not None:
            free.jobs.append(job)
            free.bell.release()
            return
        own = _Free()
        own.jobs.append(job)
        thread = threading.Thread(target=self._work, args=(own,), name=self._name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.discard(thread)
            raise

    def _work(self, own: _Free) -> None:
        while own.jobs:
            own.jobs.pop()()  # what it holds is free before the next one is awaited
            self._wait(own)
        self._threads.discard(threading.current_thread())

    def _wait(self, own: _Free) -> None:
        with self._lock:
            if self._closed:
                return
            self._free.append(own)
        if own.bell.acquire(timeout=KEPT_S):
            return
        with self._lock:
            late = own not in self._free
            if not late:
                self._free.remove(own)
        if late:
            own.bell.acquire()

    def close(self, limit_s: float) -> None:
        """End them; wait for those that have a job."""
        with self._lock:
            self._closed, waiting, self._free = True, self._free, []
        for free in waiting:
            free.bell.release()
        deadline_s = time.monotonic() + limit_s
        for thread in tuple(self._threads):
            thread.join(max(0.0, deadline_s - time.monotonic()))
