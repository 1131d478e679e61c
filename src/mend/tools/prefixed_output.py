"""Copies lines of child processes to a terminal, file or pipe, from a thread of its own.

A slow reader never holds up the children, and a reader that has gone does not end them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from mend.status.backlog import Backlog

COLOURS = (36, 33, 35, 32, 34, 31)
"""ANSI colours of racks 0, 1, ...; then again from the start."""

DIM = 2

STDOUT = 1

LINES_MAX = 20_000
"""Lines that wait for a reader that has paused; further ones are dropped, and counted."""

LAST_WORDS_S = 30.0
"""Longest wait at the end for a reader to take what is left."""

AGAIN_S = 0.05
"""Pause between two attempts to write to a descriptor that is non-blocking for another process."""


class Printer:
    """Writes lines to a file descriptor from a thread of its own, so that `line` never blocks.

    `who` begins the line that says how many were dropped. Once the reader has gone (`| head -1`, a
    terminal that was closed), lines go nowhere. Use it as a context.
    """

    def __init__(self, fd: int, who: str) -> None:
        self.fd = fd
        gap = f'{who} lines_dropped={{}} reason="nobody read them in time"\n'
        self._waiting: Backlog[bytes] = Backlog(LINES_MAX, lambda n: gap.format(n).encode())
        # Daemon: one that is stuck in a write must not keep the process.
        self._thread = threading.Thread(target=self._write_all, name="mend-printer", daemon=True)
        self._thread.start()

    def line(self, text: str) -> None:
        """Any thread; in the order of the calls."""
        self._waiting.put(f"{text}\n".encode(errors="replace"))

    def _write_all(self) -> None:
        while lines := self._waiting.take(1):
            if not _write(self.fd, lines[0]):
                self._waiting.end()
                self._waiting.abandon()
                return

    def __enter__(self) -> Printer:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until the reader has all, LAST_WORDS_S at most, or until the next Ctrl-C."""
        self._waiting.end()
        with suppress(KeyboardInterrupt):
            self._thread.join(LAST_WORDS_S)


def _write(fd: int, data: bytes) -> bool:
    """Write all of it, however long that takes. False: nobody reads any more."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            time.sleep(AGAIN_S)
        except OSError:  # EPIPE: the reader has gone; EIO: so has the terminal
            return False
    return True


def open_closed_streams() -> bool:
    """Open the standard streams that were closed at the start (`>&-`): else the next sockets and
    files get their numbers, and output goes there. What is written to a closed standard output
    fails (EBADF), as an answer that nobody gets is not a success. Returns whether it was closed."""
    closed = sys.stdout is None
    for name, mode, flags in (
        ("stdin", "r", os.O_RDWR),
        ("stdout", "w", os.O_RDONLY),
        ("stderr", "w", os.O_RDWR),
    ):
        if getattr(sys, name) is None:
            # os.open takes the lowest free number.
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))
    return closed


def detach_broken_streams() -> None:
    """Point a standard stream that cannot be written any more to nowhere: what is left in it would
    fail when the program ends, and change its exit status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def prefix(who: str, *, colours: bool) -> str:
    """`[rack 0] `; in colours when the reader is a terminal."""
    if not colours:
        return f"[{who}] "
    number = who.removeprefix("rack ")
    code = COLOURS[int(number) % len(COLOURS)] if number.isdigit() else DIM
    return f"\x1b[{code}m[{who}]\x1b[0m "


def lines_to(printer: Printer) -> Callable[[str, str], None]:
    """A sink for `launch`: colours only on a terminal, and not when NO_COLOR is set."""
    colours = os.isatty(printer.fd) and not os.environ.get("NO_COLOR")

    def sink(who: str, line: str) -> None:
        printer.line(f"{prefix(who, colours=colours)}{line}")

    return sink
