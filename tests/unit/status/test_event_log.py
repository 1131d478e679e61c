"""Events for people and for programs, off every thread that matters."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

from mend.status.event_log import LOUD, USUAL, EventLog

WHO = {"rack": 1, "rank": 0}


def lines(directory: Path) -> list[dict[str, object]]:
    path = directory / "events-rack1-rank0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_event_is_a_line_with_its_time(tmp_path: Path) -> None:
    recorder = EventLog(WHO, tmp_path / "made" / "here")
    recorder.note("captured", {"step": 8, "fragment": 0})
    recorder.note("commit", {"members": [{"rack": 0, "seq": 1}], "reason": "all-in"})
    recorder.close()
    first, second = lines(tmp_path / "made" / "here")
    assert isinstance(first.pop("time_ns"), int)
    assert first == {"kind": "captured", "step": 8, "fragment": 0}
    assert second["members"] == [{"rack": 0, "seq": 1}]
    assert recorder.lost == 0


def test_closing_twice_and_noting_afterwards_do_no_harm(tmp_path: Path) -> None:
    recorder = EventLog(WHO, tmp_path)
    recorder.close()
    recorder.close()
    recorder.note("captured", {"step": 8})
    assert lines(tmp_path) == []
    EventLog(WHO, None).close()


def test_people_read_one_line_in_a_grammar(caplog: pytest.LogCaptureFixture) -> None:
    recorder = EventLog(WHO, None)
    with caplog.at_level(logging.DEBUG, logger="mend"):
        recorder.note(
            "commit",
            {"fragment": 2, "version": 17, "members": [{"rack": 0, "seq": 5}, {"rack": 1}],
             "dropped": [], "reason": "grace-over, without rack 2"},
        )  # fmt: skip
        recorder.close()
    assert [record.getMessage() for record in caplog.records] == [
        "mend rack=1 rank=0 commit fragment=2 version=17 members=0,1 dropped=- "
        'reason="grace-over, without rack 2"'
    ]


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("fault", logging.WARNING),
        ("kept-local", logging.WARNING),
        ("commit", logging.DEBUG),
        ("genesis", logging.INFO),
    ],
)
def test_what_a_person_must_see_is_a_warning(
    kind: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="mend"):
        recorder = EventLog(WHO, None)
        recorder.note(kind, {})
        recorder.close()
    assert [record.levelno for record in caplog.records] == [level]
    assert not LOUD & USUAL


def test_no_line_is_made_that_nobody_wants(caplog: pytest.LogCaptureFixture) -> None:
    """A step of training must not pay for DEBUG lines; so who notes asks for the level."""
    asked = threading.Event()

    class Shown:
        def __str__(self) -> str:
            asked.set()
            return "shown"

    recorder = EventLog(WHO, None)
    with caplog.at_level(logging.INFO, logger="mend"):
        recorder.note("captured", {"step": Shown()})
        recorder.close()
    assert not asked.is_set()
    assert caplog.records == []


def test_a_line_has_the_time_and_the_thread_of_what_it_tells(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = EventLog(WHO, None)
    with caplog.at_level(logging.INFO, logger="mend"):
        recorder.note("genesis", {})
        recorder.close()
    (record,) = caplog.records
    assert record.threadName == threading.current_thread().name
