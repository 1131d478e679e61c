"""Events for people and for programs, off every thread that matters."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

from mend.events.base import LoggedEvent
from mend.events.kinds import (
    FragmentCaptured,
    JobFounded,
    MergedShare,
    ProtocolFault,
    RackJoined,
    RackSilent,
    RoundCommitted,
    WeightsKept,
)
from mend.status.event_log import EventLog

WHO = {"rack": 1, "rank": 0}
CAPTURED = FragmentCaptured(step=8, fragment=0, seq=1, base=0, tokens=64, steps=8)
MEMBERS = (MergedShare(0, 5, 16, 8, 64, 8), MergedShare(1, 4, 16, 9, 64, 8))
REASON = "grace-over, without rack 2"
COMMIT = RoundCommitted(2, 17, MEMBERS, 2, (), (), ("ab",), REASON)


def lines(directory: Path) -> list[dict[str, object]]:
    path = directory / "events-rack1-rank0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_event_is_a_line_with_its_time(tmp_path: Path) -> None:
    recorder = EventLog(WHO, tmp_path / "made" / "here")
    recorder.note(CAPTURED)
    recorder.note(COMMIT)
    recorder.close()
    first, second = lines(tmp_path / "made" / "here")
    assert list(first)[:2] == ["kind", "time_ns"]
    assert isinstance(first.pop("time_ns"), int)
    assert first == {
        "kind": "captured", "step": 8, "fragment": 0, "seq": 1, "base": 0, "tokens": 64, "steps": 8,
    }  # fmt: skip
    assert [member["rack"] for member in second["members"]] == [0, 1]  # type: ignore[attr-defined]
    assert recorder.lost == 0


def test_closing_twice_and_noting_afterwards_do_no_harm(tmp_path: Path) -> None:
    recorder = EventLog(WHO, tmp_path)
    recorder.close()
    recorder.close()
    recorder.note(CAPTURED)
    assert lines(tmp_path) == []
    EventLog(WHO, None).close()


def test_people_read_one_line_in_a_grammar(caplog: pytest.LogCaptureFixture) -> None:
    recorder = EventLog(WHO, None)
    with caplog.at_level(logging.DEBUG, logger="mend"):
        recorder.note(COMMIT)
        recorder.note(RackSilent(2, "rounds go on without it"))
        recorder.note(ProtocolFault('"a"\nb'))
        recorder.close()
    assert [record.getMessage() for record in caplog.records] == [
        "mend rack=1 rank=0 commit fragment=2 version=17 members=0,1 live=2 absent=- dropped=- "
        'digests=ab reason="grace-over, without rack 2"',
        'mend rack=1 rank=0 rack-silent peer=2 msg="rack 2 is silent: rounds go on without it" '
        'remedy="see docs/troubleshooting.md, A rack is silent"',
        'mend rack=1 rank=0 fault detail="\\"a\\"\\nb" msg="\\"a\\"\\nb" '
        'remedy="see docs/troubleshooting.md, The digest differs"',
    ]


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (ProtocolFault("two results"), logging.ERROR), (WeightsKept(12.0, "alone"), logging.ERROR),
        (RackSilent(2, "rounds go on"), logging.WARNING), (RackJoined((1,)), logging.WARNING),
        (COMMIT, logging.DEBUG), (JobFounded((0, 1)), logging.INFO),
    ],
)  # fmt: skip
def test_log_level_follows_the_severity_of_the_event(
    event: LoggedEvent, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="mend"):
        recorder = EventLog(WHO, None)
        recorder.note(event)
        recorder.close()
    assert [record.levelno for record in caplog.records] == [level]


def test_no_line_is_made_that_nobody_wants(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of training must not pay for DEBUG lines; so who notes asks for the level."""
    asked = threading.Event()
    monkeypatch.setattr("mend.status.event_log.log_text", lambda _: asked.set())
    recorder = EventLog(WHO, None)
    with caplog.at_level(logging.INFO, logger="mend"):
        recorder.note(CAPTURED)
        recorder.close()
    assert not asked.is_set()
    assert caplog.records == []


def test_a_line_has_the_time_and_the_thread_of_what_it_tells(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = EventLog(WHO, None)
    with caplog.at_level(logging.INFO, logger="mend"):
        recorder.note(JobFounded((0, 1)))
        recorder.close()
    (record,) = caplog.records
    assert record.threadName == threading.current_thread().name
