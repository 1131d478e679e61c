"""A process is killed: the others merge on, whichever it was, long before it loses its seat."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from mend.types import WITNESS
from tests.process.conftest import Jobs
from tests.process.racks import Job, until

CONFIG: dict[str, Any] = {"fragments": 2, "sync_period_steps": 8, "overlap_steps": 2}
"""Everything that has to do with deaths is as by default: nobody is put out for ten minutes."""

STEPS = 1_000_000


def commits(job: Job, rack: int) -> int:
    return len([event for event in job.events(rack) if event["kind"] == "commit"])


@pytest.mark.parametrize(
    ("racks", "witness"),
    [
        (2, False),
        (2, True),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in ((3, False), (3, True), (4, False), (4, True))
        ),
    ],
)
def test_whoever_dies_the_others_merge_on(jobs: Jobs, racks: int, witness: bool) -> None:
    """Two racks and a witness merged nothing for ten minutes after the death of either rack, three
    and a witness after that of rack 0. One job for each who may die; all at the same time.
    tests/sim/test_deaths.py has all these numbers of racks."""
    dying = [*range(racks), *([WITNESS] if witness else [])]
    if (racks, witness) == (2, False):
        dying.remove(0)  # rack 1 alone may decide nothing
    running = {dies: jobs(racks=racks, witness=witness) for dies in dying}
    for job in running.values():
        for rack in range(racks):
            job.start(rack, steps=STEPS, config=CONFIG, pace_ms=20)
    for dies, job in running.items():
        for rack in range(racks):
            job.event(rack, "commit", fragment=1)
        killed = job.witness if dies == WITNESS else job.processes[dies]
        assert killed is not None
        killed.signal(signal.SIGKILL)
    for dies, job in running.items():
        first = min(set(range(racks)) - {dies})
        job.event(first, "stands" if dies == WITNESS else "rack-silent")
        known = commits(job, first)
        until(
            lambda job=job, first=first, known=known: commits(job, first) > known + 4,  # type: ignore[misc]
            f"the others merge without {dies}\n{job.logs()}",
        )
