"""A job's merged weights do not depend on how its racks are cut: level shape inside of the racks,
lockstep between them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.process.conftest import Jobs

STEPS = 9
CONFIG: dict[str, Any] = {
    "lockstep": True, "fragments": 2, "sync_period_steps": 4, "overlap_steps": 1,
    "wait_timeout_s": 90,
}  # fmt: skip

CUTS: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "microbatches 4 and 1": (1, [{"microbatches": 4}, {}]),
    "TP 2, microbatches 1 and 4": (2, [{"cut": "tp"}, {"cut": "tp", "microbatches": 4}]),
    "DP 2, microbatches 2 and 1": (2, [{"cut": "dp", "microbatches": 2}, {"cut": "dp"}]),
}
"""Ranks, and how each of two racks is cut over them: layers of all racks alike, as mend asks."""


def trained(
    jobs: Jobs,
    codec: str,
    ranks: int,
    racks: list[dict[str, Any]],
    sizes: tuple[int, ...] = (),
    **more: Any,
) -> Any:
    """Of rank 0 of each rack: what no cut may change."""
    job = jobs(ranks=ranks, sizes=sizes)
    config = {**CONFIG, "codec": codec, **more.pop("config", {})}
    results = job.run(
        dict(enumerate(racks)), script="tests.process.jointly", steps=STEPS, config=config, **more
    )
    begins = [0, (sizes or (ranks,))[0]]
    for begin, end in zip(begins, (begins[1], None), strict=True):
        assert len({result.digest for result in results[begin:end]}) == 1
    one, other = (results[begin] for begin in begins)
    assert one.weights == other.weights
    assert len(one.commits) > 3
    assert one.losses != other.losses, "each rack has data of its own"
    return [(each.weights, each.losses) for each in (one, other)]


@pytest.mark.timeout(600)
def test_racks_end_with_equal_bits_however_they_are_cut(jobs: Jobs) -> None:
    expected = trained(jobs, "float32", 1, [{}, {}])
    for name, (ranks, racks) in CUTS.items():
        assert trained(jobs, "float32", ranks, racks) == expected, name


@pytest.mark.timeout(600)
def test_racks_of_one_and_two_ranks_end_with_the_bits_of_racks_of_one(jobs: Jobs) -> None:
    alike: Any = {"config": {"token_weighted_merge": False}}
    expected = trained(jobs, "float32", 1, [{}, {}], **alike)
    racks = [{}, {"cut": "dp", "microbatches": 2}]
    assert trained(jobs, "float32", 1, racks, sizes=(1, 2), **alike) == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_int4_microbatches_change_no_bits(jobs: Jobs) -> None:
    """Each rank rounds in blocks of its own part, so the number of ranks does change them."""
    for name, (ranks, racks) in CUTS.items():
        whole = [{**each, "microbatches": 1} for each in racks]
        assert trained(jobs, "int4", ranks, racks) == trained(jobs, "int4", ranks, whole), name


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("level", "equal"), [("everywhere", True), ("run", False)])
def test_racks_end_with_equal_bits_at_level_everywhere_alone(
    level: str, equal: bool, jobs: Jobs
) -> None:
    whole = trained(jobs, "float32", 1, [{}, {}], level=level)
    cut = trained(jobs, "float32", 1, [{"microbatches": 4}, {}], level=level)
    assert (cut == whole) is equal
