"""A process is killed: the others merge on, whichever it was, long before it loses its seat."""

from __future__ import annotations

import signal
from pathlib import Path
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
    ("witness", "dies"),
    [
        (False, 1),
        (True, 0),
        pytest.param(True, 1, marks=pytest.mark.slow),
        pytest.param(True, WITNESS, marks=pytest.mark.slow),
    ],
)
def test_the_others_merge_on_when_one_of_two_racks_and_a_witness_dies(
    jobs: Jobs, witness: bool, dies: int
) -> None:
    """They merged nothing for ten minutes after the death of either rack. Rack 1 alone may decide
    nothing. tests/sim/test_deaths.py has more racks."""
    job = jobs(witness=witness)
    for rack in range(2):
        job.start(rack, steps=STEPS, config=CONFIG, pace_ms=20)
    for rack in range(2):
        job.event(rack, "commit", fragment=1)
    killed = job.witness if dies == WITNESS else job.processes[dies]
    assert killed is not None
    killed.signal(signal.SIGKILL)
    left = 1 if dies == 0 else 0
    if dies == WITNESS:  # any rack may be the first to stand
        until(
            lambda: any(job.events(rack, kind="stands") for rack in range(2)),
            lambda: f"a rack stands\n{job.stacks()}",
        )
    else:
        job.event(left, "rack-silent", peer=dies)
    known = commits(job, left)
    until(
        lambda: commits(job, left) > known + 4,
        lambda: f"the others merge without {dies}\n{job.stacks()}",
    )


def test_the_owner_of_slices_dies_and_others_merge_them(jobs: Jobs) -> None:
    """kill -9 in the middle of a sharded round: one of its slices is merged and served, the other
    is not. Of the attempt with its slices nothing is used; the next has others as owners, and ends
    with the bits of the reference. So do the rounds behind it."""
    config = {"fragments": 1, "sync_period_steps": 8, "overlap_steps": 2, "shutdown_timeout_s": 60}
    config |= {"exchange_plan": "sharded", "codec": "bfloat16"}
    config["grace_window_ms"] = 30_000  # the first round has all four, however late one of them is
    job = jobs(racks=4)
    gate = job.gate()
    for rack in range(4):
        at = {"2": [["die_owning"]]} if rack == 3 else {"14": [["gate", gate]]}
        job.start(rack, steps=60, config=config, pace_ms=5, at=at)
    assert job.ended(3) == -signal.SIGKILL
    for rack in range(3):  # or they end before they know that one is dead
        job.event(rack, "commit")
    Path(gate).touch()
    results = job.finished(0, 1, 2)
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
