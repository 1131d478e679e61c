"""Events of a healthy run are no warnings; those after which a person should act are."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mend.status.event_log import EventLog
from mend.status.loudness import SLOW_RATIO_LEAST, STALL_WINDOW_NS, Loudness

SECOND = 10**9


def test_rack_that_is_a_little_slow_is_no_warning_until_it_is_much_slower() -> None:
    loud = Loudness()
    mild = {"slow_rack": 1, "ratio": 1.2, "probability": 1.0}
    over = {"slow_rack": 1}
    assert loud.warning("fail-slow", mild, 0) is None
    assert loud.warning("fail-slow-over", over, 0) is None
    slow = {**mild, "ratio": SLOW_RATIO_LEAST}
    assert loud.warning("fail-slow", slow, 0) == slow
    assert loud.warning("fail-slow-cause", {**mild, "cause": "input"}, 0) is not None
    assert loud.warning("fail-slow-cause", {"slow_rack": 0, "cause": "input"}, 0) is None
    assert loud.warning("fail-slow-over", over, 0) == over
    assert loud.warning("fail-slow-over", over, 0) is None, "it was over"


def test_waits_are_one_warning_per_window_with_their_sum() -> None:
    loud, found = Loudness(), []
    for second in range(60):  # 200 ms of every second
        fields = {"step": second, "ms": 200, "why": "waiting for rack 1"}
        if about := loud.warning("stall-over", fields, (second + 100) * SECOND):
            found.append(about)
    assert found == [
        {"step": 14, "why": "waiting for rack 1", "times": 15, "ms": 3000, "within_s": 60}
    ]
    assert loud.warning("stall-over", {"ms": 3000}, 100 * SECOND + STALL_WINDOW_NS) is not None


def test_few_waits_are_no_warning() -> None:
    loud = Loudness()
    for minute in range(1, 10):
        for _ in range(29):
            assert loud.warning("stall-over", {"ms": 100}, minute * STALL_WINDOW_NS) is None


@pytest.mark.parametrize("fields", [{}, {"ratio": "much"}, {"ms": "long"}, {"slow_rack": [1]}])
def test_event_of_a_file_may_hold_anything(fields: dict[str, object]) -> None:
    for kind in ("fail-slow", "fail-slow-over", "stall-over"):
        assert Loudness().warning(kind, fields, 10**18) is None
    assert Loudness().warning("fault", fields, 0) == fields


def test_all_waits_are_in_the_events_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mend"):
        recorder = EventLog({"rack": 0, "rank": 0}, tmp_path)
        for _ in range(5):
            recorder.note("stall-over", {"step": 1, "ms": 100})
        recorder.close()
    assert (tmp_path / "events-rack0-rank0.jsonl").read_text().count("stall-over") == 5
    assert {record.levelno for record in caplog.records} == {logging.INFO}
