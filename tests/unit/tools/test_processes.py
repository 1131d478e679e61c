"""A child of the launcher: its lines, its log, and what stops neither of them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from mend.errors import ConfigError
from mend.tools.processes import READ_BYTES, READS_MAX, Child, Interrupts


def run(code: str, log: Path | None, *, again: bool = False) -> list[tuple[str, str]]:
    """All that a process says, by who says it."""
    said: list[tuple[str, str]] = []
    command = [sys.executable, "-c", code]
    child = Child("rack 0", command, os.environ, lambda *line: said.append(line), log, again=again)
    while child.running():
        child.read()
    child.close()
    assert child.process.returncode == 0
    return said


def test_a_second_life_goes_on_in_the_log_of_the_first(tmp_path: Path) -> None:
    log = tmp_path / "rack0.log"
    run("print('first')", log)
    run("print('second')", log, again=True)
    assert log.read_text() == "first\nsecond\n"
    run("print('another launch')", log)
    assert log.read_text() == "another launch\n"


def test_a_log_on_a_full_disk_ends_and_its_process_does_not() -> None:
    said = run("for i in range(3): print(i, flush=True)", Path("/dev/full"))
    assert [line for _, line in said if line.isdigit()] == ["0", "1", "2"]
    (stopped,) = [line for _, line in said if line.startswith("log-stopped")]
    assert stopped.startswith("log-stopped path=/dev/full reason=[Errno 28]")


def test_a_log_that_cannot_be_opened_is_refused_at_first_and_later_done_without(
    tmp_path: Path,
) -> None:
    """It ended the whole job when the folder was gone by the time that a rack was started again."""
    log = tmp_path / "gone" / "rack0.log"
    with pytest.raises(ConfigError, match=r"--log-dir=.*rack0\.log.*No such file"):
        run("print('first')", log)
    stopped, second = (line for _, line in run("print('second')", log, again=True))
    assert stopped.startswith(f"log-stopped path={log} reason=[Errno 2]")
    assert second == "second"


def test_a_process_that_talks_without_end_leaves_the_launcher_its_turn() -> None:
    said: list[str] = []
    code = "while True: print('x' * 1000)"
    child = Child(
        "rack 0", [sys.executable, "-c", code], os.environ, lambda _, s: said.append(s), None
    )
    try:
        for _ in range(3):
            said.clear()
            child.read()  # returns, though there is always more
            assert sum(map(len, said)) <= READS_MAX * READ_BYTES
    finally:
        child.signal(signal.SIGKILL)
        child.close()


@pytest.mark.parametrize("ignored", [False, True], ids=["terminal", "nohup"])
def test_a_terminal_that_closes_interrupts_unless_nohup_says_otherwise(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        interrupts = Interrupts()
        with interrupts.caught():
            signal.raise_signal(signal.SIGHUP)
        assert interrupts.first == (0 if ignored else signal.SIGHUP)
        now = signal.getsignal(signal.SIGHUP)
        assert now is (signal.SIG_IGN if ignored else signal.SIG_DFL), "as it was"
    finally:
        signal.signal(signal.SIGHUP, before)
