"""Racks whose ranks hold shards: each rank exchanges what it holds, nobody gathers the model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.process.conftest import Jobs
from tests.process.racks import Result

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "shutdown_timeout_s": 60,
    "lockstep": True, "wait_timeout_s": 60,
}  # fmt: skip
STEPS = 20


def run(jobs: Jobs, ranks: int, parallel: str, **options: Any) -> list[Result]:
    job = jobs(ranks=ranks)
    return job.run(steps=STEPS, config=CONFIG, parallel=parallel, same_data=True, **options)


def agree(results: list[Result]) -> None:
    first = results[0]
    assert first.commits, "something was merged"
    for result in results:
        assert result.weights == first.weights
        assert result.digest == first.digest
        assert result.commits == first.commits
        assert result.threads == []


@pytest.fixture(scope="module")
def alone() -> list[Result]:
    """What racks of one rank came to, once it was asked for."""
    return []


def of_one_rank(jobs: Jobs, alone: list[Result]) -> Result:
    if not alone:
        alone.extend(jobs(ranks=1).run(steps=STEPS, config=CONFIG))
    return alone[0]


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, "fsdp2"),
        *(
            pytest.param(*cut, marks=pytest.mark.slow)
            for cut in ((2, "ddp"), (2, "fsdp2-keep"), (4, "fsdp2"))
        ),
        (4, "hsdp"),
    ],
    ids=str,
)
def test_however_a_rack_is_cut_the_bits_are_those_of_one_rank(
    jobs: Jobs, alone: list[Result], ranks: int, parallel: str
) -> None:
    """Three rows over four ranks leave one of them with nothing, over two with an uneven pair."""
    expected = of_one_rank(jobs, alone)
    results = run(jobs, ranks, parallel)
    agree(results)
    assert results[0].weights == expected.weights
    assert len(results[0].commits[0]["digests"]) == ranks
    assert len(results[0].merges) == len(expected.merges)


@pytest.mark.slow
def test_tensor_parallel_layers_with_shards_of_them(jobs: Jobs) -> None:
    agree(run(jobs, 4, "tp", model="even"))


@pytest.mark.parametrize("parallel", ["fsdp2", "fsdp2-keep"])
def test_an_evaluation_between_the_steps_changes_nothing_and_sees_the_merged_weights(
    jobs: Jobs, alone: list[Result], parallel: str
) -> None:
    """It leaves the root gathered (kept: every layer): what is written to shards then is not what
    the next forward pass sees, unless the root lets go."""
    expected, job = of_one_rank(jobs, alone), jobs(ranks=2)
    at = {str(step): [["evaluate"]] for step in range(1, STEPS + 1)}
    at |= {str(STEPS): [["merged_loss"]], "end": [["evaluate"]]}
    results = job.run(steps=STEPS, config=CONFIG, parallel=parallel, same_data=True, at=at)
    agree(results)
    assert results[0].weights == expected.weights
    for rack in range(2):
        told = job.told(rack)
        seen, once_dropped = told["merged_losses"]
        assert seen == once_dropped
        assert told["own_loss"] != seen, "the rack's own weights are others, and back again"
