"""Racks whose GPU encodes what it offers, beside racks whose host does: the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.process.conftest import Jobs

pytestmark = [pytest.mark.gpu]

CONFIG: dict[str, Any] = {
    "lockstep": True, "fragments": 3, "sync_period_steps": 8, "overlap_steps": 2,
    "wait_timeout_s": 60,
}  # fmt: skip
STEPS, CUT = 21, 13
"""At the cut an offer is open, and the fragments merged before owe a residual."""


def of(codec: str, encode_on: str = "device") -> dict[str, Any]:
    return {**CONFIG, "codec": codec, "encode_on": encode_on}


@pytest.mark.parametrize(
    ("codec", "parallel"), [("int4", "ddp"), ("e3m0", "fsdp2"), ("topk", "ddp"), ("topk", "fsdp2")]
)
def test_racks_that_encode_elsewhere_end_with_the_same_bits(
    jobs: Jobs, codec: str, parallel: str
) -> None:
    options: dict[str, Any] = {"steps": STEPS, "parallel": parallel, "device": "cuda"}
    plain = jobs().run(config=of(codec, "host"), **options)
    mixed = jobs().run(config=of(codec), per={1: {"config": of(codec, "host")}}, **options)
    for one, other in zip(plain, mixed, strict=True):
        assert one.commits
        assert one.weights == other.weights
        assert one.digest == other.digest
        assert [e["bytes"] for e in one.kinds("encoded")] == [
            e["bytes"] for e in other.kinds("encoded")
        ]


@pytest.mark.parametrize("codec", ["int4", "topk"])
def test_free_racks_that_encode_on_the_device_merge_to_the_same_bits(
    jobs: Jobs, codec: str
) -> None:
    """Offers may be late, and with staleness_max_rounds 0 dropped: pending is not owed then."""
    config = {**of(codec), "lockstep": False, "staleness_max_rounds": 0}
    per = {rack: {"pace_ms": 5.0 + 7 * rack} for rack in range(2)}
    results = jobs().run(
        steps=60, config=config, per=per, device="cuda", optimizer="AdamW", learning_rate=0.01
    )
    assert len({result.digest for result in results}) == 1
    for result in results:
        assert result.status["outcome"] == "merged"
        assert sum(result.status["ledger"].values()) == pytest.approx(result.status["tokens"])


@pytest.mark.parametrize("codec", ["int4", "topk"])
def test_a_job_resumed_on_the_device_has_the_bits_of_one_that_was_not_interrupted(
    jobs: Jobs, tmp_path: Path, codec: str
) -> None:
    options: dict[str, Any] = {"steps": STEPS, "device": "cuda"}
    whole = jobs().run(config=of(codec, "host"), **options)
    folder = tmp_path / "cuts" / "step-13"
    jobs().run(config=of(codec), **options, checkpoints={str(CUT): str(folder)})
    again = jobs().run(config=of(codec), **options, resume=str(folder.parent))
    for one, resumed in zip(whole, again, strict=True):
        assert one.weights == resumed.weights
        assert one.digest == resumed.digest
