"""A rack shares its core with busy neighbours: it is slow by compute, and takes fewer micro-batches
until they are gone. Beside other tests the product that a rack is held against is slow as well, and
the cause unknown: `make test-all` runs this file by itself.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.process.conftest import Jobs
from tests.process.test_causes import CONFIG, FOREVER, known

NEIGHBOURS = 5
BUSY = "import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"


@contextlib.contextmanager
def neighbours(core: int) -> Iterator[None]:
    """Busy processes on one core, in sessions of their own: Linux shares a core among these."""
    command = [sys.executable, "-ISc", BUSY.format(core=core)]
    started = [subprocess.Popen(command, start_new_session=True) for _ in range(NEIGHBOURS)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_smoke_in_real_time_a_rack_with_busy_neighbours_takes_fewer_micro_batches(
    jobs: Jobs,
) -> None:
    """It is slow by compute: it shares its core with five of them, so it has a sixth of it."""
    core, job = max(os.sched_getaffinity(0)), jobs()
    config = {**CONFIG, "lockstep": True, "wait_timeout_s": 60, "failslow_min_samples": 8}
    del config["grace_window_ms"]
    config["fragments"], config["sync_period_steps"] = 1, 4
    config["overlap_steps"] = 1
    for rack in range(2):
        acts = {"1": [["pin", core]]} if rack else {}
        job.start(rack, steps=FOREVER, config=config, products=6, micro_batches=4, at=acts)
    known(job)
    with neighbours(core):
        slow = job.event(1, "fail-slow", slow_rack=1, against="own past")
        cause = job.event(1, "fail-slow-cause", slow_rack=1, cause="compute")
        fewer = job.event(0, "slow-rack-batch", slow_rack=1, stage=2)
    assert slow["ratio"] > 1.2
    assert cause["gemm_ratio"] > 1.1
    assert "rack 1 is slow" in fewer["reason"], "the cause may be known a little later"
    assert job.event(1, "local-batch", batch_pct=fewer["batch_pct"])
    job.event(1, "fail-slow-over", slow_rack=1)
    job.event(1, "local-batch", batch_pct=100)
