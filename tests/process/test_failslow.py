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
    (cause,) = slowed.result(SLOW_RACK).kinds("fail-slow-cause")
    assert (cause["slow_rack"], cause["cause"]) == (SLOW_RACK, "input"), "it sleeps for its data"
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
