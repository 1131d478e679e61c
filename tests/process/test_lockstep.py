"""In lockstep everything is decided by the configuration, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest

from mend_lab.reference.radial import fp32
from tests.process import train
from tests.process.conftest import Jobs
from tests.process.racks import Result
from tests.process.replayed import anchor_bits, in_lockstep, model_bits, replayed

STEPS = 21
CONFIG: dict[str, Any] = {
    "lockstep": True, "fragments": 3, "sync_period_steps": 8, "overlap_steps": 2, "outer_lr": 0.7,
    "outer_optimizer_momentum": 0.3, "wait_timeout_s": 60,
}  # fmt: skip
"""Captures after 2, 5, 8, 10, 13, 16, 18, 21; the last is applied by the shutdown, like its
tail."""


def run(jobs: Jobs, *, witness: bool = False, **changes: Any) -> list[Result]:
    job = jobs(witness=witness)
    results = job.run(steps=STEPS, config={**CONFIG, **changes})
    if witness:
        job.witness_ended()
    return results


@pytest.fixture(params=[False, True], ids=["rack 0 coordinates", "witness"])
def results(jobs: Jobs, request: pytest.FixtureRequest) -> list[Result]:
    return run(jobs, witness=request.param)


def test_two_racks_end_with_the_bits_of_the_reference(results: list[Result]) -> None:
    """Before the shutdown as the schedule alone says; and to the end as the events say."""
    first, second = results
    assert first.weights == second.weights
    assert first.digest == second.digest
    assert first.commits == second.commits
    assert first.losses != second.losses, "each rack has data of its own"
    for result in results:
        status = result.status
        assert status["step"] == STEPS
        assert status["ledger"] == {"merged": status["tokens"], "open": 0, "discarded": 0}
        assert status["rounds_missed"] == {}

    for commit in first.commits:
        rounds = commit["version"] - 1
        assert commit["rounds"] == rounds
        at_the_end = commit["members"][0]["capture_step"] == STEPS and commit["fragment"] != 1
        expected = 0 if at_the_end else fp32(rounds / (rounds + 10))
        # None where the offers point against it; the bits below say whether rightly.
        assert commit["momentum"] in (0, expected)
        assert expected < fp32(0.3)
    assert any(commit["momentum"] for commit in first.commits)
    newest = first.commits[-1]
    said = (first.status["outer_rounds"], first.status["outer_momentum"])
    assert said == (newest["rounds"], newest["momentum"])
    assert newest["rounds"] > 0

    scheduled = in_lockstep(2, "plain", CONFIG, STEPS)
    for commit in first.commits:
        assert [member["rack"] for member in commit["members"]] == [0, 1]
        assert commit["dropped"] == []
    outcome = replayed(results, "plain", CONFIG)
    for fragment, anchors in enumerate(scheduled.anchors):
        again = outcome.anchors[fragment]
        # Fragment 1 was captured after the last step anyway: the shutdown has nothing to add.
        assert len(again) == len(anchors) + (fragment != 1)
        for ours, theirs in zip(anchors, again, strict=False):
            assert train.bits(ours.values) == train.bits(theirs.values)
    assert anchor_bits(outcome) == model_bits(first, "plain", CONFIG)


def test_blocking_and_overlapped_are_the_same_run(jobs: Jobs) -> None:
    """Exchanging while training goes on changes when things happen, never what happens."""
    overlapped = run(jobs)
    blocking = run(jobs, concurrent_outer_step=False)
    for ours, theirs in zip(overlapped, blocking, strict=True):
        assert ours.losses == theirs.losses
        assert ours.merges == theirs.merges
        assert ours.weights == theirs.weights
        assert ours.digest == theirs.digest


def test_racks_that_merge_a_slice_each_end_with_the_bits_of_the_reference(jobs: Jobs) -> None:
    """Over real sockets: slices of payloads, merged slices, and nothing of a whole payload. Four
    racks do so by themselves."""
    sharded = {"codec": "bfloat16"}
    results = jobs(racks=4).run(steps=STEPS, config={**CONFIG, **sharded})
    assert len({result.digest for result in results}) == 1
    assert len({str(result.weights) for result in results}) == 1
    for commit in results[0].commits:
        assert commit["reason"] == "lockstep, sharded"
        assert [member["rack"] for member in commit["members"]] == [0, 1, 2, 3]
    outcome = replayed(results, "plain", {**CONFIG, **sharded})
    assert anchor_bits(outcome) == model_bits(results[0], "plain", {**CONFIG, **sharded})


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_slices_of_racks_of_two_ranks_have_the_bits_of_a_mesh(jobs: Jobs, parallel: str) -> None:
    """Each rank cuts its own part of a fragment."""
    plans = {"auto": "lockstep, sharded", "mesh": "lockstep"}
    found = {}
    for plan, reason in plans.items():
        config = {**CONFIG, "exchange_plan": plan}
        found[plan] = jobs(racks=4, ranks=2).run(steps=STEPS, config=config, parallel=parallel)
        assert {commit["reason"] for commit in found[plan][0].commits} == {reason}
    for ours, theirs in zip(*found.values(), strict=True):
        assert ours.weights == theirs.weights
        assert ours.digest == theirs.digest


def test_racks_on_the_same_data_are_warned_of_it_once(jobs: Jobs) -> None:
    """A loader that was sharded by the ranks of a rack only went unnoticed."""
    job = jobs()
    for result in job.run(steps=STEPS, config=CONFIG, one_dataset=True):
        (warned,) = result.kinds("same-data")
        assert warned["racks"] == [0, 1]


def test_racks_on_data_of_their_own_are_not_warned(jobs: Jobs) -> None:
    for result in run(jobs):
        assert result.kinds("same-data") == []


def test_racks_whose_loops_end_at_unequal_steps_merge_all_and_repeat_bit_for_bit(
    jobs: Jobs,
) -> None:
    """Whichever is slow. A rack that has ended waits for the others, whose last rounds go without
    it."""
    steps = {0: {"steps": 23}, 1: {"steps": 20}, 2: {"steps": 21}}
    runs = []
    for slow in range(2):
        per = {rack: {**own, "pace_ms": 10.0 * (rack == slow)} for rack, own in steps.items()}
        results = jobs(racks=3).run(per, config=CONFIG)
        assert len({result.digest for result in results}) == 1
        for rack, result in enumerate(results):
            status = result.status
            assert (status["outcome"], status["step"]) == ("merged", steps[rack]["steps"])
            assert status["ledger"] == {"merged": status["tokens"], "open": 0, "discarded": 0}
        runs.append(results)
    for ours, theirs in zip(*runs, strict=True):
        assert ours.losses == theirs.losses
        assert ours.merges == theirs.merges
        assert ours.weights == theirs.weights


def test_rack_that_ends_long_before_the_others_in_lockstep_is_named_at_the_end(jobs: Jobs) -> None:
    """The others go on, and everybody's outcome says so."""
    early, late = jobs().run({0: {"steps": 17}, 1: {"steps": 37}}, config=CONFIG)
    for result in (early, late):
        assert (result.status["outcome"], result.status["ledger"]["open"]) == ("merged", 0)
        detail = result.status["outcome_detail"]
        assert "the last 7 rounds merged rack 1 alone" in detail
        assert "rack 0 ended at its step 17" in detail
    (told,) = late.kinds("last-rounds-alone")
    assert (told["alone"], told["rounds"], told["since_step"]) == (1, 7, 26)
