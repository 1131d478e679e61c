"""Racks average the running statistics of BatchNorm.

Each rack kept its own: the merged model had the same weights everywhere, and gave other answers on
every rack in evaluation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.process.conftest import Jobs
from tests.process.test_moments import mean_of

H, STEPS = 4, 10
CONFIG: dict[str, Any] = {
    "lockstep": True, "fragments": 2, "sync_period_steps": H, "overlap_steps": 0,
    "wait_timeout_s": 60,
}  # fmt: skip
NAMES = ("1.running_mean", "1.running_var")
STATISTICS = 2
"""The number of their fragment, after those of the weights."""


def behind(told: dict[str, Any], step: int, name: str) -> Tensor:
    return torch.tensor(told["moments"][step - 1][f"buffer:{name}"])


@pytest.mark.parametrize(("ranks", "parallel"), [(1, "ddp"), (2, "ddp"), (2, "fsdp2")], ids=str)
def test_all_racks_go_on_from_the_mean_and_end_with_the_same_bits(
    jobs: Jobs, ranks: int, parallel: str
) -> None:
    job = jobs(ranks=ranks)
    results = job.run(
        steps=STEPS, config=CONFIG, parallel=parallel, model="normed", tell_moments=True
    )
    told = [job.told(rack) for rack in range(2)]
    for name in NAMES:
        for step in range(1, STEPS + 1):
            one, other = (behind(each, step, name) for each in told)
            assert torch.equal(one, other) == (step % H == 0), f"{name} behind step {step}"
    merges = [each for each in results[0].merges if each["fragment"] == STATISTICS]
    assert [each["members"][0]["capture_step"] for each in merges] == [4, 8, 10]
    assert all(each["moments"] for each in merges)
    tail = [member["tokens"] for member in merges[-1]["members"]]
    for name in NAMES if ranks == 1 else ():
        mean = mean_of([behind(each, STEPS, name) for each in told], tail)
        at_end = torch.tensor(results[0].weights[name], dtype=torch.int32).view(torch.float32)
        assert torch.allclose(at_end, mean, rtol=1e-6), f"{name} at the end"
    assert all(result.weights == results[0].weights for result in results)
    assert {result.status["outcome"] for result in results} == {"merged"}


def test_free_racks_end_with_the_same_statistics_also_in_a_run_shorter_than_a_period(
    jobs: Jobs,
) -> None:
    job = jobs(racks=3)
    one, *others = job.run(steps=STEPS, config={"fragments": 2}, model="normed")
    assert all(other.weights == one.weights for other in others)
    fresh = dict(zip(NAMES, (0.0, 1.0), strict=True))
    for name, value in fresh.items():
        at_end = torch.tensor(one.weights[name], dtype=torch.int32).view(torch.float32)
        assert not torch.isclose(at_end, torch.tensor(value), atol=1e-3).any(), "nobody trained it"


def test_a_rack_that_joins_begins_with_the_statistics_of_the_others(jobs: Jobs) -> None:
    job = jobs(racks=2)
    gate = job.gate()
    # The other rack waits at a gate, where it copies nothing.
    config = {"fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "shutdown_timeout_s": 60}
    options: dict[str, Any] = {"config": config | {"join_copies_state": False}, "model": "normed"}
    job.start(0, steps=40, at={"38": [["gate", gate]]}, **options)
    job.start(1, steps=40, at={"30": [["gate", job.gate("never")]]}, **options)
    job.event(1, "applied", fragment=STATISTICS)
    job.kill(1)
    back = job.start(1, name="back", steps=6, **options)
    job.event(1, "joined")
    Path(gate).touch()
    job.ended(0, code=0)
    assert back.wait() == 0, job.logs()
    begun = job.told(1, name="back")["buffers"]["1.running_var"]
    assert all(abs(value - 1) > 1e-3 for value in begun), "they are those of a fresh model"
    assert job.result(1, name="back").weights == job.result(0).weights


def test_a_resumed_job_has_the_statistics_of_one_that_was_not_interrupted(jobs: Jobs) -> None:
    job = jobs(racks=2)
    folder = str(job.folder / "cut")
    options: dict[str, Any] = {"config": CONFIG, "model": "normed", "tell_moments": True}
    whole = job.run(steps=STEPS, checkpoints={"6": folder}, **options)
    again = jobs(racks=2)
    resumed = again.run(steps=STEPS, resume=folder, **options)
    assert [each.weights for each in resumed] == [each.weights for each in whole]
    for rack in range(2):
        of_both = job.told(rack)["moments"][6:], again.told(rack)["moments"]
        assert of_both[0] == of_both[1]


def test_statistics_that_met_an_infinity_are_the_last_mean_again(jobs: Jobs) -> None:
    """They stay NaN for ever: the rack had nothing to offer, and would have ended with Diverged,
    though its weights were sound."""
    job = jobs(racks=2)
    spoilt = {1: {"at": {"7": [["spoil_statistics"]]}}}
    one, other = job.run(spoilt, steps=STEPS, config=CONFIG, model="normed")
    assert one.weights == other.weights
    (reset,) = other.kinds("statistics-reset")
    assert (reset["step"], reset["buffers"]) == (8, ", ".join(NAMES))
    assert one.kinds("statistics-reset") == []


def test_rack_that_ends_last_does_not_replace_the_average(jobs: Jobs) -> None:
    """Its last offer is merged alone, when the other one has ended."""
    job = jobs(racks=2)
    gate = job.gate()
    options: dict[str, Any] = {
        "config": {"fragments": 2, "sync_period_steps": H, "overlap_steps": 0, "stall_max_s": 0.2},
        "steps": STEPS, "model": "normed", "tell_moments": True,
    }  # fmt: skip
    job.start(0, **options)
    job.start(1, at={"9": [["gate", gate]]}, **options)
    # Closing, unless they were captured late, in the last step.
    job.event(0, "captured", fragment=STATISTICS, step=STEPS)
    Path(gate).touch()
    for rack in range(2):
        job.ended(rack, code=0)
    own = behind(job.told(1), STEPS, NAMES[0])
    for rack in range(2):
        at_end = torch.tensor(job.result(rack).weights[NAMES[0]], dtype=torch.int32)
        assert not torch.equal(at_end.view(torch.float32), own), "the average is its own value"
    assert job.result(0).weights == job.result(1).weights
