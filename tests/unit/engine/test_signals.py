"""When the handlers of a script run."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from mend.engine.hooks import signals

FIRST, SECOND = signal.SIGUSR1, signal.SIGUSR2


class Told(Exception):
    """What the handlers raise."""


@pytest.fixture
def came() -> Iterator[list[int]]:
    """The signals whose handlers ran; each raises."""
    found: list[int] = []

    def handler(number: int, _: object) -> None:
        found.append(number)
        raise Told(number)

    before = {number: signal.signal(number, handler) for number in (FIRST, SECOND)}
    yield found
    for number, one in before.items():
        assert signal.getsignal(number) is handler, "it is in place again"
        signal.signal(number, one)


def test_a_handler_runs_at_the_end_and_what_it_raises_is_raised(came: list[int]) -> None:
    heard: list[int] = []
    with contextlib.suppress(Told), signals.held():
        signal.raise_signal(FIRST)
        with signals.held():
            signal.raise_signal(FIRST)
        heard += [*came, 0]
    assert heard == [0]
    assert came == [FIRST, FIRST]


def test_every_handler_runs_although_the_first_one_raises(came: list[int]) -> None:
    with contextlib.suppress(Told), signals.held():
        signal.raise_signal(SECOND)
        signal.raise_signal(FIRST)
    assert came == [SECOND, FIRST]
    with pytest.raises(Told):
        signal.raise_signal(FIRST)


def test_a_wait_lets_them_run_and_holds_later_ones_again(came: list[int]) -> None:
    with contextlib.suppress(Told), signals.held():
        signals.run_late()
        signal.raise_signal(FIRST)
        with pytest.raises(Told):
            signals.run_late()
        signal.raise_signal(SECOND)
        assert came == [FIRST]
    assert came == [FIRST, SECOND]


def test_a_handler_may_set_another_one(came: list[int]) -> None:
    """As a first Ctrl-C does, so that the second one kills."""
    before = signal.getsignal(FIRST)
    heard: list[int] = []

    def once(*_: object) -> None:
        signal.signal(FIRST, later)

    def later(number: int, _: object) -> None:
        heard.append(number)

    signal.signal(FIRST, once)
    with signals.held():
        signal.raise_signal(FIRST)
        signals.run_late()
        signal.raise_signal(FIRST)
        assert heard == []
    assert heard == [FIRST]
    assert signal.getsignal(FIRST) is later
    signal.signal(FIRST, before)
    assert came == []


def test_handlers_run_in_the_main_thread_only_so_others_hold_nothing(came: list[int]) -> None:
    before = signal.getsignal(FIRST)
    found: list[object] = []

    def look() -> None:
        with signals.held():
            found.append(signal.getsignal(FIRST))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
    assert came == []


def test_error_raised_while_signals_are_held_is_raised(came: list[int]) -> None:
    def fails() -> None:
        with signals.held():
            raise ValueError

    body: Callable[[], None] = fails
    with pytest.raises(ValueError):
        body()
    assert came == []
