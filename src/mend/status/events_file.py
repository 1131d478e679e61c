"""Writes events as lines of JSON, in a separate thread.

A disk that is full or hangs delays no other thread: up to QUEUE_MAX events wait, and writing
continues once there is space. A removed file is detected and created again.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from mend.errors import diagnostics_remedy
from mend.events.base import LoggedEvent, kind_of
from mend.events.kinds import (
    EventsAnew,
    EventsCut,
    EventsLost,
    EventsResumed,
    EventsStopped,
    ProcessStarted,
)
from mend.events.lines import TimedEvent, encode_line
from mend.status.backlog import Backlog
from mend.status.wall_clock import wall_ns

Say = Callable[[LoggedEvent, int], None]
"""Takes an event and its wall time, for the log."""

QUEUE_MAX = 10_000
"""Events that wait for a disk; further ones are lost."""

BATCH = 256
BYTES_MAX = 256 << 20
"""Limit of the file of one process and its older half together. Beyond it the older half is
deleted."""

RETRY_S = 1.0
"""Time between two attempts to write a file."""

CLOSE_S = 5.0
_START = b'{"kind":"%s"' % kind_of(ProcessStarted).encode()


class EventsFile:
    """`say` writes to the log; called from the writer's thread."""

    def __init__(self, path: Path, say: Say) -> None:
        self._path, self._say = path, say
        self._backlog: Backlog[TimedEvent] = Backlog(QUEUE_MAX, _gap)
        self._file = _File(path, BYTES_MAX // 2)
        self._failing, self._in_hand = False, 0
        self._thread = threading.Thread(target=self._write, name="mend-recorder", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Events that are not in the file: lost, or waiting while it cannot be written."""
        waiting = self._in_hand + len(self._backlog) if self._failing else 0
        return self._backlog.lost + waiting

    def put(self, timed: TimedEvent) -> None:
        """Any thread. Never blocks."""
        self._backlog.put(timed)

    def close(self) -> None:
        """Write the events that wait, for at most CLOSE_S. Idempotent."""
        self._backlog.end()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._report(EventsLost(len(self._backlog), "the disk hangs"))
            self._backlog.abandon()

    # -------------------------------------------------------------- its own thread

    def _write(self) -> None:
        self._written([])  # a folder that cannot be made is reported at once
        while events := self._backlog.take(BATCH):
            lines = [encode_line(timed) for timed in events]
            while not self._written(lines):
                if self._backlog.over:
                    self._give_up(len(lines))
                    break
                self._backlog.pause(RETRY_S)
        with contextlib.suppress(OSError):
            if self._file.gone():
                self._again()
        self._file.close()

    def _written(self, lines: Sequence[bytes]) -> bool:
        self._in_hand = len(lines)
        try:
            if self._file.gone():
                self._again()
            self._file.append(lines)
        except OSError as error:
            if not self._failing:
                self._failing = True  # set before the line, whose reader may check it
                remedy = diagnostics_remedy(error)
                self._report(EventsStopped(str(self._path), str(error), remedy))
            return False
        if self._failing:
            self._failing = False
            self._report(EventsResumed(str(self._path), self._backlog.lost))
        return True

    def _again(self) -> None:
        anew = EventsAnew(str(self._path), "the file was removed")
        self._file.again(_line(anew))
        self._report(anew)

    def _give_up(self, taken: int) -> None:
        count = taken + len(self._backlog)
        self._failing = False
        self._backlog.abandon(taken)
        self._report(EventsLost(count, "the file could not be written"))

    def _report(self, event: LoggedEvent) -> None:
        self._say(event, wall_ns())


class _File:
    """One file that grows, with its older half beside it. Its methods raise OSError."""

    def __init__(self, path: Path, half_bytes: int) -> None:
        self._path, self._half_bytes = path, half_bytes
        self._older = older_of(path)
        self._raw: io.FileIO | None = None
        self._size, self._regular = 0, True
        self._removed = False
        self._first = self._start = b""
        """Of this life the first line, and the one that says what job the file is of."""

    def append(self, lines: Sequence[bytes]) -> None:
        """Append all lines, or none if the file can be shortened again."""
        data = b"".join(lines)
        raw = self._open()
        if self._regular and self._size and self._size + len(data) > self._half_bytes:
            raw = self._halve()
        elif self._regular and not self._size:
            data = self._head + data  # the disk was full when the file was halved
        self._put(raw, data)
        self._first = self._first or b"".join(lines[:1])
        self._start = next((each for each in lines if each.startswith(_START)), self._start)

    @property
    def _head(self) -> bytes:
        """Begins each file of this life."""
        return self._first if self._first == self._start else self._first + self._start

    def gone(self) -> bool:
        """Return whether the open file was removed or replaced."""
        if self._raw is not None and not self._removed:
            try:
                there = os.path.samestat(os.stat(self._path), os.fstat(self._raw.fileno()))
            except FileNotFoundError:
                there = False
            self._removed = not there
        return self._removed

    def again(self, line: bytes) -> None:
        """Create the file again, with its first lines and this one."""
        self.close()
        self._put(self._open(), self._head + line)
        self._removed = False

    def close(self) -> None:
        if self._raw is not None:
            raw, self._raw = self._raw, None
            with contextlib.suppress(OSError):
                raw.close()

    def _open(self) -> io.FileIO:
        if self._raw is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._raw = io.FileIO(self._path, "a")
            state = os.fstat(self._raw.fileno())
            self._size, self._regular = state.st_size, stat.S_ISREG(state.st_mode)
        return self._raw

    def _halve(self) -> io.FileIO:
        self.close()
        cut = EventsCut(str(self._older))
        lines = [self._head, _line(cut)] if self._older.exists() else [self._head]
        self._path.replace(self._older)
        raw = self._open()
        self._put(raw, b"".join(lines))
        return raw

    def _put(self, raw: io.FileIO, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[raw.write(rest) or 0 :]
        except OSError:
            with contextlib.suppress(OSError):  # half a line would spoil the next one
                raw.truncate(self._size)
            self.close()
            raise
        self._size += len(data)


def older_of(path: Path) -> Path:
    """Path of the file's older half."""
    return path.with_name(f"{path.stem}.older.jsonl")


def _gap(count: int) -> TimedEvent:
    return TimedEvent(wall_ns(), EventsLost(count))


def _line(event: LoggedEvent) -> bytes:
    return encode_line(TimedEvent(wall_ns(), event))
