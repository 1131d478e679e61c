"""A real rack that becomes slow is named within some steps, on every rack and by every tool; the
others are not. Racks sleep so that time per token is the same, which is what they are judged by."""

from __future__ import annotations

from typing import Any

import pytest

from tests.process.conftest import Jobs
from tests.process.racks import Job, Nursery
from tests.process.test_tape import mend

CONFIG: dict[str, Any] = {"fragments": 2, "sync_period_steps": 16, "overlap_steps": 4}
HEALTHY, SLOW = 40, 30
MS_PER_TOKEN = 12.0
SLOW_RACK = 0
WITHIN = 20
"""Steps. Tokens vary from step to step while the sleep does not, so it takes more than ten."""

BUSY = 1.5
"""What a machine that is busy otherwise may do to a rack, which is then truly slow."""


def verdicts(job: Job, rack: int) -> list[dict[str, Any]]:
    return [e for e in job.result(rack).kinds("fail-slow") if e["ratio"] > BUSY]


@pytest.mark.slow("coordination", "detector")
def test_rounds_stop_waiting_for_a_slow_rack_until_it_is_well_again(jobs: Jobs) -> None:
    """Where mend acts, and a round would wait for it for half a minute. Of a rack that is so slow
    that the overlap does not hide a step of it."""
    healthy, slow, well, times = 40, 8, 130, 24
    job = jobs(racks=3)
    config = {**CONFIG, "grace_window_ms": 30_000, "failslow_action": "act"}
    per: dict[int, dict[str, Any]] = {rack: {"pace_ms": 50.0} for rack in range(3)}
    acts = {str(healthy): [["slow", times]], str(healthy + slow): [["slow", 1.0]]}
    per[2] |= {"at": acts, "steps": healthy + slow + well}
    results = job.run(steps=healthy + times * slow + well, config=config, per=per)
    (left,) = results[0].kinds("slow-rack-left")
    (awaited,) = results[0].kinds("slow-rack-awaited")
    assert (left["slow_rack"], left["stage"], awaited["slow_rack"]) == (2, 3, 2)
    assert "rack 2 is slow" in left["reason"]
    assert "rounds have lost" in left["reason"]
    reasons = [commit["reason"] for commit in results[0].commits]
    assert "slow-left, without rack 2" in reasons
    assert not any(reason.startswith("grace-over") for reason in reasons)
    assert len({result.digest for result in results}) == 1


@pytest.mark.slow("coordination", "detector")
def test_a_slow_rack_takes_fewer_micro_batches_and_more_again_when_it_is_well(jobs: Jobs) -> None:
    """In lockstep, where the others wait for every step of it; all its ranks take as many. It gets
    them back in one move or more, by what a step costs besides its micro-batches."""
    healthy, slow, well = 40, 40, 150
    job = jobs(ranks=2)
    config = {**CONFIG, "lockstep": True, "failslow_action": "act", "give_up_s": 60}
    per: dict[int, dict[str, Any]] = {rack: {"micro_batches": 8} for rack in range(2)}
    acts = {str(healthy): [["slow", 8.0]], str(healthy + slow): [["slow", 1.0]]}
    per[1]["at"] = acts
    results = job.run(steps=healthy + slow + well, config=config, pace_ms=50.0, per=per)
    decided = results[0].kinds("slow-rack-batch", "slow-rack-awaited", "slow-rack-left")
    assert {move["slow_rack"] for move in decided} == {1}
    fewest = min(move["batch_pct"] for move in decided)
    assert fewest < 25 < decided[-1]["batch_pct"]
    assert decided[0]["stage"] == 2
    assert "rack 1 is slow" in decided[0]["reason"]
    causes = [e["cause"] for rank in range(2) for e in job.result(1, rank).kinds("fail-slow-cause")]
    assert "input" in causes, "what sleeps is between a step and the next forward"
    taken = [job.told(1, rank)["taken"] for rank in range(2)]
    assert taken[0] == taken[1], "both ranks take them from the same step on"
    assert taken[0][: healthy + 1] == [8] * (healthy + 1)
    assert taken[0][healthy + slow - 1] <= 2
    assert taken[0][-1] >= 4
    (first, *_) = job.result(1).kinds("local-batch")
    assert taken[0][first["step"]] < taken[0][first["step"] - 1], "from the next step on"
    assert first["reason"] in {move["reason"] for move in decided}, "two may come before it looks"
    assert job.told(0, 0)["taken"] == [8] * (healthy + slow + well)
    assert len({result.digest for result in results}) == 1
    for result in results:
        assert result.status["ledger"]["merged"] == result.status["tokens"]


@pytest.fixture
def slowed(jobs: Jobs) -> Job:
    """Rack 0 sleeps three times as long from a step on."""
    job = jobs(racks=3)
    per = {rack: {"pace_ms": MS_PER_TOKEN * (5 + 3 * rack)} for rack in range(3)}
    per[SLOW_RACK]["at"] = {str(HEALTHY): [["slow", 3.0]]}
    job.run(steps=HEALTHY + SLOW, config=CONFIG, per=per)
    return job


def test_a_rack_that_becomes_slow_is_named_and_no_other(slowed: Job, nursery: Nursery) -> None:
    own = [e for e in verdicts(slowed, SLOW_RACK) if e["against"] == "own past"]
    assert len(own) == 1
    (found,) = own
    assert (found["slow_rack"], found["slow_rank"]) == (SLOW_RACK, 0)
    assert HEALTHY - 3 <= found["since_step"] <= HEALTHY + 3
    assert HEALTHY <= found["step"] <= HEALTHY + WITHIN
    assert found["probability"] > 0.99
    named = {e["slow_rack"] for rack in range(3) for e in verdicts(slowed, rack)}
    assert named == {SLOW_RACK}
    causes = slowed.result(SLOW_RACK).kinds("fail-slow-cause")
    told = [(e["slow_rack"], e["cause"]) for e in causes if e["time_ns"] >= found["time_ns"]]
    assert (SLOW_RACK, "input") in told, f"it sleeps for its data: {causes}"
    assert any(
        slow["rack"] == SLOW_RACK and slow["ratio"] > BUSY and slow["cause"] == "input"
        for slow in slowed.result(SLOW_RACK).before_shutdown["slow"]
    )
    status, said = mend(nursery, "explain", slowed.events_folder)
    assert status == 0, said
    assert f"rack {SLOW_RACK} rank 0 is slow: " in said
    assert f"the time per token of its own past, since its step {found['since_step']}" in said
    page = slowed.folder / "report.html"
    status, said = mend(nursery, "report", slowed.events_folder, "--out", page)
    assert status == 0, said
    assert "Slow racks" in page.read_text()
