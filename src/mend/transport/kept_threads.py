"""Daemon threads that are kept for a while to run further jobs. Starting a thread takes the
interpreter's lock several times, and its caller waits meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

KEPT_S = 15.0
"""How long a thread without a job is kept."""

Job = Callable[[], None]


class _Free:
    """A thread that waits for its next job. If it is woken without a job, it ends."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.bell = threading.Lock()
        self.bell.acquire()


class KeptThreads:
    """A pool of daemon threads. An executor of concurrent.futures would not do: at its exit the
    interpreter joins those threads before anything has stopped their jobs, and accepts no new
    jobs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._free: list[_Free] = []
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def run(self, job: Job) -> None:
        """Run a job at once, concurrently with all others. The job must not raise. Raises
        RuntimeError if no thread can be started."""
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
            own.jobs.pop()()  # no reference to the job is kept while waiting for the next
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
        """End the threads; wait up to `limit_s` for those that have a job."""
        with self._lock:
            self._closed, waiting, self._free = True, self._free, []
        for free in waiting:
            free.bell.release()
        deadline_s = time.monotonic() + limit_s
        for thread in tuple(self._threads):
            thread.join(max(0.0, deadline_s - time.monotonic()))
