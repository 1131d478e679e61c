"""Two racks on GPUs, which they share: replicas meet over NCCL, shards stay where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.process.conftest import Jobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs"),
]

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "lockstep": True,
    "wait_timeout_s": 60,
}  # fmt: skip


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2", "fsdp2-keep"])
def test_four_gpus_hold_the_same_bits(jobs: Jobs, parallel: str) -> None:
    at = {str(step): [["evaluate"]] for step in range(1, 21)} | {"end": [["evaluate"]]}
    results = jobs(ranks=2).run(steps=20, config=CONFIG, parallel=parallel, device="cuda", at=at)
    first = results[0]
    assert first.commits
    for result in results:
        assert result.weights == first.weights
        assert result.digest == first.digest
        assert result.status["device_bytes_peak"] > 0


def test_a_slow_rack_on_a_gpu_is_named_with_its_cause(jobs: Jobs) -> None:
    """It sleeps before its steps, and its products are as fast as ever."""
    per: dict[int, dict[str, Any]] = {rack: {"pace_ms": 60.0 + 36 * rack} for rack in range(3)}
    per[0]["at"] = {"40": [["slow", 3.0]]}
    config = {"fragments": 2, "sync_period_steps": 16, "overlap_steps": 4}
    results = jobs(racks=3).run(steps=70, config=config, per=per, device="cuda")
    (cause,) = results[0].kinds("fail-slow-cause")
    assert (cause["slow_rack"], cause["cause"]) == (0, "input")
    assert len({result.digest for result in results}) == 1


@pytest.mark.parametrize("codec", ["int4", "topk", "powersgd"])
def test_free_racks_on_gpus_merge_compressed_offers_to_the_same_bits(
    jobs: Jobs, codec: str
) -> None:
    config = {**CONFIG, "lockstep": False, "codec": codec}
    per = {rack: {"pace_ms": 5.0 + 3 * rack} for rack in range(2)}
    results = jobs(ranks=2).run(
        steps=60, config=config, per=per, parallel="fsdp2", device="cuda", optimizer="AdamW",
        learning_rate=0.01,
    )  # fmt: skip
    assert len({result.digest for result in results}) == 1
    for result in results:
        assert result.status["outcome"] == "merged"
        assert sum(result.status["ledger"].values()) == pytest.approx(result.status["tokens"])
