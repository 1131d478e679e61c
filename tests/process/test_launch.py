"""`mend launch` with real processes: racks are told who they are, and no process outlives it.

Every process of a launch, the witness too, carries a token in its environment; "gone" means that no
process of this machine carries it.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mend.cli.launch import Job, launch
from mend.cli.processes import TOKEN, orphans

LIMIT_S = 60.0

TELL = """
import os, sys
print("told", os.environ["MEND_RACK"], os.environ["MEND_RACKS"], os.environ["RANK"], sys.argv[1:])
if os.environ["MEND_RACK"] == "1" and "--fail" in sys.argv:
    os._exit(7)
print("done")
"""

HANG = """
import os, signal, subprocess, sys
if "--stubborn" in sys.argv:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
if "--child" in sys.argv:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("token", os.environ["LAUNCHED_BY_MEND"], flush=True)
print("up", os.environ["MEND_RACK"], os.getpid(), os.getppid(), flush=True)
import time
while True:
    time.sleep(600)
"""


class Launcher:
    """A running `mend launch` whose output is read until something has been said."""

    def __init__(self, script: Path, *arguments: str) -> None:
        command = [
            sys.executable,
            "-m",
            "mend.cli",
            "launch",
            str(script),
            *arguments,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.said = ""
        self.token = ""

    def until(self, enough: Callable[[str], bool]) -> None:
        """Read until `enough(everything said)`."""
        assert self.process.stdout is not None
        limit = time.monotonic() + LIMIT_S
        while not enough(self.said):
            ready, _, _ = select.select([self.process.stdout], [], [], limit - time.monotonic())
            assert ready, f"said in {LIMIT_S} s only:\n{self.said}"
            chunk = os.read(self.process.stdout.fileno(), 65536)
            assert chunk, f"ended, having said only:\n{self.said}"
            self.said += chunk.decode()
            if found := re.search(r"token (\w+)", self.said):
                self.token = found[1]

    def up(self) -> dict[int, tuple[int, int]]:
        """Wait until both racks train: rack -> (worker, its torchrun)."""
        pattern = re.compile(r"up (\d) (\d+) (\d+)\n")
        self.until(lambda said: len(pattern.findall(said)) == 2)
        return {int(r): (int(pid), int(parent)) for r, pid, parent in pattern.findall(self.said)}

    def end(self) -> int:
        out, _ = self.process.communicate(timeout=LIMIT_S)
        self.said += out.decode()
        return self.process.returncode

    def gone(self) -> bool:
        """Whether every process of the launch ends within the limit."""
        assert self.token
        limit = time.monotonic() + LIMIT_S
        while left := orphans(self.token):
            if time.monotonic() > limit:
                pytest.fail(f"still there: {left}")
            os.sched_yield()
        return True


Start = Callable[..., Launcher]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Launcher] = []

    def begin(text: str, *arguments: str) -> Launcher:
        script = tmp_path / "script.py"
        script.write_text(text)
        started.append(Launcher(script, *arguments))
        return started[-1]

    yield begin
    for launcher in started:
        launcher.process.kill()
        launcher.process.wait()
        if launcher.process.stdout is not None:
            launcher.process.stdout.close()
        for pid in orphans(launcher.token) if launcher.token else []:
            os.kill(pid, signal.SIGKILL)


def test_racks_are_told_who_they_are_and_a_failing_one_is_reported_alone(start: Start) -> None:
    launcher = start(TELL, "--fail", "--steps", "3")
    assert launcher.end() == 1  # torchrun's own status for a failed worker
    assert "[rack 0] told 0 2 0 ['--fail', '--steps', '3']" in launcher.said
    assert "[rack 1] told 1 2 0 ['--fail', '--steps', '3']" in launcher.said
    assert "[rack 0] done" in launcher.said
    assert "[rack 1] done" not in launcher.said
    assert "exitcode: 7" in launcher.said or "exitcode  : 7" in launcher.said
    assert "[launch] rack 0 ended exit=0" in launcher.said
    assert "[launch] rack 1 ended exit=1" in launcher.said
    assert "\x1b" not in launcher.said, "colours although nobody looks"


def test_a_dead_rack_takes_nobody_with_it(start: Start) -> None:
    """Its torchrun is killed the hard way: worker and grandchild are orphans, and cleaned up."""
    launcher = start(HANG, "--child")
    racks = launcher.up()
    os.kill(racks[1][1], signal.SIGKILL)
    launcher.until(lambda said: "rack 1 ended" in said)
    assert re.search(
        r"rack 1 ended exit=-9 signal=SIGKILL orphans_killed=2 still_running=0", launcher.said
    )
    assert launcher.process.poll() is None
    os.kill(racks[0][0], 0)  # still there
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 128 + signal.SIGTERM
    assert launcher.gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_all_racks_and_nothing_is_left(
    start: Start, number: signal.Signals
) -> None:
    launcher = start(HANG, "--child")
    launcher.up()
    launcher.process.send_signal(number)
    assert launcher.end() == 128 + number
    assert launcher.said.count(f"signal={number.name} to=all-racks") == 1
    assert launcher.gone()


def test_a_second_signal_kills_what_ignores_the_first(start: Start) -> None:
    launcher = start(HANG, "--stubborn", "--child")
    launcher.up()
    launcher.process.send_signal(signal.SIGINT)
    launcher.until(lambda said: "signal=SIGINT to=all-racks" in said)
    assert launcher.process.poll() is None
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.end() == 128 + signal.SIGINT
    assert "rack 0 ended exit=-9" in launcher.said, "torchrun gave up by itself, nobody killed it"
    assert launcher.gone()


def test_a_second_signal_counts_even_while_the_first_is_passed_on(tmp_path: Path) -> None:
    """It was swallowed: the count was read again after the racks had been told."""
    script = tmp_path / "script.py"
    script.write_text(HANG)
    up = 0

    def sink(who: str, line: str) -> None:
        nonlocal up
        up += line.startswith("up ")
        if (line.startswith("up ") and up == 2) or line.startswith("signal=SIGINT"):
            signal.raise_signal(signal.SIGINT)

    outcome = launch(Job(command=(str(script), "--stubborn"), witness=False), sink)
    assert outcome.racks == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    assert outcome.status == 128 + signal.SIGINT


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_racks_follow_a_launcher_that_was_killed(start: Start) -> None:
    launcher = start(HANG)
    launcher.up()
    launcher.process.kill()
    launcher.process.wait()
    assert launcher.gone()


def test_the_token_of_the_script_is_the_launchers() -> None:
    assert TOKEN in HANG


KILLED_ONCE = """
import os, signal, time, torch, mend
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
config = mend.MendConfig(sync_period_steps=16, fragments=2, overlap_steps=4)
with mend.session(model, config, optimizer=optimizer) as runtime:
    for step in range(150):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        if os.environ["MEND_RACK"] == "1" and not again and step == 40:
            os.kill(os.getpid(), signal.SIGKILL)
status = runtime.status()
print("digest", status.anchor_digest, "open", status.ledger.open, flush=True)
"""


def test_a_rack_that_is_killed_is_started_again_and_joins(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(KILLED_ONCE)
    said: list[str] = []
    job = Job(command=(str(script),), max_restarts=1)
    assert launch(job, lambda _, line: said.append(line)).status == 0
    told = "\n".join(said)
    assert "joined versions=" in told
    digests = re.findall(r"digest (\w+) open 0.0", told)
    assert len(digests) == 2, told
    assert len(set(digests)) == 1, "both end on the same bits, with everything merged"
