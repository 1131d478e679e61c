"""Models that are not all fp32, not all trained, not all contiguous, and deltas sent as
bfloat16."""

from __future__ import annotations

from typing import Any

import torch

from tests.process import train
from tests.process.racks import Job
from tests.process.replayed import model_bits, replayed

STEPS = 25
CONFIG: dict[str, Any] = {
    "lockstep": True, "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "outer_lr": 0.8,
    "outer_optimizer_momentum": 0.2, "codec": "bfloat16", "wait_timeout_s": 60,
}  # fmt: skip


def test_bfloat16_weights_keep_an_fp32_anchor(job: Job) -> None:
    first, second = job.run(steps=STEPS, model="bfloat16", config=CONFIG)
    assert first.weights == second.weights
    assert first.digest == second.digest
    outcome = replayed([first, second], "bfloat16", CONFIG)
    anchors = [versions[-1].values for versions in outcome.anchors]
    rounded = [anchor.bfloat16().float() for anchor in anchors]
    assert model_bits(first, "bfloat16", CONFIG) == [train.bits(anchor) for anchor in rounded]
    assert any(not a.equal(b) for a, b in zip(anchors, rounded, strict=True)), "fp32 holds more"


def test_tied_frozen_and_transposed_parameters(job: Job) -> None:
    """The tied one counts once, the frozen ones stay, the transposed one is written in place."""
    first, second = job.run(steps=STEPS, model="tied", config=CONFIG, keep_local=True)
    assert first.digest == second.digest
    outcome = replayed([first, second], "tied", CONFIG)
    for result, thetas in zip((first, second), outcome.thetas, strict=True):
        assert model_bits(result, "tied", CONFIG) == [train.bits(theta) for theta in thetas]
    start = train.weights(train.build("tied", 0))
    for result in (first, second):
        assert "second.weight" not in result.weights, "it is first.weight"
        for name, found in result.weights.items():
            assert (found == start[name]) == name.startswith("frozen"), name


def test_outer_momentum_and_rounding_reach_the_anchors(job: Job) -> None:
    """The two tests above would be blind if these settings did nothing."""
    first, second = job.run(steps=STEPS, config=CONFIG)
    outcome = replayed([first, second], "plain", CONFIG)
    plainer = replayed([first, second], "plain", {**CONFIG, "codec": "float32"})
    for versions, others in zip(outcome.anchors, plainer.anchors, strict=True):
        assert versions[-1].state is not None
        assert torch.count_nonzero(versions[-1].state) == versions[-1].values.numel()
        assert not versions[-1].values.equal(others[-1].values)
    found = [train.bits(versions[-1].values) for versions in outcome.anchors]
    assert model_bits(second, "plain", CONFIG) == found
