"""Two racks of two GPUs each: replicas meet over NCCL, shards stay where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.process.conftest import Jobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 CUDA GPUs"),
]

CONFIG: dict[str, Any] = {
    "fragments": 2,
    "sync_period_steps": 8,
    "overlap_steps": 2,
    "lockstep": True,
    "give_up_s": 60,
}


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
