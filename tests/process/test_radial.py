"""merge="rda" needs the length of whole tensors, of which no rank holds more than a part. However a
rack is cut, the bits are those of one rank, and those of the reference."""

from __future__ import annotations

from typing import Any

import pytest

from tests.process.conftest import Jobs
from tests.process.racks import Result
from tests.process.replayed import anchor_bits, in_lockstep, model_bits, replayed

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "shutdown_timeout_s": 60,
    "lockstep": True, "wait_timeout_s": 60, "merge": "rda", "merge_mean_names": ["2.bias"],
}  # fmt: skip
STEPS = 20


@pytest.fixture(scope="module")
def alone() -> list[list[Result]]:
    """What two racks of one rank came to."""
    return []


def of_one_rank(jobs: Jobs, alone: list[list[Result]]) -> list[Result]:
    if not alone:
        alone.append(jobs().run(steps=STEPS, config=CONFIG))
    return alone[0]


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        *(
            pytest.param(*cut, marks=pytest.mark.slow)
            for cut in ((2, "ddp"), (4, "ddp"), (2, "fsdp2"), (4, "fsdp2"))
        ),
        (4, "hsdp"),  # replicas of shards: what the others have, at once
    ],
    ids=str,
)
def test_however_a_rack_is_cut_the_bits_are_those_of_one_rank(
    jobs: Jobs, alone: list[list[Result]], ranks: int, parallel: str
) -> None:
    expected = of_one_rank(jobs, alone)[0]
    results = jobs(ranks=ranks).run(steps=STEPS, config=CONFIG, parallel=parallel, same_data=True)
    for result in results:
        assert result.weights == expected.weights
        assert result.digest == results[0].digest
        assert result.commits == results[0].commits
        assert not result.kinds("merge-failed", "sums-failed", "differs")
        # A rank may ask for the first version before the other has read that it is decided.
        assert not [event for event in result.kinds("copy-failed") if event["version"] > 0]
        assert result.threads == []
    # Rack 0 starts with its own version 0; rack 1 copies that. All the rest they merge themselves.
    assert not any(result.kinds("copied") for result in results[:ranks])
    assert len(results[0].merges) == len(expected.merges) > 3


def test_the_reference_finds_the_same_bits(jobs: Jobs, alone: list[list[Result]]) -> None:
    results = of_one_rank(jobs, alone)
    outcome = replayed(results, "plain", CONFIG)
    for result in results:
        assert model_bits(result, "plain", CONFIG) == anchor_bits(outcome)


def test_radial_merge_has_other_bits_than_the_mean(jobs: Jobs, alone: list[list[Result]]) -> None:
    """Racks with data of their own move apart, and the radial mean is longer than the mean."""
    radial = in_lockstep(2, "plain", CONFIG, STEPS)
    mean = in_lockstep(2, "plain", {**CONFIG, "merge": "mean"}, STEPS)
    for ours, theirs in zip(radial.anchors, mean.anchors, strict=True):
        moved = [(versions[1].values - versions[0].values).norm() for versions in (ours, theirs)]
        assert moved[0] > 1.001 * moved[1]
    assert len(of_one_rank(jobs, alone)[0].commits[0]["members"]) == 2


def test_racks_that_average_other_parameters_plainly_refuse_each_other(jobs: Jobs) -> None:
    job = jobs()
    per = {1: {"config": {**CONFIG, "merge_mean_names": ["2.*"], "start_timeout_s": 20}}}
    for rack in range(2):
        job.start(rack, **{"steps": STEPS, "config": CONFIG, **per.get(rack, {})})
    assert job.ended(1) != 0
    kind, said = job.result(1).error
    assert kind == "PlanMismatch"
    assert "merge_mean_names" in said
