"""Racks of two ranks, DDP on gloo inside: a rank speaks for its slice, all hold
all."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tests.process.conftest import Jobs
from tests.process.train import tokens_of

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "shutdown_timeout_s": 60,
}  # fmt: skip
STEPS = 20
WHOLE_ENDS = True


def test_four_ranks_hold_the_same_bits(jobs: Jobs) -> None:
    results = jobs(ranks=2).run(
        steps=STEPS, config={**CONFIG, "lockstep": True, "wait_timeout_s": 60}
    )
    first = results[0]
    assert len(results) == 4
    for result in results:
        assert result.weights == first.weights
        assert result.digest == first.digest
        assert result.commits == first.commits
        assert result.threads == []
        assert len(result.commits[0]["digests"]) == 2, "one per rank: each merges its own slice"
    assert first.losses != results[1].losses, "each rank has a batch of its own"
    for rack in range(2):
        both_ranks = 2 * sum(tokens_of(rack, step) for step in range(1, STEPS + 1))
        for fragment in range(2):
            shares = [
                share
                for commit in first.commits
                if commit["fragment"] == fragment
                for share in commit["members"]
                if share["rack"] == rack
            ]
            assert sum(share["tokens"] for share in shares) == both_ranks
            assert sum(share["steps"] for share in shares) == STEPS


def test_a_rack_that_loses_a_rank_ends_and_the_other_trains_on(jobs: Jobs) -> None:
    """torchrun ends the rack; nothing that this rack could do may hold up the other one."""
    job = jobs(ranks=2, witness=True, torchrun=True)
    gate, never = job.gate(), job.gate("never")
    config = {**CONFIG, "stall_max_s": 0.3, "shutdown_timeout_s": 60}
    job.start(0, steps=60, config=config, at={"30": [["gate", gate]]}, pace_ms=5)
    at = {"24": [["die", "SIGKILL", 1], ["gate", never]]}
    job.start(1, steps=60, config=config, at=at, pace_ms=5)
    assert job.ended(1) != 0
    job.event(0, "rack-silent", peer=1)
    Path(gate).touch()
    job.ended(0, code=0)
    for rank in range(job.ranks):
        result = job.result(0, rank)
        assert (result.status["step"], result.status["outcome"]) == (60, "merged")
        assert result.weights == job.result(0, 0).weights
    assert job.processes[1].code != -signal.SIGKILL, "torchrun itself was not killed"


def test_yes_of_one_rank_is_the_answer_of_all_ranks_of_its_rack(jobs: Jobs) -> None:
    """Rank 1 of rack 0 says yes at step 3, rank 0 of rack 1 at step 4; nobody of the other rack."""
    asks = {0: {"3": [["ask", 1]], "4": [["ask", 9]]}, 1: {"3": [["ask", 9]], "4": [["ask", 0]]}}
    job = jobs(ranks=2)
    job.run(steps=5, config=CONFIG, per={rack: {"at": at} for rack, at in asks.items()})
    for rank in (0, 1):
        assert job.told(0, rank)["answers"] == [True, False]
        assert job.told(1, rank)["answers"] == [False, True]
