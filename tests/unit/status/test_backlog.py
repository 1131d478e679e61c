"""What waits is bounded, in order, and says where something is missing."""

from __future__ import annotations

import gc
import threading
import weakref

from mend.status.backlog import Backlog


def backlog(most: int = 3) -> Backlog[str]:
    return Backlog(most, lambda count: f"{count} missing")


def test_items_come_in_order_and_the_end_is_empty() -> None:
    made = backlog()
    for item in "abc":
        made.put(item)
    made.end()
    assert made.take(2) == ["a", "b"]
    assert made.take(2) == ["c"]
    assert made.take(2) == []
    assert made.lost == 0


def test_items_that_do_not_fit_are_counted_and_reported_in_their_place() -> None:
    made = backlog()
    for item in "abcde":
        made.put(item)
    assert (len(made), made.lost) == (3, 2)
    assert made.take(1) == ["a"]
    made.put("f")
    assert made.take(9) == ["b", "c", "2 missing", "f"]


def test_a_gap_at_the_end_is_told_when_the_writer_is_through() -> None:
    made = backlog(1)
    made.put("a")
    made.put("b")
    assert made.take(9) == ["a"]
    assert made.take(9) == ["1 missing"]


def test_item_put_after_the_end_is_lost() -> None:
    made = backlog()
    made.end()
    made.put("late")
    assert made.lost == 1


def test_waiting_reader_is_woken_by_an_item_and_by_the_end() -> None:
    made, found = backlog(), list[list[str]]()

    def writer() -> None:
        while items := made.take(9):
            found.append(list(items))

    thread = threading.Thread(target=writer)
    thread.start()
    made.put("a")
    made.end()
    thread.join(30)
    assert found == [["a"]]


def test_abandoned_items_count_as_lost() -> None:
    made = backlog()
    made.put("a")
    made.put("b")
    made.abandon(2)
    assert (len(made), made.lost) == (0, 4)


def test_a_finalizer_may_put_while_its_own_thread_is_inside() -> None:
    """It runs wherever the last reference goes, also below a lock of the backlog; a queue.Queue
    would wait for itself for ever."""
    made = backlog(9)

    class Model:
        pass

    model = Model()
    weakref.finalize(model, made.put, "freed").atexit = False
    holder = [model]
    del model
    with made._changed:
        holder.clear()
        gc.collect()
    assert made.take(9) == ["freed"]
