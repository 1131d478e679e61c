"""An offer is pulled while its rack still encodes it, between real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.process.conftest import Jobs
from tests.process.racks import until
from tests.process.replayed import anchor_bits, model_bits, replayed

LOCKSTEP: dict[str, Any] = {
    "lockstep": True, "fragments": 3, "sync_period_steps": 8, "overlap_steps": 2,
    "wait_timeout_s": 60,
}  # fmt: skip


@pytest.mark.parametrize("blocking", [True, False])
def test_offer_that_came_before_its_announcement_is_merged_with_the_bits_of_the_reference(
    jobs: Jobs, blocking: bool
) -> None:
    """Rack 1 announces no offer before rack 0 has all its bytes. Blocking, its training thread
    encodes them; else a worker does."""
    job = jobs()
    came, config = job.gate("came"), {**LOCKSTEP, "concurrent_outer_step": not blocking}
    acts = {0: ["tell_early", 1, came], 1: ["grow_slowly", came]}
    per = {rack: {"at": {"1": [act]}} for rack, act in acts.items()}
    results = job.run(per, steps=21, config=config)
    assert Path(came).exists()
    assert len({result.digest for result in results}) == 1
    for result in results:
        assert result.kinds("fetch-failed", "differs") == []
        assert all(len(commit["members"]) == 2 for commit in result.commits)
    assert anchor_bits(replayed(results, "plain", config)) == model_bits(
        results[0], "plain", config
    )


def test_rack_that_dies_before_it_announces_what_others_have_pulled_is_not_merged(
    jobs: Jobs,
) -> None:
    """Rack 0 has all bytes of an offer that rack 1 never announces, as it is killed there."""
    job = jobs(racks=3)
    came, config = job.gate("came"), {"fragments": 1, "sync_period_steps": 4, "overlap_steps": 1}
    options: dict[str, Any] = {"steps": 400, "config": config, "pace_ms": 5}
    acts = {0: ["tell_early", 1, came], 1: ["grow_slowly", job.gate("never")]}
    for rack in range(3):
        at = {"1": [acts[rack]]} if rack in acts else {}
        job.start(rack, **options, at=at)
    until(Path(came).exists, lambda: f"the bytes come\n{job.stacks()}")
    job.kill(1)
    results = job.finished(0, 2)
    assert len({result.digest for result in results}) == 1
    for result in results:
        named = [member["rack"] for commit in result.commits for member in commit["members"]]
        assert set(named) == {0, 2}
