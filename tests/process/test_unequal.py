"""Racks with different numbers of ranks in one job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.process.conftest import Jobs
from tests.process.racks import Result
from tests.process.test_follow import assert_is, follow_to_the_end
from tests.process.train import tokens_of

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "shutdown_timeout_s": 60,
    "lockstep": True, "wait_timeout_s": 60, "token_weighted_merge": False,
}  # fmt: skip
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


def weigh(results: list[Result], sizes: Sequence[int]) -> None:
    """Every rank counts its tokens once, however many parts it hosts."""
    for rack, size in enumerate(sizes):
        shares = [
            share
            for commit in results[0].commits
            if commit["fragment"] == 0
            for share in commit["members"]
            if share["rack"] == rack
        ]
        tokens = size * sum(tokens_of(rack, step) for step in range(1, STEPS + 1))
        assert sum(share["tokens"] for share in shares) == tokens


def run(jobs: Jobs, sizes: Sequence[int], **options: Any) -> dict[str, list[int]]:
    """All ranks of a rack have one batch, so racks of any size train alike."""
    job = jobs(racks=len(sizes), sizes=sizes if len(set(sizes)) > 1 else (), ranks=sizes[0])
    config = {**CONFIG, **options.pop("config", {})}
    told = {"steps": STEPS, "same_data": True, "config": config, **options}
    results = job.run(**{name: each for name, each in told.items() if each is not None})
    if "resume" not in options:
        weigh(results, sizes)
    return agree(results)


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
    job.bring_back(told, at={"40": [["die", "SIGKILL"]]})
    agree([job.result(rack, rank) for rack in range(3) for rank in range(sizes[rack])])
    assert job.events(0, kind="state-copied")
    assert not job.events(0, kind="state-fresh")


@pytest.mark.parametrize(("parallel", "sizes"), [("ddp", (1, 2)), ("fsdp2", (2, 3))])
def test_resumed_job_of_unequal_racks_has_the_bits_of_one_that_was_not_interrupted(
    jobs: Jobs, parallel: str, sizes: Sequence[int], tmp_path: Path
) -> None:
    """DDP orders its buckets anew after the first step of a process, so three ranks would add their
    gradients in another order in the first step of a resumed job."""
    config = {"codec": "int8", "join_copies_state": parallel == "ddp"}
    told = {"sizes": sizes, "config": config, "parallel": parallel, "same_data": None}
    cut = str(tmp_path / "cut")
    whole = run(jobs, **told, checkpoints={"12": cut})
    assert run(jobs, **told, resume=cut) == whole


def test_follower_puts_the_parts_of_unequal_racks_together(jobs: Jobs) -> None:
    job = jobs(sizes=(2, 3))
    config = {**CONFIG, "lockstep": False, "join_copies_state": False}
    told = {"script": "tests.process.staged", "layout": "fsdp2", "synthetic": True,
            "config": config}  # fmt: skip
    version, held = follow_to_the_end(job, told)
    assert_is(version, held[0])


def refused(jobs: Jobs, sizes: Sequence[int], **options: Any) -> list[str]:
    """The errors of the ranks of rack 0, which starts alone."""
    job = jobs(sizes=sizes)
    job.start(0, **{"config": CONFIG, **options})
    assert job.ended(0) != 0
    found = job.errors(0)
    assert {kind for kind, _ in found} == {"ConfigError"}
    return [text for _, text in found]


def test_model_that_unequal_racks_cannot_exchange_is_refused_by_name(jobs: Jobs) -> None:
    """Before any socket is opened: the other rack is not there."""
    staged = {"script": "tests.process.staged", "layout": "stages"}
    for text in refused(jobs, (2, 1), **staged):
        assert "other parameters on other ranks" in text
        assert "as many ranks on each" in text
    for text in refused(jobs, (2, 1), parallel="tp", model="even"):
        assert "0.weight" in text
        assert "as many ranks on every rack" in text
    for text in refused(jobs, (2, 1), parallel="fsdp2"):
        assert "join_copies_state=False" in text
