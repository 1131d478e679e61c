"""What reads a job's output may stop reading, or go: the job goes on, and its status is true."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.conftest import Jobs
from tests.process.racks import LIMIT_S, Nursery, environment, until

CONFIG: dict[str, Any] = {"fragments": 2, "sync_period_steps": 8, "overlap_steps": 2}

LINES = 40_000
"""Of 100 bytes and more, from each of two racks: more than a pipe and the launcher's backlog."""

TALK = """
import os, pathlib, sys, time
lines, folder, code = int(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
rack = os.environ["MEND_RACK"]
for number in range(lines):
    print("line", number, "x" * 100)
(folder / f"printed{rack}").touch()
while not (folder / "gate").exists():
    time.sleep(0.01)
print("the end")
sys.exit(code if rack == "1" else 0)
"""

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Iterator[Start]:
    """`mend launch` of a script that talks; it goes on when the file `gate` is there."""
    (tmp_path / "talk.py").write_text(TALK)
    started: list[subprocess.Popen[bytes]] = []

    def begin(*, lines: int = 3, code: int = 0, shell: str = "", **how: Any) -> Any:
        command = [
            *(nursery.python, "-m", "mend.tools", "launch", "--no-witness"),
            *("--log-dir", str(tmp_path / "logs"), str(tmp_path / "talk.py")),
            *(str(lines), str(tmp_path), str(code)),
        ]
        whole = ["bash", "-c", f"{shlex.join(command)} {shell}"] if shell else command
        started.append(subprocess.Popen(whole, env=environment(), **how))
        return started[-1]

    yield begin
    for each in started:
        each.kill()
        each.wait()
        if each.stdout is not None:
            each.stdout.close()


def printed(folder: Path) -> None:
    until(lambda: all((folder / f"printed{rack}").exists() for rack in (0, 1)), "racks print")


def logs_are_whole(folder: Path, lines: int) -> None:
    for rack in (0, 1):
        said = (folder / "logs" / f"rack{rack}.log").read_text().splitlines()
        wanted = [f"line {number} {'x' * 100}" for number in range(lines)]
        assert [line for line in said if line.startswith("line ")] == wanted
        assert "the end" in said


@pytest.mark.parametrize(("streams", "code"), [("", 0), ("2>&1", 7)])
def test_a_launch_goes_on_when_its_reader_has_gone(
    start: Start, tmp_path: Path, streams: str, code: int
) -> None:
    """`mend launch | head -1` raised BrokenPipeError and killed all racks."""
    shell = f"{streams} | head -1; exit ${{PIPESTATUS[0]}}"
    launcher = start(code=code, shell=shell, stdout=subprocess.PIPE)
    printed(tmp_path)
    (tmp_path / "gate").touch()
    out, _ = launcher.communicate(timeout=LIMIT_S)
    assert re.fullmatch(rb"\[launch\] started .*\n", out)
    assert launcher.returncode == code
    logs_are_whole(tmp_path, 3)


def test_a_reader_that_pauses_holds_nobody_up(start: Start, tmp_path: Path) -> None:
    """The launcher stopped reading its racks, which then stood in `print`."""
    launcher = start(lines=LINES, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed(tmp_path)  # though nobody has read a line so far
    assert launcher.poll() is None
    assert launcher.stdout is not None
    (tmp_path / "gate").touch()
    said = launcher.stdout.read()
    assert launcher.wait(LIMIT_S) == 0
    dropped = re.findall(rb"\[launch\] lines_dropped=(\d+)", said)
    shown = len(re.findall(rb"\] line \d+ x", said))
    assert shown + sum(map(int, dropped)) >= 2 * LINES, "what is missing was counted"
    assert shown < 2 * LINES
    logs_are_whole(tmp_path, LINES)


def test_a_launch_under_nohup_outlives_its_terminal(start: Start, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    launcher = start(
        stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    os.close(theirs)
    assert b"[launch]" in os.read(ours, 1 << 16)
    os.close(ours)
    launcher.send_signal(signal.SIGHUP)
    printed(tmp_path)
    (tmp_path / "gate").touch()
    assert launcher.wait(LIMIT_S) == 0
    logs_are_whole(tmp_path, 3)


@pytest.mark.parametrize("streams", ["", "2>&1"])
def test_a_witness_goes_on_when_its_reader_has_gone(jobs: Jobs, streams: str) -> None:
    """`mend coordinate | head -1` died of a BrokenPipeError at the first hello. The rack that is
    refused makes it warn on stderr as well."""
    job = jobs()
    job.unjudged = "the witness keeps no tape"
    job.witness_address = job.addresses[2]
    witness = [
        *(sys.executable, "-m", "mend.tools", "coordinate", "--bind", job.witness_address),
        *("--racks", "2", "--job-id", job.name),
    ]
    shell = f"{shlex.join(witness)} {streams} | head -1; exit ${{PIPESTATUS[0]}}"
    started = subprocess.Popen(["bash", "-c", shell], env=environment(), stdout=subprocess.PIPE)
    try:
        job.start(0, config=CONFIG)
        job.start(1, config={**CONFIG, "fragments": 1})
        assert job.ended(1) == 1
        job.start(1, config=CONFIG)
        job.finish()
        out, _ = started.communicate(timeout=LIMIT_S)
    finally:
        started.kill()
        started.wait()
        assert started.stdout is not None
        started.stdout.close()
    assert out.startswith(b"mend witness listening")
    assert started.returncode == 0
    results = [job.result(rack) for rack in range(2)]
    assert results[0].weights == results[1].weights
    assert all(result.status["ledger"]["open"] == 0 for result in results)
