"""Real racks whose rounds wait for named ones only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.process.conftest import Jobs
from tests.process.racks import until

FOREVER = 1_000_000
CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 16, "overlap_steps": 4, "grace_window_ms": 30_000,
    "expected_racks": [0, 1],
}  # fmt: skip


def test_rounds_close_without_the_rack_that_is_not_expected(jobs: Jobs) -> None:
    """It stands still until rounds have closed without it; its work is merged in the end. The grace
    window is so long that waiting for it once would be seen."""
    job = jobs(racks=3)
    gate, stop = job.gate(), job.gate("stop")
    for rack in range(3):
        at = {"5": [["gate", gate]]} if rack == 2 else {}
        job.start(rack, steps=FOREVER, pace_ms=2.0, config=CONFIG, at=at, stop=stop)
    for fragment in range(2):
        job.event(0, "commit", fragment=fragment, reason="expected-in, without rack 2")
    Path(gate).touch()
    until(
        lambda: any(2 in racks_of(commit) for commit in job.events(0, kind="commit")),
        lambda: f"its work is merged\n{job.stacks()}",
    )
    # Before the end: a rack that has nothing left is not waited for.
    early = [c for c in job.events(0, kind="commit") if c["closed_by"] == "expected-in"]
    Path(stop).touch()
    results = job.finished()
    assert early
    assert all({0, 1} <= racks_of(commit) for commit in early), (early, job.logs())
    assert all(commit["closed_by"] != "grace-over" for commit in results[0].commits)
    assert len({result.digest for result in results}) == 1


def racks_of(commit: dict[str, Any]) -> set[int]:
    return {member["rack"] for member in commit["members"]}
