"""Events of a healthy run are no warnings; those after which a person should act are."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from mend.events.kinds import (
    ProtocolFault,
    RackJoined,
    RackSlow,
    RackSlowCause,
    RackSlowOver,
    RoundDecided,
    StallOver,
)
from mend.status.event_log import EventLog
from mend.status.loudness import SLOW_RATIO_LEAST, STALL_WINDOW_NS, Loudness

SECOND = 10**9


def stall(step: int, ms: int) -> StallOver:
    return StallOver(step, (0,), ms, ("waiting for rack 1",))


def test_rack_that_is_a_little_slow_is_no_warning_until_it_is_much_slower() -> None:
    loud = Loudness()
    mild = RackSlow(slow_rack=1, against="own past", step=9, ratio=1.2, probability=1.0)
    over = RackSlowOver(slow_rack=1, against="own past", step=12, since_step=9)
    assert loud.shown(mild, 0) is None
    assert loud.shown(over, 0) is None
    slow = replace(mild, ratio=SLOW_RATIO_LEAST)
    cause = RackSlowCause(slow_rack=1, slow_rank=0, cause="input", ratio=1.2)
    assert loud.shown(slow, 0) == slow
    assert loud.shown(cause, 0) == cause
    assert loud.shown(replace(cause, slow_rack=0), 0) is None
    assert loud.shown(over, 0) == over
    assert loud.shown(over, 0) is None, "it was over"


def test_waits_are_one_warning_per_window_with_their_sum() -> None:
    loud = Loudness()  # 200 ms of every second
    found = [loud.shown(stall(second, 200), (second + 100) * SECOND) for second in range(60)]
    assert [shown for shown in found if shown] == [replace(stall(14, 3000), times=15, within_s=60)]
    assert loud.shown(stall(99, 3000), 100 * SECOND + STALL_WINDOW_NS) is not None


def test_few_waits_are_no_warning() -> None:
    loud = Loudness()
    for minute in range(1, 10):
        for _ in range(29):
            assert loud.shown(stall(1, 100), minute * STALL_WINDOW_NS) is None


def test_other_events_are_shown_if_their_kind_is_loud() -> None:
    fault, joined = ProtocolFault("two results"), RackJoined((1,))
    assert Loudness().shown(fault, 0) is fault
    assert Loudness().shown(joined, 0) is joined
    assert Loudness().shown(RoundDecided(0, 1), 0) is None


def test_all_waits_are_in_the_events_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mend"):
        recorder = EventLog({"rack": 0, "rank": 0}, tmp_path)
        for _ in range(5):
            recorder.note(stall(1, 100))
        recorder.close()
    assert (tmp_path / "events-rack0-rank0.jsonl").read_text().count("stall-over") == 5
    assert {record.levelno for record in caplog.records} == {logging.INFO}
