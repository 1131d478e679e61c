"""Holds back the script's signal handlers while mend works on its thread.

Python runs a handler in the main thread between any two instructions. The exception that it raises
(KeyboardInterrupt, a time limit) could leave a lock taken or a fragment half applied. So handlers
wait inside `held`, and run at its end, or in a wait that calls `run_late`, where the state is
consistent.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of `signal`, whose functions make an enum of each default: 10 times as slow
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]
_NUMBERS = tuple(n for n in range(1, signal.SIGRTMIN) if n in signal.valid_signals())
"""All but real-time signals: looking at each takes time."""

_replaced: dict[int, _Handler] = {}
"""The script's handlers while they are held."""
_late: list[int] = []
"""Signals that came while handlers were held, in order."""
_inside = False


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Inside, the handlers of the script wait. At the end those of the signals that came are
    called; what they raise goes to the caller. Handlers run only in the main thread, so in any
    other thread this does nothing."""
    global _inside
    if _inside or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        _hold()
        yield
    finally:
        _release()


def run_late() -> None:
    """Call the handlers that wait, if any. Call it where they may raise."""
    if _late and threading.current_thread() is threading.main_thread():
        try:
            _release()
        finally:
            _hold()


def _hold() -> None:
    global _inside
    _inside = True
    for number in _NUMBERS:
        handler = _signal.getsignal(number)
        if callable(handler) and handler is not _note:
            _replaced[number] = handler
            _signal.signal(number, _note)


def _release() -> None:
    """Put the handlers back and call those that wait. Where one raises, go on with the rest: none
    may be left replaced, or not called."""
    global _inside
    try:
        while _replaced:
            number, handler = next(iter(_replaced.items()))
            if _signal.getsignal(number) is _note:  # else a handler has set another one
                _signal.signal(number, handler)
            del _replaced[number]
        _inside = False
        while _late:
            handler = _signal.getsignal(_late[0])
            number = _late.pop(0)
            if callable(handler):
                handler(number, sys._getframe())
    finally:
        if _replaced or _late:
            _release()


def _note(number: int, _: FrameType | None) -> None:
    _late.append(number)
