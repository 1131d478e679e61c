"""A thread pool for long vectors, in which the calling thread works as well."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial

import torch

from mend.engine.compute.threads import DaemonExecutor
from mend.hardware.cpu_affinity import pin_worker

CLOSE_S = 10.0
"""How long `close` waits for the helpers' jobs."""


def stay_on_one_core() -> None:
    """Make torch calls of this thread serial, and leave all other threads as they are.

    Call it once at the start of a worker thread. `torch.set_num_threads` also sets the default of
    new threads; a thread that ends at once restores it.
    """
    others = torch.get_num_threads()
    if others == 1:
        return
    torch.set_num_threads(1)
    restore = threading.Thread(target=torch.set_num_threads, args=(others,), name="mend-threads")
    restore.start()
    restore.join()


def begin_worker(cores: frozenset[int] | None) -> None:
    """Begin a worker thread: serial torch calls, on the cores near the GPU if known."""
    stay_on_one_core()
    pin_worker(cores)


def pool_threads() -> int:
    """A quarter of the cores this process may use, 1 to 4. The rest trains."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(4, cores // 4))


class WorkerPool:
    """`threads`: their number, including the caller. Any thread may call, and waits for its own
    jobs only. `cores`: those that the helpers run on; None: all."""

    def __init__(self, threads: int, cores: frozenset[int] | None = None) -> None:
        self.threads, begin = threads, partial(begin_worker, cores)
        self._helpers = DaemonExecutor(threads - 1, "mend-pool", begin) if threads > 1 else None

    def each(self, jobs: Sequence[Callable[[], object]], *, compiled: bool = False) -> None:
        """Do every job, and return when the last is done. Jobs begin in the order given.

        If jobs fail, the error of the first one in that order is raised, as in a single thread;
        jobs that have not begun are left out. A caller whose torch calls already use as many
        threads gets no helpers, unless the jobs are `compiled`, that is, hardly call torch.
        """
        order, failed = itertools.count(), list[tuple[int, BaseException]]()

        def work() -> None:
            while not failed and (number := next(order)) < len(jobs):
                try:
                    jobs[number]()
                except BaseException as error:  # of a helper nobody reads the future
                    failed.append((number, error))

        helping = self._called(work, len(jobs) - 1, compiled)
        try:
            work()
        finally:  # do not wait for helpers that are busy with other callers
            wait([helper for helper in helping if not helper.cancel()])
        if failed:
            raise min(failed, key=lambda fault: fault[0])[1]

    def _called(self, work: Callable[[], None], most: int, compiled: bool) -> list[Future[None]]:
        if self._helpers is None:
            return []
        if not compiled and torch.get_num_threads() >= self.threads:
            return []
        return [self._helpers.submit(work) for _ in range(min(self.threads - 1, most))]

    def close(self) -> list[str]:
        """End the threads, after their current jobs if these take no longer than CLOSE_S. Returns
        the names of threads that still work."""
        return self._helpers.close(CLOSE_S) if self._helpers is not None else []
