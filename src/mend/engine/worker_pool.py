"""A thread pool for long vectors; the caller works too."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial

import torch

from mend.engine.threads import Hands
from mend.hardware.cpu_affinity import pin_worker

CLOSE_S = 10.0
"""How long the end waits for what helpers are at."""


def stay_on_one_core() -> None:
    """Make torch calls of *this* thread serial for good, and leave every other thread as it is.

    For a worker thread, once, at its start. `torch.set_num_threads` sets the calling thread and the
    default of threads not yet seen; the default is put back by a thread that ends at once.
    """
    others = torch.get_num_threads()
    if others == 1:
        return
    torch.set_num_threads(1)
    restore = threading.Thread(target=torch.set_num_threads, args=(others,), name="mend-threads")
    restore.start()
    restore.join()


def begin_worker(cores: frozenset[int] | None) -> None:
    """First thing in a thread of mend's: serial torch calls, on the cores near its GPU if known."""
    stay_on_one_core()
    pin_worker(cores)


def pool_threads() -> int:
    """A quarter of the cores this process may use, 1 to 4. The rest trains."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(4, cores // 4))


class WorkerPool:
    """`threads` in all, the caller among them. Any thread may call, and waits for its own jobs
    only. `cores`: where they stay; None: anywhere."""

    def __init__(self, threads: int, cores: frozenset[int] | None = None) -> None:
        self.threads = threads
        self._helpers = (
            Hands(threads - 1, "mend-pool", partial(begin_worker, cores)) if threads > 1 else None
        )

    def each(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Do every job, and return when the last is done. Jobs begin in the order given.

        Of jobs that fail, the first in that order raises, as if one thread had done them all; what
        had not begun by then is left out. A caller whose torch calls use as many threads anyway
        gets no help.
        """
        order, failed = itertools.count(), list[tuple[int, Exception]]()

        def work() -> None:
            while not failed and (number := next(order)) < len(jobs):
                try:
                    jobs[number]()
                except Exception as error:
                    failed.append((number, error))

        helping = self._called(work, len(jobs) - 1)
        try:
            work()
        finally:  # helpers that are busy elsewhere are not waited for: their share is done
            wait([helper for helper in helping if not helper.cancel()])
        if failed:
            raise min(failed, key=lambda fault: fault[0])[1]

    def _called(self, work: Callable[[], None], most: int) -> list[Future[None]]:
        if self._helpers is None or torch.get_num_threads() >= self.threads:
            return []
        return [self._helpers.submit(work) for _ in range(min(self.threads - 1, most))]

    def close(self) -> list[str]:
        """End the threads; what they are at is finished first, if it takes no longer than CLOSE_S.
        Returns the names of those that are still at it."""
        return self._helpers.close(CLOSE_S) if self._helpers is not None else []
