"""Racks with different numbers of ranks in one job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.process.conftest import Jobs
from tests.process.racks import Result, until

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
    told = {"steps": STEPS, "same_data": True, "config": config, **options}
    return agree(job.run(**{name: each for name, each in told.items() if each is not None}))


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_ddp_of_one_and_two_ranks_has_the_bits_of_two_and_two(jobs: Jobs, codec: str) -> None:
    told = {"config": {"codec": codec}}
    assert run(jobs, (1, 2), **told) == run(jobs, (2, 2), **told)


def run_shards(jobs: Jobs, sizes: Sequence[int], **options: Any) -> dict[str, list[int]]:
    """With gradients that no number of ranks changes."""
    config = {**options.pop("config", {}), "join_copies_state": False}
    told = {"script": "tests.process.staged", "layout": "fsdp2", "synthetic": True, **options}
    return run(jobs, sizes, config=config, same_data=None, **told)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 3), (2, 4), (3, 1, 2)], ids=str)
def test_shards_over_racks_of_any_size_have_the_bits_of_whole_models(
    jobs: Jobs, sizes: Sequence[int]
) -> None:
    """2 and 3 ranks cut the tensors at different rows."""
    alike = (1,) * len(sizes)
    assert run_shards(jobs, sizes) == run_shards(jobs, alike, layout="one")


def test_lossy_payloads_of_a_rank_with_two_parts_are_those_of_two_ranks(jobs: Jobs) -> None:
    """Blocks of int8 begin where those of 2 and 2 ranks do."""
    told = {"config": {"codec": "int8"}}
    assert run_shards(jobs, (1, 2), **told) == run_shards(jobs, (2, 2), **told)


@pytest.mark.parametrize("codec", ["int8", "powersgd"])
def test_racks_that_cut_rows_differently_agree_with_lossy_codecs(jobs: Jobs, codec: str) -> None:
    run_shards(jobs, (2, 3), config={"codec": codec})


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 1)], ids=str)
def test_killed_rack_of_another_size_comes_back_with_the_state_of_a_donor(
    jobs: Jobs, sizes: Sequence[int]
) -> None:
    """The one that coordinated. Its optimizer's momentum is that of a rack of another size."""
    job = jobs(racks=3, sizes=sizes)
    config = {"fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "codec": "int8",
              "shutdown_timeout_s": 60}  # fmt: skip
    told = {"steps": 10**6, "config": config, "pace_ms": 10, "stop": job.gate("stop"),
            "optimizer": "AdamW"}  # fmt: skip
    for rack in range(3):
        job.start(rack, **told, at={} if rack else {"40": [["die", "SIGKILL"]]})
    assert job.ended(0) != 0
    until(lambda: any(job.events(rack, kind="takes-over") for rack in (1, 2)), "another takes over")
    job.start(0, **told)
    until(lambda: bool(job.events(0, kind="joined")), lambda: f"rack 0 joins\n{job.stacks()}")
    version = job.events(0, kind="joined")[0]["versions"][1]
    job.event(0, "commit", fragment=1, version=version + 2)
    Path(job.gate("stop")).touch()
    for rack in range(3):
        job.ended(rack, code=0)
    agree([job.result(rack, rank) for rack in range(3) for rank in range(sizes[rack])])
    assert job.events(0, kind="state-copied")
    assert not job.events(0, kind="state-fresh")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_resumed_job_of_unequal_racks_has_the_bits_of_one_that_was_not_interrupted(
    jobs: Jobs, parallel: str, tmp_path: Path
) -> None:
    config = {"codec": "int8", "join_copies_state": parallel == "ddp"}
    told = {"sizes": (2, 3), "config": config, "parallel": parallel, "same_data": None}
    cut = str(tmp_path / "cut")
    whole = run(jobs, **told, checkpoints={"12": cut})
    assert run(jobs, **told, resume=cut) == whole
