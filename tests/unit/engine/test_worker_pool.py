"""Many hands, one result: every job once, begun in order, and nobody waits for others' work."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from mend.engine.compute.worker_pool import WorkerPool, pool_threads


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    """Three threads, called from one whose torch calls are serial, as a worker's are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    made = WorkerPool(3)
    yield made
    made.close()
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("jobs", [0, 1, 2, 100])
def test_every_job_is_done_once(threads: int, jobs: int) -> None:
    pool, done = WorkerPool(threads), list[int]()
    pool.each([partial(done.append, number) for number in range(jobs)])
    pool.close()
    assert sorted(done) == list(range(jobs))


def test_the_hands_work_at_the_same_time(pool: WorkerPool) -> None:
    """Three jobs that each wait for the other two are done by three threads, or never."""
    together = threading.Barrier(3, timeout=30)
    pool.each([together.wait] * 3)


def test_a_caller_does_its_work_alone_while_the_others_are_busy(pool: WorkerPool) -> None:
    """The training thread must not queue behind a long merge for a copy of its own."""
    busy, release = threading.Barrier(4, timeout=30), threading.Event()

    def long() -> None:
        busy.wait()
        release.wait(30)

    def merging() -> None:
        torch.set_num_threads(1)
        pool.each([long, long, long])

    merge = threading.Thread(target=merging)
    merge.start()
    busy.wait()
    done = list[int]()
    pool.each([partial(done.append, number) for number in range(5)])
    assert done == list(range(5))
    assert not release.is_set()
    release.set()
    merge.join()


def test_a_thread_whose_torch_calls_are_parallel_needs_no_help(pool: WorkerPool) -> None:
    torch.set_num_threads(3)
    seen = set[str]()
    pool.each([lambda: seen.add(threading.current_thread().name)] * 50)
    assert seen == {threading.current_thread().name}


@pytest.mark.parametrize("threads", [1, 4])
def test_the_first_fault_in_order_is_raised_and_the_rest_is_left_out(threads: int) -> None:
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool, begun = WorkerPool(threads), list[int]()

    def job(number: int) -> None:
        begun.append(number)
        if number >= 3:
            raise ValueError(f"job {number}")

    try:
        with pytest.raises(ValueError, match="job 3"):
            pool.each([partial(job, number) for number in range(1000)])
    finally:
        pool.close()
        torch.set_num_threads(torch_threads)
    assert {0, 1, 2, 3} <= set(begun)
    assert len(begun) < 20


def test_after_close_the_caller_does_all_of_it(pool: WorkerPool) -> None:
    pool.close()
    done = list[int]()
    pool.each([partial(done.append, number) for number in range(4)])
    assert done == list(range(4))


def test_helpers_leave_the_number_of_torch_threads_as_it_was(pool: WorkerPool) -> None:
    torch.set_num_threads(2)
    seen = list[int]()
    together = threading.Barrier(3, timeout=30)

    def look() -> None:
        together.wait()
        seen.append(torch.get_num_threads())

    pool.each([look] * 3)
    assert sorted(seen) == [1, 1, 2]


def test_most_cores_are_left_to_training() -> None:
    assert 1 <= pool_threads() <= 4


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_exit_in_a_helper_reaches_the_caller(pool: WorkerPool, kind: type[BaseException]) -> None:
    """It stayed in the helper's future, and a vector with a hole in it passed for complete."""
    caller, both = threading.current_thread(), threading.Barrier(3, timeout=30)

    def job() -> None:
        both.wait()
        if threading.current_thread() is not caller:
            raise kind

    with pytest.raises(kind):
        pool.each([job] * 3)


@pytest.mark.parametrize("compiled", [True, False])
def test_caller_with_many_torch_threads_gets_helpers_for_compiled_jobs_only(
    pool: WorkerPool, compiled: bool
) -> None:
    """A compiled apply was done by the training thread alone, as torch's threads do nothing in
    it."""
    torch.set_num_threads(8)
    seen = set[str]()
    meet = threading.Barrier(2, timeout=30 if compiled else 0.2)

    def job() -> None:
        seen.add(threading.current_thread().name)
        with contextlib.suppress(threading.BrokenBarrierError):
            meet.wait()

    pool.each([job, job], compiled=compiled)
    assert len(seen) == (2 if compiled else 1)
