"""Racks whose ranks hold different modules: stages of a pipeline, experts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.process.conftest import Jobs
from tests.process.racks import Job, Result

SCRIPT = "tests.process.staged"
CONFIG: dict[str, Any] = {
    "fragments": 2,
    "sync_period_steps": 8,
    "overlap_steps": 2,
    "shutdown_timeout_s": 60,
    "lockstep": True,
    "wait_timeout_s": 60,
}
STEPS = 20


def weights_of(results: list[Result]) -> dict[str, list[int]]:
    """Of all ranks of a rack together; what several hold is equal."""
    found: dict[str, list[int]] = {}
    for result in results:
        for name, each in result.weights.items():
            assert found.setdefault(name, each) == each, name
    return found


def agree(job: Job, results: list[Result]) -> dict[str, list[int]]:
    """The merged model, the same on every rack."""
    first, *others = (
        results[rack * job.ranks : (rack + 1) * job.ranks] for rack in range(job.racks)
    )
    merged = weights_of(first)
    for rack in others:
        assert weights_of(rack) == merged
    for result in results:
        assert result.commits == results[0].commits
        assert result.digest == results[0].digest
        assert result.threads == []
    assert results[0].commits, "something was merged"
    return merged


def run(jobs: Jobs, layout: str, ranks: int = 2, **options: Any) -> dict[str, list[int]]:
    job = jobs(ranks=ranks)
    told = {"script": SCRIPT, "steps": STEPS, "config": CONFIG, "layout": layout, **options}
    return agree(job, job.run(**told))


@pytest.mark.parametrize(
    ("layout", "ranks", "schedule"),
    [
        ("stages", 2, "gpipe"), ("stages", 2, "1f1b"), ("stages", 4, "1f1b"),
        ("interleaved", 2, ""),
    ],
    ids=str,
)  # fmt: skip
def test_a_pipeline_has_the_bits_of_the_model_in_one_process(
    jobs: Jobs, layout: str, ranks: int, schedule: str
) -> None:
    config = {**CONFIG, "fragments": 1}
    alone = run(jobs, "one", 1, config=config)
    assert run(jobs, layout, ranks, schedule=schedule, config=config) == alone


@pytest.mark.parametrize(
    ("layout", "ranks"), [("stages-fsdp2", 4), ("experts", 2), ("experts", 4)], ids=str
)
def test_however_modules_lie_on_ranks_equal_gradients_merge_to_equal_bits(
    jobs: Jobs, layout: str, ranks: int
) -> None:
    """Stages in shards, and experts over a mesh of their own beside shards over all ranks."""
    config, plain = {**CONFIG, "fragments": 1}, "one-experts" if layout == "experts" else "one"
    alone = run(jobs, plain, 1, config=config, synthetic=True)
    assert run(jobs, layout, ranks, config=config, synthetic=True) == alone


@pytest.mark.parametrize(
    ("layout", "ranks", "more"),
    [
        ("stages", 2, {"codec": "int8"}),
        ("stages", 2, {"codec": "int4", "fragments": 4}),
        ("stages-fsdp2", 4, {"codec": "int8"}),
        ("experts", 2, {"codec": "int8"}),
        ("experts", 4, {"codec": "powersgd"}),
        ("stages", 2, {"codec": "powersgd"}),
        ("interleaved", 2, {"merge": "rda"}),
    ],
    ids=str,
)
def test_racks_agree_with_every_codec(
    jobs: Jobs, layout: str, ranks: int, more: dict[str, Any]
) -> None:
    run(jobs, layout, ranks, config={**CONFIG, **more})


def test_moments_and_running_statistics_of_stages_are_averaged(jobs: Jobs) -> None:
    config = {
        **CONFIG, "second_moment_sync_period_steps": 16, "exchange_statistics": True,
        "momentum_sync_period_steps": 8,
    }  # fmt: skip
    merged = run(jobs, "stages", 2, config=config, normed=True, optimizer="AdamW")
    assert any(name.endswith("running_var") for name in merged)
