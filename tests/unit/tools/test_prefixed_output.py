"""Lines of several racks on one terminal: who said it always, colours only where somebody looks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mend.tools import prefixed_output
from mend.tools.prefixed_output import Printer, lines_to, prefix


def shown(fd: int) -> None:
    """What two processes said, through the printer of a launch."""
    with Printer(fd, "[launch]") as printer:
        sink = lines_to(printer)
        sink("rack 1", "step [bold]1[/bold]")
        sink("witness", "hello")


def test_a_file_gets_plain_prefixes(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        shown(file.fileno())
    said = (tmp_path / "out").read_text()
    assert said == "[rack 1] step [bold]1[/bold]\n[witness] hello\n"


def on_a_terminal() -> bytes:
    ours, theirs = os.openpty()
    try:
        shown(theirs)
        return os.read(ours, 1 << 16)
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_terminal_gets_a_colour_per_rack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert on_a_terminal().startswith(b"\x1b[33m[rack 1]\x1b[0m step")
    assert prefix("rack 0", colours=True) != prefix("rack 1", colours=True)


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert on_a_terminal().startswith(b"[rack 1] step")


def test_lines_that_a_reader_leaves_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefixed_output, "LINES_MAX", 600)
    ours, theirs = os.pipe()
    said: list[str] = []
    with open(ours, encoding="utf-8") as reader:
        late = threading.Thread(target=lambda: said.extend(reader))
        with Printer(theirs, "[launch]") as printer:
            for number in range(4_000):  # more than pipe and queue hold; none blocks
                printer.line(f"{number:0100}")
            late.start()
        os.close(theirs)
        late.join()
    expected, gaps = 0, 0
    for line in said:
        if gap := re.fullmatch(r'\[launch\] lines_dropped=(\d+) reason="nobody .*"\n', line):
            expected, gaps = expected + int(gap[1]), gaps + 1
        else:
            assert int(line) == expected, "in order, and a gap is told where it is"
            expected += 1
    assert gaps
    assert expected == 4_000


def test_a_reader_that_has_gone_is_no_failure() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with Printer(theirs, "[launch]") as printer:
        for _ in range(10_000):
            printer.line("x" * 1_000)
    os.close(theirs)


def test_a_reader_that_never_comes_back_keeps_no_process_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefixed_output, "LAST_WORDS_S", 0.1)
    ours, theirs = os.pipe()
    with Printer(theirs, "[launch]") as printer:
        for _ in range(1_000):
            printer.line("x" * 1_000)
    os.close(ours)  # and the thread ends
    printer._thread.join()
    os.close(theirs)


def test_closed_output_keeps_its_number_and_refuses_what_is_written() -> None:
    """What is opened next must not get its number, and with it the output."""
    code = """if True:
        import os, sys
        from mend.tools.prefixed_output import open_closed_streams
        assert open_closed_streams()
        try:
            print("lost", flush=True)
        except OSError:
            os.write(2, os.readlink("/proc/self/fd/1").encode())
        os._exit(0)
    """
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, code], stderr=subprocess.PIPE,
        text=True, check=True,
    )  # fmt: skip
    assert done.stderr == os.devnull


def test_a_stream_that_nobody_reads_does_not_change_the_exit_status() -> None:
    code = """
import sys
from mend.tools.prefixed_output import detach_broken_streams
sys.stdout.reconfigure(write_through=False)
sys.stdout.write("x")
detach_broken_streams()
sys.exit(7)
"""
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([sys.executable, "-c", code], stdout=theirs, check=False)
    os.close(theirs)
    assert done.returncode == 7


@pytest.mark.parametrize("command", ["version", "--help"])
def test_output_to_a_full_disk_is_told_in_one_line(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mend", command],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.stderr == "mend: the output cannot be written: No space left on device\n"
    assert done.returncode == 2


@pytest.mark.parametrize("command", ["version", "--help"])
def test_answer_with_closed_output_is_no_success(command: str) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m mend "$1" >&-', sys.executable, command],
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == "mend: the output cannot be written: Bad file descriptor\n"
    assert done.returncode == 2


def test_a_reader_that_has_gone_is_no_verdict() -> None:
    """`mend replay | head -1` ended with the status of a difference."""
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "mend", "version"]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
