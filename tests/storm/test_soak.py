"""The soak is shown processes that leak, and sees it; one that only fills its log passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mend.consensus.log import RECORDS_KEPT
from tests.storm.soak import ROUNDS, TAIL_BYTES, Sample, Soaked, grown, over, rounds_by, slope

LATER = range(RECORDS_KEPT, 2 * RECORDS_KEPT, 100)


def process(of: Callable[[int], tuple[float, int, int]]) -> list[Sample]:
    filling = [Sample(n, 100 + 50 * n / RECORDS_KEPT, 9, 20) for n in range(1, RECORDS_KEPT, 100)]
    return [*filling, *(Sample(n, *of(n)) for n in LATER)]


def test_a_line_is_found_through_points() -> None:
    assert slope([(1, 5.0), (2, 7.0), (3, 9.0)]) == pytest.approx(2.0)
    assert slope([(2, 5.0), (2, 7.0)]) == 0.0


def test_memory_that_fills_a_log_and_then_stays_is_no_leak() -> None:
    calm = process(lambda n: (150.0, 9, 20))
    assert grown(calm) == (0.0, 0.0, 0.0)
    assert over(calm) == []


@pytest.mark.parametrize(
    ("of", "finding"),
    [
        (lambda n: (150 + n / 100, 9, 20), "MB of memory"),
        (lambda n: (150.0, 9 + n // 6500, 20), "threads"),
        (lambda n: (150.0, 9, 20 + n // 6500), "descriptors"),
    ],
)
def test_a_leak_is_found(of: Callable[[int], tuple[float, int, int]], finding: str) -> None:
    (found,) = over(process(of))
    assert found.endswith(finding)


def test_file_beyond_its_bound_and_failed_replay_are_findings() -> None:
    calm = {"rack 0": process(lambda n: (150.0, 9, 20))}
    assert ROUNDS == 202_500
    good = Soaked(calm, {"rack 0": 0}, {"a.mend": 1.0, "a.jsonl": 9.0}, {"a": "equal, 3"}, 60)
    assert list(good.findings()) == []
    bad = Soaked(calm, {"rack 0": 1}, {"a.mend": 5.0, "a.jsonl": 300.0}, {"a": "differs"}, 60)
    assert list(bad.findings()) == [
        "rack 0 exits 1",
        "a: differs",
        "a.mend has 5.0 MB, 4 is its bound",
        "a.jsonl has 300.0 MB, 256 is its bound",
    ]


def test_rounds_are_read_from_the_end_of_a_long_diary(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    assert rounds_by(diary) == 0
    lines = [json.dumps({"versions": [n, n], "text": "x" * 100}) for n in range(TAIL_BYTES // 50)]
    diary.write_text("\n".join(lines) + "\n" + '{"versions": [')
    assert rounds_by(diary) == 2 * (len(lines) - 1)
