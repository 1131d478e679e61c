"""Events for people and for programs. A disk that is full or hangs loses events, not training."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

import pytest

from mend.runtime import recorder as recorder_module
from mend.runtime.recorder import LOUD, USUAL, Recorder

WHO = {"rack": 1, "rank": 0}


def lines(directory: Path) -> list[dict[str, object]]:
    path = directory / "events-rack1-rank0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_event_is_a_line_with_its_time(tmp_path: Path) -> None:
    recorder = Recorder(WHO, tmp_path / "made" / "here")
    recorder.note("captured", {"step": 8, "fragment": 0})
    recorder.note("commit", {"members": [{"rack": 0, "seq": 1}], "reason": "all-in"})
    recorder.close()
    first, second = lines(tmp_path / "made" / "here")
    assert isinstance(first.pop("time_ns"), int)
    assert first == {"kind": "captured", "step": 8, "fragment": 0}
    assert second["members"] == [{"rack": 0, "seq": 1}]
    assert recorder.lost == 0


def test_closing_twice_and_noting_afterwards_do_no_harm(tmp_path: Path) -> None:
    recorder = Recorder(WHO, tmp_path)
    recorder.close()
    recorder.close()
    recorder.note("captured", {"step": 8})
    assert lines(tmp_path) == []
    Recorder(WHO, None).close()


def test_people_read_one_line_in_a_grammar(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(WHO, None)
    with caplog.at_level(logging.DEBUG, logger="mend"):
        recorder.note(
            "commit",
            {"fragment": 2, "version": 17, "members": [{"rack": 0, "seq": 5}, {"rack": 1}],
             "dropped": [], "reason": "grace-over, without rack 2"},
        )  # fmt: skip
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
        Recorder(WHO, None).note(kind, {})
    assert [record.levelno for record in caplog.records] == [level]
    assert not LOUD & USUAL


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_is_reported_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "events-rack1-rank0.jsonl").symlink_to("/dev/full")
    recorder = Recorder(WHO, tmp_path)
    with caplog.at_level(logging.WARNING, logger="mend"):
        for step in range(1000):
            recorder.note("captured", {"step": step})
        recorder.close()
    assert recorder.lost > 0
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("mend rack=1 rank=0 events-stopped path=")
    assert "No space left on device" in said
    assert said.endswith("remedy=free some space")


def test_a_directory_that_cannot_be_is_reported_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    recorder = Recorder(WHO, tmp_path / "file")
    recorder.note("captured", {"step": 1})
    recorder.close()
    assert recorder.lost > 0
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


class HungDisk:
    """A pipe in place of the file: to open it blocks until `back`."""

    def __init__(self, folder: Path) -> None:
        self._pipe = folder / "events-rack1-rank0.jsonl"
        os.mkfifo(self._pipe)
        self.steps: list[int] = []

    def back(self) -> None:
        """Blocks until the writer has closed the file; `steps` are those that it wrote."""
        self.steps = [json.loads(line)["step"] for line in self._pipe.read_text().splitlines()]


@pytest.fixture
def small_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "QUEUE_MAX", 4)


@pytest.mark.usefixtures("small_queue")
def test_a_disk_that_hangs_for_a_while_loses_what_does_not_fit(tmp_path: Path) -> None:
    disk = HungDisk(tmp_path)
    recorder = Recorder(WHO, tmp_path)
    for step in range(10):
        recorder.note("captured", {"step": step})
    assert recorder.lost == 6
    reader = threading.Thread(target=disk.back)
    reader.start()
    recorder.close()
    reader.join()
    assert disk.steps == [0, 1, 2, 3]


@pytest.mark.usefixtures("small_queue")
def test_a_disk_that_hangs_for_good_does_not_hold_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did: with a full queue `close` waited for ever to say that it is over."""
    monkeypatch.setattr(recorder_module, "CLOSE_S", 0.01)
    disk = HungDisk(tmp_path)
    recorder = Recorder(WHO, tmp_path)
    for step in range(10):
        recorder.note("captured", {"step": step})
    recorder.close()
    assert recorder.lost == 7
    disk.back()
    assert disk.steps == [1, 2, 3]
