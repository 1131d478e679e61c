"""A process is killed: the others merge on, whichever it was, long before it loses its seat."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from mend.coordination.round import SLICED_MIN
from mend.types import WITNESS
from tests.process.conftest import Jobs
from tests.process.racks import Job, until
from tests.process.replayed import anchor_bits, model_bits, replayed

CONFIG: dict[str, Any] = {"fragments": 2, "sync_period_steps": 8, "overlap_steps": 2}
"""Everything that has to do with deaths is as by default: nobody is put out for ten minutes."""

STEPS = 1_000_000


def commits(job: Job, rack: int) -> int:
    return len(job.events(rack, kind="commit"))


@pytest.mark.parametrize(
    ("racks", "witness"),
    [
        (2, False),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in ((2, True), (3, False), (3, True), (4, False), (4, True))
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
        if dies == WITNESS:  # any rack may be the first to stand
            until(
                lambda job=job: any(job.events(rack, kind="stands") for rack in range(racks)),  # type: ignore[misc]
                f"a rack stands\n{job.logs()}",
            )
        else:
            job.event(first, "rack-silent")
        known = commits(job, first)
        until(
            lambda job=job, first=first, known=known: commits(job, first) > known + 4,  # type: ignore[misc]
            f"the others merge without {dies}\n{job.logs()}",
        )


def test_the_owner_of_slices_dies_and_others_merge_them(jobs: Jobs) -> None:
    """kill -9 in the middle of a sharded round: one of its slices is merged and served, the other
    is not. Of the attempt with its slices nothing is used; the next has others as owners, and ends
    with the bits of the reference. So do the rounds behind it."""
    config = {"fragments": 1, "sync_period_steps": 8, "overlap_steps": 2, "shutdown_timeout_s": 20}
    config |= {"exchange_plan": "sharded", "payload_dtype": "bfloat16"}
    config["grace_window_ms"] = 30_000  # the first round has all four, however late one of them is
    job = jobs(racks=4)
    for rack in range(4):
        at = {"2": [["die_owning"]]} if rack == 3 else {}
        job.start(rack, steps=60, config=config, pace_ms=50, at=at)
    assert job.ended(3) == -signal.SIGKILL
    for rack in range(3):
        job.ended(rack)
    results = [job.result(rack) for rack in range(3)]
    first, *later = results[0].commits
    assert first["reason"] == "all-in, 4 of 4 racks, sharded, then without rack 3"
    several = [commit for commit in later if len(commit["members"]) >= SLICED_MIN]
    assert len(several) > 2, "the last may be of one rack, whose script ended behind the others'"
    for commit in several:
        assert "sharded" in commit["reason"], commit
        assert "mesh" not in commit["reason"], commit
    for result in results:
        assert result.commits == results[0].commits
        assert not result.kinds("differs", "fault", "merge-failed")
    assert {m["rack"] for commit in results[0].commits for m in commit["members"]} == {0, 1, 2}
    outcome = replayed(results, "plain", config)
    for result in results:
        assert anchor_bits(outcome) == model_bits(result, "plain", config)
