"""A micro-benchmark of a healthy rank, one of a slow one, and what their difference says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mend.coordination.events import Note, Probe, Probed, Validate, Validated
from mend.coordination.slow_cause import PROBE_NS_MAX, PROBES_NS, STEPS, CauseSearch
from mend.detector import COMPUTE, INPUT, LINK, UNKNOWN, Cause
from mend.events.kinds import RackSlowCause
from mend.types import MS, Address

LANES = {2: Address("c", 2), 0: Address("a", 1)}


def measured(
    search: CauseSearch, number: int, gemm_ns: int, took_ns: dict[int, int], waited: int = -1
) -> list[object]:
    """One benchmark, with a pull from every rack; returns what it comes to."""
    now_ns = 0
    effects = search.on_validated(Validated(number, 9, gemm_ns, waited), LANES, now_ns)
    for rack in sorted(LANES):
        assert effects == [Probe(number, rack, LANES[rack])], "one after another, ascending"
        now_ns += took_ns[rack]
        effects = search.on_probed(Probed(number, rack), now_ns)
    return list(effects)


def begun(search: CauseSearch, ratio: float) -> int:
    """The number of the benchmark that a verdict of this ratio begins."""
    (asked,) = search.begin(ratio)
    assert asked == Validate(asked.number, STEPS)
    return asked.number


def healthy() -> CauseSearch:
    search = CauseSearch(1, 3)
    assert search.begin() == [Validate(1, STEPS)]
    assert measured(search, 1, 10 * MS, {0: 5 * MS, 2: 5 * MS}, waited=200_000) == []
    return search


def test_a_matrix_product_that_takes_three_times_as_long() -> None:
    search = healthy()
    asked = begun(search, 3.0)
    (note,) = measured(search, asked, 30 * MS, {0: 5 * MS, 2: 5 * MS}, waited=100_000)
    assert search.cause == Cause(COMPUTE)
    assert note == Note(
        RackSlowCause(
            slow_rack=1, slow_rank=3, cause="compute", ratio=3.0, gemm_ratio=3.0, input_share=0.05,
            lane_ratios={"0": 1.0, "2": 1.0},
        )
    )  # fmt: skip
    search.over()
    assert search == replace(search, cause=None)


def test_a_wait_for_data_that_was_there_before_is_no_cause() -> None:
    """A fifth of a healthy step: of one that takes three times as long a fifth again is little."""
    for waited, cause in ((200_000, UNKNOWN), (500_000, INPUT)):
        search = healthy()
        asked = begun(search, 3.0)
        measured(search, asked, 10 * MS, {0: 5 * MS, 2: 5 * MS}, waited)
        assert search.cause == Cause(cause)


@pytest.mark.parametrize(
    ("slow", "pulls", "cause", "told"),
    [
        (2.0, {0: 5 * MS, 2: 50 * MS}, Cause(LINK, 2), ("link_to", 2)),
        # A pull that waited for a processor: almost three times, but less than a scheduler takes.
        (10.0, {0: 14 * MS, 2: 5 * MS}, Cause(UNKNOWN), ("lane_ratios", {"0": 2.8, "2": 1.0})),
    ],
)
def test_slow_link_is_named_by_its_other_end_if_it_is_no_scheduler(
    slow: float, pulls: dict[int, int], cause: Cause, told: tuple[str, object]
) -> None:
    search = healthy()
    asked = begun(search, slow)
    (note,) = measured(search, asked, 10 * MS, pulls)
    assert search.cause == cause
    assert note.event.fields()[told[0]] == told[1]


def test_validation_and_probe_after_the_search_are_ignored() -> None:
    search = healthy()
    asked = begun(search, 2.0)
    search.over()
    assert search.on_validated(Validated(asked, 9, 30 * MS, -1), LANES, 0) == []
    assert search.on_probed(Probed(asked, 0), 0) == []
    assert search.cause is None
    assert search.due_ns() == []


def test_pulls_end_after_a_second_and_none_begins_after_half_of_one() -> None:
    search = healthy()
    asked = begun(search, 2.0)
    search.on_validated(Validated(asked, 9, 10 * MS, -1), LANES, 7)
    assert search.tick(7 + PROBE_NS_MAX - 1) == []
    assert search.due_ns() == [7 + PROBE_NS_MAX]
    assert PROBES_NS < PROBE_NS_MAX
    (note,) = search.tick(7 + PROBE_NS_MAX)
    assert search.cause == Cause(LINK, 0), "rack 2 was not asked any more"
    assert note.event.fields()["lane_ratios"] == {"0": 200.0}


def test_a_verdict_before_there_is_anything_to_compare_with() -> None:
    search = CauseSearch(1, 0)
    asked = begun(search, 3.0)
    effects = search.on_validated(Validated(asked, 9, 30 * MS, -1), {}, 0)
    assert len(effects) == 1
    assert search.cause == Cause(UNKNOWN)


def test_a_pull_that_fails_says_nothing_of_the_link() -> None:
    search = healthy()
    asked = begun(search, 3.0)
    search.on_validated(Validated(asked, 9, 10 * MS, -1), {0: LANES[0]}, 0)
    search.on_probed(Probed(asked, 0, "no way there"), 900 * MS)
    assert search.cause == Cause(UNKNOWN)
