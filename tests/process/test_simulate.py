"""`python -m mend_lab simulate` in several processes: what they share, and how they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.racks import LIMIT_S, ROOT, Nursery, environment, until

WORDS = ["-m", "mend_lab", "simulate", "--jobs", "2"]
WIDE = {"COLUMNS": "200"}


def test_several_processes_share_the_seeds(nursery: Nursery) -> None:
    done = subprocess.run(
        [nursery.python, *WORDS, "--seeds", "4"], cwd=ROOT, env=environment(**WIDE),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "4 seeds from 0: 0 broke an invariant" in done.stdout


def children(pid: int) -> list[str]:
    """Its workers, and Python's resource tracker."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.fixture
def running() -> Iterator[subprocess.Popen[str]]:
    """With its worker processes; all are started as a user's are, as they are about to be ended."""
    started = subprocess.Popen(
        [sys.executable, *WORDS, "--minutes", "5"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment(**WIDE), start_new_session=True,
    )  # fmt: skip
    with started:
        until(lambda: len(children(started.pid)) >= 3 or started.poll() is not None, "it works")
        assert started.poll() is None
        yield started
        started.kill()


@pytest.mark.slow
def test_ctrl_c_stops_all_processes_and_sums_up(running: subprocess.Popen[str]) -> None:
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 0, err
    assert "Traceback" not in err
    assert re.search(r"interrupted after \d+ seeds from 0: 0 broke", out)


def test_processes_of_simulate_end_with_one_that_is_killed(running: subprocess.Popen[str]) -> None:
    running.kill()
    running.communicate(timeout=LIMIT_S)  # until the last of those that hold the pipes is gone
