"""Threads that do jobs, end in time, and whose owner may be closed from any of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mend.engine.compute.threads import DaemonExecutor, from_outside


@pytest.fixture
def hands() -> Iterator[DaemonExecutor]:
    made = DaemonExecutor(2, "mend-test", lambda: None)
    yield made
    assert made.close(30) == []


def test_jobs_have_results_and_errors(hands: DaemonExecutor) -> None:
    def broken() -> int:
        raise ZeroDivisionError("a bug")

    assert [hands.submit(lambda n=n: n * n).result(30) for n in range(5)] == [0, 1, 4, 9, 16]
    with pytest.raises(ZeroDivisionError, match="a bug"):
        hands.submit(broken).result(30)
    assert hands.submit(lambda: 7).result(30) == 7, "an error ends no thread"


def test_every_thread_begins_as_it_was_told() -> None:
    begun, both = list[str](), threading.Barrier(3, timeout=30)

    def begin() -> None:
        begun.append(threading.current_thread().name)
        both.wait()

    made = DaemonExecutor(2, "mend-test", begin)
    made.submit(lambda: None)
    both.wait()
    assert made.close(30) == []
    assert sorted(begun) == ["mend-test_0", "mend-test_1"]


def test_the_end_cancels_what_has_not_begun_and_tells_what_does_not_end() -> None:
    """A pool of concurrent.futures waited for it, and the process after it, for ever."""
    made = DaemonExecutor(1, "mend-test", lambda: None)
    begun, release = threading.Event(), threading.Event()

    def long() -> str:
        begun.set()
        release.wait(30)
        return "done"

    running, waiting = made.submit(long), made.submit(lambda: None)
    assert begun.wait(30)
    assert made.close(0.01) == ["mend-test_0"]
    assert waiting.cancelled()
    assert made.submit(lambda: None).cancelled()
    assert all(thread.daemon for thread in made._threads), "they keep no process"
    release.set()
    assert running.result(30) == "done"
    assert made.close(30) == []


def test_a_job_that_comes_while_another_thread_closes_is_cancelled() -> None:
    """A checkpoint that was begun while `abort` ran in another thread was neither written nor
    cancelled, and the end of the script waited for it for ever."""

    class Closing(DaemonExecutor):
        def _start(self) -> None:
            self.close(0.0)  # as another thread may, between the look and the queue

    assert Closing(1, "mend-test", lambda: None).submit(lambda: None).cancelled()


def test_a_job_leaves_nothing_behind_in_its_thread(hands: DaemonExecutor) -> None:
    """What a job holds is freed when it is done, not when the next one comes."""
    import weakref

    class Model:
        pass

    model = Model()
    gone, freed = weakref.ref(model), threading.Event()
    weakref.finalize(model, freed.set).atexit = False
    hands.submit(lambda model=model: None).result(30)
    del model
    assert freed.wait(30)
    assert gone() is None


def test_executor_closed_from_its_own_thread_is_closed_by_another_thread() -> None:
    by, closed = list[str](), threading.Event()
    made = DaemonExecutor(1, "mend-test", lambda: None)

    def close() -> None:
        by.append(threading.current_thread().name)
        assert made.close(30) == []
        closed.set()

    made.submit(lambda: from_outside(close))
    assert closed.wait(30)
    assert by == ["mend-end"]
    from_outside(close)
    assert by[1:] == [threading.current_thread().name]


def test_threads_start_with_the_first_job() -> None:
    """The witness has no jobs; its worker loaded torch beside what it was doing, and ended it."""
    begun: list[str] = []
    hands = DaemonExecutor(2, "mend-test", lambda: begun.append("begun"))
    assert hands.close(1.0) == []
    assert begun == []
    hands = DaemonExecutor(2, "mend-test", lambda: begun.append("begun"))
    assert hands.submit(lambda: 5).result(10) == 5
    assert hands.close(10.0) == []
    assert begun == ["begun"] * 2
