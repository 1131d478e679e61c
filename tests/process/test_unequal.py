"""Racks with different numbers of ranks in one job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.process.conftest import Jobs
from tests.process.racks import Result

CONFIG: dict[str, Any] = {
    "fragments": 2,
    "sync_period_steps": 8,
    "overlap_steps": 2,
    "shutdown_timeout_s": 60,
    "lockstep": True,
    "wait_timeout_s": 60,
    "token_weighted_merge": False,
}
STEPS = 20


def agree(results: list[Result]) -> dict[str, list[int]]:
    """The merged model, the same on every rank."""
    for result in results:
        assert result.weights == results[0].weights
        assert result.digest == results[0].digest
        assert result.status["outcome"] == "merged"
        assert result.threads == []
    assert results[0].commits, "something was merged"
    return results[0].weights


def run(jobs: Jobs, sizes: Sequence[int], **options: Any) -> dict[str, list[int]]:
    """All ranks of a rack have one batch, so racks of any size train alike."""
    job = jobs(racks=len(sizes), sizes=sizes if len(set(sizes)) > 1 else (), ranks=sizes[0])
    config = {**CONFIG, **options.pop("config", {})}
    return agree(job.run(**{"steps": STEPS, "same_data": True, "config": config, **options}))


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_ddp_of_one_and_two_ranks_has_the_bits_of_two_and_two(jobs: Jobs, codec: str) -> None:
    told = {"config": {"codec": codec}}
    assert run(jobs, (1, 2), **told) == run(jobs, (2, 2), **told)
