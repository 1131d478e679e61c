"""A rack sleeps (SIGSTOP, as for a paused machine or a cut link) while the others end the job, or
give its seat away: what it says of itself is true."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from mend.errors import EVICTED_EXIT
from tests.process.conftest import Jobs
from tests.process.racks import Job, Result
from tests.process.test_giving_up import said

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "sideband_heartbeat_ms": 50,
}  # fmt: skip
"""Silence is death after a second, and is not awaited at the end after three."""


def fall_asleep(job: Job, rack: int, *others: int) -> None:
    """Stop a rack; the others are past the end of its silence that they wait for."""
    job.processes[rack].signal(signal.SIGSTOP)
    for other in others:
        job.event(other, "rack-silent", peer=rack)


def check_agrees(sleeper: Result, code: int, other: Result) -> None:
    """`merged` and equal bits, or an end that says that they differ."""
    assert other.status["outcome"] == "merged", other.status
    assert other.status["outcome_detail"].startswith("without rack 1, silent or gone at the end")
    outcome, detail = sleeper.status["outcome"], sleeper.status["outcome_detail"]
    if outcome == "merged":
        assert (sleeper.digest, sleeper.weights) == (other.digest, other.weights)
        assert code == 0
    else:
        assert (outcome, code) == ("kept-local", 1), detail
        assert sleeper.error[0] == "NotMerged"
        assert f"the job ended at versions {written(other)}, this rack has" in detail
        assert written(sleeper) in detail.partition("this rack has")[2]
        assert "without rack" not in detail


def written(result: Result) -> str:
    return ", ".join(map(str, result.status["versions"]))


@pytest.mark.slow
def test_a_rack_that_sleeps_while_the_others_end_has_their_bits_or_says_it_has_not(
    jobs: Jobs,
) -> None:
    """It had finished its own work and said `merged`, with older bits than the others."""
    for witness in (True, False):
        job = jobs(racks=2 if witness else 3, witness=witness)
        gate, others = job.gate(), [rack for rack in range(job.racks) if rack != 1]
        for rack in others:
            job.start(rack, steps=60, config=CONFIG, at={"30": [["gate", gate]]})
        job.start(1, steps=12, config=CONFIG)
        job.event(1, "leaving")
        fall_asleep(job, 1, *others)
        Path(gate).touch()
        for rack in others:
            job.ended(rack, code=0)
        job.processes[1].signal(signal.SIGCONT)
        code = job.ended(1)
        check_agrees(job.result(1), code, job.result(0))


@pytest.mark.parametrize("by", ["silence", "a person", "another life"])
def test_a_rack_that_lost_its_seat_ends_as_one_to_be_started_again(jobs: Jobs, by: str) -> None:
    """It trained on for ever, merged with nobody, and said that the job was over."""
    job = jobs(witness=True)
    config = {**CONFIG, **({"seat_timeout_s": 5} if by == "silence" else {})}
    options: dict[str, Any] = {"steps": 1_000_000, "config": config, "pace_ms": 5.0}
    for rack in range(2):
        job.start(rack, **options)
    job.event(1, "applied")
    fall_asleep(job, 1, 0)
    if by == "silence":
        reason = "rack 1 was absent for too long"
    elif by == "a person":
        assert "rack 1 is out" in said(job, "1", job.witness_address)
        reason = "a person has retired rack 1"
    else:
        elsewhere = job.addresses[1].rpartition(":")[0] + ":0"
        job.start(1, name="another", env={"MEND_SIDEBAND_ADDR": elsewhere}, **options)
        reason = "rack 1 is back"
    job.witness_event("roster", reason=reason)
    job.processes[1].signal(signal.SIGCONT)
    job.ended(1, code=EVICTED_EXIT)
    result = job.result(1)
    assert (result.error[0], result.status["outcome"]) == ("SeatLost", "seat-lost")
    assert result.status["outcome_detail"] == f"rack 1 has lost its seat: {reason}"
    assert (result.status["racks_live"], result.status["ledger"]["open"] > 0) == ([], True)
    (noted,) = result.kinds("seat-lost")
    assert noted["reason"] == result.status["outcome_detail"]
    assert not result.kinds("expelled")
    if by != "another life":
        job.start(1, **options)
        job.event(1, "joined")


def test_a_script_that_exits_in_its_session_does_not_report_success(job: Job) -> None:
    """`sys.exit(0)` between two merges: the work was lost, and the launcher saw status 0."""
    config = {"sync_period_steps": 1000, "fragments": 2}
    for rack in range(2):
        job.start(rack, steps=20, config=config, at={"9": [["exit"]]})
    for rack in range(2):
        assert job.ended(rack) == 1
        name, text = job.result(rack).error
        assert name == "NotMerged"
        assert f"rack {rack} left its session by sys.exit(0) with " in text
