"""A rack that dies and comes back goes on with the state of another rack: the same optimizer, the
same schedule, to the bit, at one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.process.conftest import Jobs
from tests.process.racks import Job, until

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "grace_window_ms": 5.0,
    "stall_max_s": 0.05, "shutdown_timeout_s": 20,
}  # fmt: skip


class Story:
    """Rack 1 is killed; started again it joins, and trains on."""

    def __init__(self, jobs: Jobs, ranks: int = 1, **options: Any) -> None:
        self.job: Job = jobs(ranks=ranks, witness=True)
        self.ranks = ranks
        self.options = {
            "script": "tests.process.twin", "stop": self.job.gate("stop"), "config": CONFIG,
            **options,
        }  # fmt: skip

    def until_killed(self, **first: Any) -> None:
        job = self.job
        job.start(0, **self.options)
        job.start(1, **{**self.options, **first})
        job.event(1, "applied", fragment=1)
        job.processes[1].kill()

    def back(self, **options: Any) -> None:
        self.returned = self.job.start(1, name="back", **{**self.options, **options})

    def end(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Let all stop; what the ranks of rack 0 and of the one that came back have written."""
        Path(self.job.gate("stop")).touch()
        self.job.ended(0, code=0)
        until(lambda: self.returned.code is not None, "the one that came back ends")
        assert self.returned.code == 0, self.job.logs()
        ranks = range(self.ranks)
        return (
            [self.job.told(0, rank) for rank in ranks],
            [self.job.told(1, rank, name="back") for rank in ranks],
        )


def is_twin(donors: list[dict[str, Any]], twins: list[dict[str, Any]]) -> None:
    """What each rank begins with is what the same rank of the donor had at that step."""
    for donor, twin in zip(donors, twins, strict=True):
        step, state, rate, _ = twin["begun"]
        assert step > 0
        assert donor["states"][str(step)] == state
        assert rate < 0.01, "the schedule has gone on"
        assert twin["status"]["joined_state"] == f"copied from rack 0 at step {step}"
        assert twin["weights"] == donor["weights"]


def test_a_rack_that_comes_back_is_a_twin(jobs: Jobs) -> None:
    """AdamW with two groups, a scheduler and a scaler; its own learning rate is another one."""
    story = Story(jobs)
    story.until_killed()
    story.back(learning_rate=0.5)
    story.job.event(1, "state-copied")
    story.job.event(1, "made-equal")
    donors, twins = story.end()
    is_twin(donors, twins)
