"""Calls the handlers of the logger in a separate thread.

A handler may write to a pipe without a reader (`docker logs`, a paused terminal) and block there
while it holds its lock. So training threads never log: this thread does, and it writes only as much
as the handlers' streams take at once. Lines that do not fit are counted, and reported afterwards.
"""

from __future__ import annotations

import logging
import select
import threading
import time

from mend.events.base import log_text
from mend.events.kinds import LogLost
from mend.status.backlog import Backlog

logger = logging.getLogger("mend")

LINES_MAX = 1_000
"""Lines that wait for a reader; further ones are lost."""

LINE_CHARS_MAX = 3_000
"""A pipe that is ready takes at least a page, so a line of this length never blocks. Longer ones
are cut; the events file has them whole."""

LOOK_MS = 100
"""Time between two checks whether this process is exiting, while a pipe is full."""

CLOSE_S = 5.0
"""Longest time at the end to write waiting lines, while there is a reader."""

STUCK_S = 1.0
"""Longest wait at the end for a reader that takes nothing."""


class LogLines:
    """`who`: begins the line that reports lost ones."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._backlog: Backlog[logging.LogRecord] = Backlog(LINES_MAX, self._gap)
        self._give_up_s: float | None = None
        self._thread = threading.Thread(target=self._write, name="mend-log", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Lines that were dropped."""
        return self._backlog.lost

    def say(self, level: int, text: str) -> None:
        """Any thread. Never blocks. The caller checks that the level is enabled."""
        self._backlog.put(_record(level, text))

    def close(self) -> None:
        """Write the lines that wait while a reader takes them, for at most CLOSE_S. Idempotent."""
        self._give_up_s = time.monotonic() + STUCK_S
        self._backlog.end()
        self._thread.join(CLOSE_S)

    def _gap(self, count: int) -> logging.LogRecord:
        return _record(logging.WARNING, f"mend {self._who} {log_text(LogLost(count))}")

    # -------------------------------------------------------------- its own thread

    def _write(self) -> None:
        while records := self._backlog.take(1):
            if not self._handle(records[0]):
                self._backlog.lost += 1
            if self._stuck():
                self._backlog.abandon()

    def _handle(self, record: logging.LogRecord) -> bool:
        """Call the handlers; return whether they took the record. An exception of theirs loses one
        line."""
        if not all(self._takes(descriptor) for descriptor in _descriptors(record.levelno)):
            return False
        try:
            logger.handle(record)
        except Exception:
            return False
        if self._give_up_s is not None:
            self._give_up_s = time.monotonic() + STUCK_S
        return True

    def _takes(self, descriptor: int) -> bool:
        """Wait until it takes a line. False: it has no reader any more, or the process ends."""
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        while not (ready := poll.poll(LOOK_MS)):
            if self._stuck():
                return False
        ((_, event),) = ready
        return event == select.POLLOUT

    def _stuck(self) -> bool:
        return self._give_up_s is not None and time.monotonic() > self._give_up_s


def _record(level: int, text: str) -> logging.LogRecord:
    """A log record, made when the event happens, so that it has its time."""
    if len(text) > LINE_CHARS_MAX:
        text = f"{text[:LINE_CHARS_MAX]} ... ({len(text) - LINE_CHARS_MAX} characters more)"
    return logger.makeRecord(logger.name, level, __file__, 0, text, (), None)


def _descriptors(level: int) -> list[int]:
    """File descriptors that the handlers of a line write to, as far as they are known."""
    handlers: list[logging.Handler] = []
    at: logging.Logger | None = logger
    while at is not None:
        handlers += at.handlers
        at = at.parent if at.propagate else None
    if not handlers and logging.lastResort is not None:
        handlers = [logging.lastResort]
    descriptors = []
    for handler in handlers:
        stream = getattr(handler, "stream", None)
        if stream is None or level < handler.level:
            continue
        try:
            descriptors.append(stream.fileno())
        except (AttributeError, OSError, ValueError):  # it is in memory, or closed
            continue
    return descriptors
