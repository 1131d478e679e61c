"""A host without an address is named, once; a broken rule stops the loop without a word."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from mend.engine.io.io_loop import IoLoop, IoLoopOptions
from mend.errors import GaveUp, InvariantError, MendError, ensure
from mend.status.event_log import EventLog
from mend.types import SECOND, Member, Peer
from tests.noted import pair


def test_a_host_without_an_address_is_named_with_the_remedy() -> None:
    """ZeroMQ tries for ever without a word: the log had `hello` and nothing else."""
    notes: list[tuple[str, dict[str, object]]] = []
    peers = ("tcp://127.0.0.1:21900", "tcp://no..host:21901", "tcp://no..host:21902", "")
    loop: Any = SimpleNamespace(
        options=SimpleNamespace(peers=peers, socks_proxy=""),
        note=lambda event: notes.append(pair(event)),
        _closing=False,
    )
    IoLoop._look_up(loop)
    ((kind, fields),) = notes
    assert (kind, fields) == ("name-unknown", {"host": "no..host"})


class Machines:
    """As the machines of a process, which have nothing to do."""

    def __init__(self) -> None:
        self.failures: list[MendError] = []

    def deadline_ns(self) -> int | None:
        return None

    def crashed(self, error: MendError) -> None:
        self.failures.append(error)


def loop_alone() -> IoLoop:
    options = IoLoopOptions("tcp://127.0.0.1:0", "127.0.0.1", "", None, SECOND)
    return IoLoop(Peer(0, 0), Member(0, 1), "job", options, EventLog({"rack": 0, "rank": 0}, None))


@contextlib.contextmanager
def running() -> Iterator[IoLoop]:
    loop = loop_alone()
    try:
        yield loop
    finally:
        loop.close()
        loop.recorder.close()


def break_on_loop(loop: IoLoop) -> None:
    loop.call(lambda: ensure(False, "planted", seq=3))
    loop._thread.join(20)


def break_elsewhere(loop: IoLoop) -> None:
    loop.break_off(InvariantError("planted", {"seq": 3}))


@pytest.mark.parametrize("find", [break_on_loop, break_elsewhere])
def test_broken_invariant_stops_the_loop_without_a_farewell(find: Any) -> None:
    notes: list[tuple[str, dict[str, object]]] = []
    loop = loop_alone()
    loop.note = lambda event: notes.append(pair(event))
    machines, farewells = Machines(), list[str]()
    try:
        loop.attach(machines)
        find(loop)
        find(loop)
        assert not loop._thread.is_alive()
    finally:
        loop.close(lambda: farewells.append("farewell"))
        loop.recorder.close()
    (failure,) = machines.failures
    assert isinstance(failure, InvariantError)
    assert not isinstance(failure, GaveUp)
    assert [kind for kind, _ in notes] == ["invariant-broken"]
    assert "planted (seq=3)" in str(notes[0][1]["detail"])
    assert farewells == []
    assert loop.done.is_set()


def test_call_that_is_not_urgent_waits_for_the_next_one_and_keeps_its_place() -> None:
    """A wake-up of the loop takes the interpreter's lock from the training thread."""
    came, over, woken = list[str](), threading.Event(), list[object]()
    with running() as loop:
        wake = loop._loop.call_soon_threadsafe
        loop._loop.call_soon_threadsafe = lambda *job: woken.append(job) or wake(*job)
        loop.call(lambda: came.append("first"), soon=False)
        loop.call(lambda: came.append("second"), soon=False)
        assert woken == []
        loop.call(over.set)
        assert over.wait(20)
        assert came == ["first", "second"]
        assert len(woken) == 1


def test_calls_of_one_moment_share_a_wake_up() -> None:
    came, over, woken = list[int](), threading.Event(), list[object]()
    held, goes_on = threading.Event(), threading.Event()
    with running() as loop:
        loop.call(lambda: (held.set(), goes_on.wait(20)))
        assert held.wait(20)
        wake = loop._loop.call_soon_threadsafe
        loop._loop.call_soon_threadsafe = lambda *job: woken.append(job) or wake(*job)
        for number in range(5):
            loop.call(partial(came.append, number))
        loop.call(over.set)
        goes_on.set()
        assert over.wait(20)
        assert came == [0, 1, 2, 3, 4]
        assert len(woken) == 1


def test_timer_is_set_again_only_when_a_deadline_has_moved() -> None:
    machines, over, set_to = Machines(), threading.Event(), list[float]()
    with running() as loop:
        later = loop._loop.call_later
        loop._loop.call_later = lambda s, *job: set_to.append(s) or later(s, *job)
        due_ns = loop.now_ns() + 1000 * SECOND
        machines.deadline_ns = lambda: due_ns
        loop.attach(machines)
        for _ in range(3):
            loop.call(lambda: None)
        loop.call(over.set)
        assert over.wait(20)
        assert len(set_to) == 1
