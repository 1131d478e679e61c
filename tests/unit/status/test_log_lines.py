"""Lines reach who reads them, and hold up nobody where nobody does. Over real pipes."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from mend.events.base import log_text
from mend.events.kinds import LogLost
from mend.status import log_lines as module
from mend.status.log_lines import LINE_CHARS_MAX, LogLines

F_SETPIPE_SZ, PAGE = 1031, 4096


class Pipe:
    """Where the log goes: the smallest pipe there is, full, and nobody reads."""

    def __init__(self, *, full: bool = True) -> None:
        self.reading, self.writing = os.pipe()
        fcntl.fcntl(self.writing, F_SETPIPE_SZ, PAGE)
        self.handler = logging.StreamHandler(os.fdopen(self.writing, "w"))
        self.filled = b"x" * PAGE + b"\n" if full else b""
        if full:
            os.write(self.writing, b"x" * PAGE)

    def text(self) -> str:
        """All that was written, once the writer is through."""
        found = bytearray()
        while chunk := os.read(self.reading, PAGE):
            found += chunk
        return found.decode().lstrip("x")


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    module.logger.addHandler(made.handler)
    module.logger.propagate = False
    yield made
    module.logger.propagate = True
    module.logger.removeHandler(made.handler)
    os.close(made.reading)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging, "raiseExceptions", False)
        made.handler.stream.close()


def read_to_the_end(pipe: Pipe, lines: LogLines) -> list[str]:
    """The reader is back: what it reads until the log is closed."""
    found = list[str]()
    reader = threading.Thread(target=lambda: found.append(pipe.text()))
    reader.start()
    lines.close()
    os.dup2(os.open(os.devnull, os.O_WRONLY), pipe.writing)  # the end of the pipe
    reader.join(30)
    return found[0].splitlines()


def test_lines_that_nobody_reads_wait_and_come_in_order(pipe: Pipe) -> None:
    lines = LogLines("rack=1 rank=0")
    for number in range(100):
        lines.say(logging.WARNING, f"line {number}")
    assert read_to_the_end(pipe, lines) == [f"line {number}" for number in range(100)]
    assert lines.lost == 0


def test_lines_that_do_not_fit_are_counted_and_reported_when_the_reader_is_back(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINES_MAX", 3)
    lines = LogLines("rack=1 rank=0")
    for number in range(40):
        lines.say(logging.WARNING, f"line {number}")
    lost = lines.lost
    assert 36 <= lost <= 37, "three wait, and one perhaps is in the writer's hand"
    kept = [f"line {number}" for number in range(40 - lost)]
    said = f"mend rack=1 rank=0 {log_text(LogLost(lost))}"
    assert read_to_the_end(pipe, lines) == [*kept, said]


def test_the_end_does_not_wait_for_who_reads_nothing(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STUCK_S", 0.01)
    lines = LogLines("rack=1 rank=0")
    for number in range(10):
        lines.say(logging.WARNING, f"line {number}")
    lines.close()
    assert lines.lost == 10
    assert not lines._thread.is_alive(), "it waits in no write, so it holds no handler's lock"
    assert pipe.handler.lock is not None
    assert pipe.handler.lock.acquire(blocking=False)
    pipe.handler.lock.release()


def test_a_reader_that_is_gone_costs_lines_and_nothing_else(pipe: Pipe) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, pipe.reading)
    os.close(null)
    lines = LogLines("rack=1 rank=0")
    for number in range(10):
        lines.say(logging.WARNING, f"line {number}")
    lines.close()
    assert lines.lost == 10


def test_a_handler_that_raises_costs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    class Picky(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if "b" in record.getMessage():
                raise ZeroDivisionError("a bug of the user's")
            return True

    picky = Picky()
    module.logger.addFilter(picky)
    try:
        lines = LogLines("rack=1 rank=0")
        for text in "abc":
            lines.say(logging.WARNING, text)
        lines.close()
    finally:
        module.logger.removeFilter(picky)
    assert [record.getMessage() for record in caplog.records] == ["a", "c"]
    assert lines.lost == 1


def test_a_handler_of_a_higher_level_is_not_waited_for(
    pipe: Pipe, caplog: pytest.LogCaptureFixture
) -> None:
    module.logger.addHandler(caplog.handler)
    pipe.handler.setLevel(logging.ERROR)
    try:
        lines = LogLines("rack=1 rank=0")
        lines.say(logging.WARNING, "no error")
        lines.close()
    finally:
        module.logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records] == ["no error"]


def test_a_line_that_a_page_does_not_take_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    lines = LogLines("rack=1 rank=0")
    lines.say(logging.WARNING, "x" * (LINE_CHARS_MAX + 7))
    lines.close()
    (record,) = caplog.records
    assert record.getMessage() == "x" * LINE_CHARS_MAX + " ... (7 characters more)"


def test_line_that_is_taken_extends_the_wait_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow reader gets all lines, as long as it takes one within STUCK_S."""
    lines = LogLines("rack=1 rank=0")
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 50.0))
    monkeypatch.setattr(lines, "_takes", lambda descriptor: True)
    record = logging.LogRecord("mend", logging.DEBUG, "", 0, "a line", None, None)
    assert lines._handle(record)
    assert lines._give_up_s is None, "nobody waits for the end yet"
    lines._give_up_s = 50.5
    assert lines._handle(record)
    assert lines._give_up_s == 50.0 + module.STUCK_S
    monkeypatch.undo()
    lines.close()
