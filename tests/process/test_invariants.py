"""A rack that finds a contradiction in itself ends loudly and publishes nothing more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.process.conftest import Jobs

CONFIG: dict[str, Any] = {"fragments": 2, "sync_period_steps": 8, "overlap_steps": 2}

THREADS = {
    "loop": "an offer ends twice",
    "worker": "this version is only a number here",
    "training": "planted",
}


@pytest.mark.parametrize("thread", THREADS)
def test_broken_invariant_ends_its_rack_and_the_others_merge_on(jobs: Jobs, thread: str) -> None:
    """As an assert it was gone under `python -O`; on the worker it would be a failed merge, tried
    again for ever."""
    job = jobs(racks=3)
    begun, dead = job.gate("begun"), job.gate("dead")
    options: dict[str, Any] = {"config": CONFIG, "pace_ms": 5}
    for rack in range(2):
        job.start(rack, steps=120, at={"40": [["gate", dead]]}, **options)
    at = {"12": [["gate", begun], ["break_rule", thread]]}
    job.start(2, steps=120, at=at, **options)
    job.event(2, "commit", version=1, fragment=0)
    Path(begun).touch()
    assert job.ended(2) == 1
    Path(dead).touch()
    job.finish(0, 1)

    broken, *others = (job.events(rack) for rack in (2, 0, 1))
    found = [event for event in broken if event["kind"] == "invariant-broken"]
    assert len(found) == 1, job.logs()
    assert THREADS[thread] in found[0]["detail"]
    assert "This is a bug of mend" in found[0]["detail"]
    ended = [event for event in broken if event["kind"] == "ended-unmerged"]
    assert ended[0]["outcome"] == "failed"
    assert THREADS[thread] in ended[0]["detail"]
    assert "InvariantError" in (job.folder / "rack2.log").read_text()
    for events in others:
        late = [e for e in events if e["kind"] == "commit" and e["time_ns"] > found[0]["time_ns"]]
        members = [[member["rack"] for member in commit["members"]] for commit in late]
        assert [0, 1] in members
    first, second = (job.result(rack) for rack in range(2))
    assert first.digest == second.digest
    assert first.weights == second.weights
    assert first.status["outcome"] == "merged"
