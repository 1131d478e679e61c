"""Threads that are kept for the next jobs."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from mend.transport import kept_threads
from mend.transport.kept_threads import KeptThreads
from tests.process.racks import until

WAIT_S = 10.0


@pytest.fixture
def threads() -> Iterator[KeptThreads]:
    made = KeptThreads("kept")
    yield made
    made.close(WAIT_S)


def ident_of_one(threads: KeptThreads) -> int:
    """Of the thread that runs a job."""
    found, done = list[int](), threading.Event()

    def job() -> None:
        found.append(threading.get_ident())
        done.set()

    threads.run(job)
    assert done.wait(WAIT_S)
    return found[0]


def until_free(threads: KeptThreads, count: int) -> None:
    until(lambda: len(threads._free) == count, f"{count} threads wait for a job")


def test_a_later_job_gets_the_same_thread(threads: KeptThreads) -> None:
    first = ident_of_one(threads)
    until_free(threads, 1)
    assert ident_of_one(threads) == first


def test_jobs_at_once_get_threads_of_their_own(threads: KeptThreads) -> None:
    meeting = threading.Barrier(4)
    for _ in range(3):
        threads.run(meeting.wait)
    meeting.wait(WAIT_S)
    until_free(threads, 3)


def test_a_thread_without_a_job_ends_after_its_time_and_the_next_job_gets_another(
    threads: KeptThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_threads, "KEPT_S", 0.01)
    ident_of_one(threads)
    until(lambda: not threads._threads, "the thread ends")
    assert not threads._free
    ident_of_one(threads)


def test_many_jobs_around_the_end_of_threads_are_all_run(
    threads: KeptThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread whose time is over may have been given a job at that moment."""
    monkeypatch.setattr(kept_threads, "KEPT_S", 0.0005)
    ran = list[int]()
    for number in range(300):
        threads.run(lambda number=number: ran.append(number))
        time.sleep(0.0005)
    threads.close(WAIT_S)
    assert sorted(ran) == list(range(300))


def test_objects_of_a_finished_job_are_freed_while_its_thread_waits(threads: KeptThreads) -> None:
    class Held:
        def job(self) -> None:
            pass

    held = Held()
    gone = weakref.ref(held)
    threads.run(held.job)
    del held
    until_free(threads, 1)
    assert gone() is None


def test_close_ends_threads_that_wait_and_waits_for_jobs() -> None:
    threads, begun, go = KeptThreads("kept"), threading.Event(), threading.Event()
    ident_of_one(threads)

    def job() -> None:
        begun.set()
        go.wait()

    threads.run(job)
    begun.wait()
    left = tuple(threads._threads)
    threading.Timer(0.05, go.set).start()
    threads.close(WAIT_S)
    assert not any(thread.is_alive() for thread in left)
