"""Racks whose ranks hold different modules: stages of a pipeline, experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.process.conftest import Jobs
from tests.process.racks import Job, Result
from tests.process.test_follow import assert_is, follow_to_the_end

SCRIPT = "tests.process.staged"
CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "shutdown_timeout_s": 60,
    "lockstep": True, "wait_timeout_s": 60,
}  # fmt: skip
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
        ("stages", 2, "1f1b"),
        ("interleaved", 2, ""),
        *(
            pytest.param(*cut, marks=pytest.mark.slow)
            for cut in (("stages", 2, "gpipe"), ("stages", 4, "1f1b"), ("interleaved", 4, ""))
        ),
    ],
    ids=str,
)
def test_a_pipeline_has_the_bits_of_the_model_in_one_process(
    jobs: Jobs, layout: str, ranks: int, schedule: str
) -> None:
    told = {"config": {**CONFIG, "fragments": 1}, "blocks": 8 if layout == "interleaved" else 4}
    alone = run(jobs, "one", 1, **told)
    assert run(jobs, layout, ranks, schedule=schedule, **told) == alone


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("stages-fsdp2", 4), ("experts", 2), ("experts", 4), ("stages-experts", 4)],
    ids=str,
)
def test_however_modules_lie_on_ranks_equal_gradients_merge_to_equal_bits(
    jobs: Jobs, layout: str, ranks: int
) -> None:
    """Stages in shards, and experts over a mesh of their own beside shards over all ranks."""
    config, plain = {**CONFIG, "fragments": 1}, "one-experts" if "experts" in layout else "one"
    alone = run(jobs, plain, 1, config=config, synthetic=True)
    assert run(jobs, layout, ranks, config=config, synthetic=True) == alone


@pytest.mark.parametrize(
    ("layout", "ranks", "more"),
    [
        ("stages", 2, {"codec": "int8"}),
        ("experts", 2, {"codec": "int8"}),
        *(
            pytest.param(*cut, marks=pytest.mark.slow)
            for cut in (
                ("stages", 2, {"codec": "int4", "fragments": 4}),
                ("stages", 2, {"codec": "powersgd"}),
                ("stages-fsdp2", 4, {"codec": "int8"}),
                ("experts", 4, {"codec": "powersgd"}),
                ("stages-experts", 4, {"codec": "int8"}),
                ("interleaved", 2, {"merge": "rda"}),
            )
        ),
    ],
    ids=str,
)
def test_racks_of_unequal_ranks_agree_with_lossy_codecs_and_measured_merges(
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


@pytest.mark.parametrize(
    ("layout", "ranks", "dcp"),
    [
        ("stages", 2, False),
        *(
            pytest.param(*cut, marks=pytest.mark.slow)
            for cut in (
                ("stages", 2, True),
                ("stages-experts", 4, False),
                ("stages-experts", 4, True),
            )
        ),
    ],
    ids=str,
)
def test_a_resumed_job_of_stages_has_the_bits_of_one_that_was_not_interrupted(
    jobs: Jobs, tmp_path: Path, layout: str, ranks: int, dcp: bool
) -> None:
    config = {**CONFIG, "codec": "int8"}
    cut = str(tmp_path / "cut")
    whole = run(jobs, layout, ranks, config=config, checkpoints={"12": cut}, dcp=dcp)
    assert run(jobs, layout, ranks, config=config, resume=cut, dcp=dcp) == whole
    job = jobs()
    plain = "one-experts" if "experts" in layout else "one"
    told = {"script": SCRIPT, "steps": STEPS, "config": config, "resume": cut, "layout": plain}
    for rack in range(2):
        job.start(rack, **told, dcp=dcp)
    for rack in range(2):
        job.ended(rack, code=1)
        kind, text = job.told(rack)["error"]
        assert kind == "CheckpointError"
        cuttable = layout == "stages" and not dcp
        why = "param blocks." if cuttable else f"ranks per rack was {ranks}, is 1 here"
        assert f"is of another plan: {why}" in text


def test_a_killed_rack_of_stages_comes_back_and_ends_with_the_bits_of_the_others(
    jobs: Jobs,
) -> None:
    """The one that coordinated, with a momentum that it copies, stage by stage."""
    job = jobs(racks=3, ranks=2)
    config = {"fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "codec": "int8",
              "shutdown_timeout_s": 60}  # fmt: skip
    told = {"script": SCRIPT, "steps": 10**6, "config": config, "pace_ms": 10,
            "stop": job.gate("stop"), "optimizer": "AdamW"}  # fmt: skip
    job.bring_back(told, dies_at=40)
    results = [job.result(rack, rank) for rack in range(3) for rank in range(2)]
    merged = weights_of(results[:2])
    assert weights_of(results[2:4]) == merged
    assert weights_of(results[4:]) == merged
    assert not [e for rank in range(2) for e in job.events(0, rank, kind="state-fresh")]
    copied = [job.events(0, rank, kind="state-copied") for rank in range(2)]
    assert all(copied), "each stage copies its own state"


def test_a_follower_puts_the_stages_together(jobs: Jobs) -> None:
    job = jobs(ranks=2)
    told = {"script": SCRIPT, "config": {**CONFIG, "lockstep": False}}
    version, held = follow_to_the_end(job, told, ranks=2)
    assert_is(version, {"weights": {**held[0]["weights"], **held[1]["weights"]}})


def test_buffers_of_a_later_stage_that_differ_at_the_start_are_named(jobs: Jobs) -> None:
    told = {"script": SCRIPT, "steps": 4, "config": CONFIG, "table": "blocks.3"}
    found = jobs(ranks=2).run(**told)[0].kinds("buffers-differ")
    assert [(e["buffer"], e["more"], e["racks"]) for e in found] == [("blocks.3.table", 0, [1])]


def failing(job: Job, **options: Any) -> list[tuple[str, str]]:
    """The errors of the racks."""
    for rack in range(job.racks):
        job.start(rack, **{"script": SCRIPT, "config": CONFIG, **options})
    for rack in range(job.racks):
        assert job.ended(rack) != 0
    return [error for rack in range(job.racks) for error in job.errors(rack)]


@pytest.mark.parametrize(
    ("layout", "error", "parameter", "ranks"),
    [
        ("local", "ConfigError", "blocks.0.norm.weight", "0, 1"),
        ("alike", "UsageError", "enter.weight", "0 and 1"),
    ],
)
def test_parts_under_one_name_that_are_no_replicas_are_refused_before_anything_is_merged(
    jobs: Jobs, layout: str, error: str, parameter: str, ranks: str
) -> None:
    """Where two blocks begin with equal norms, or whole stages alike, they would pass for them."""
    for kind, text in failing(jobs(ranks=2), layout=layout, steps=STEPS):
        assert kind == error
        assert parameter in text
        assert f"ranks {ranks} of this rack" in text


def test_a_parameter_that_one_rack_lacks_is_refused_by_name(jobs: Jobs) -> None:
    job = jobs(ranks=2)
    for rack in range(2):
        left_out = "blocks.3.linear.bias" if rack else ""
        job.start(rack, script=SCRIPT, config=CONFIG, leave_out=left_out)
    assert job.ended(1) != 0
    kind, text = job.errors(1)[0]
    assert kind == "PlanMismatch"
    assert "blocks.3.linear.bias" in text
