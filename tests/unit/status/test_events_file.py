"""Disks that are full, hang, or lose the file: what can be written is, the rest is counted."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mend.events.base import LoggedEvent
from mend.events.kinds import ProcessStarted, ProtectionChosen, RackDiverged
from mend.events.lines import TimedEvent
from mend.status import events_file as module
from mend.status.events_file import EventsFile, older_of
from tests.noted import pair
from tests.process.racks import until

NAME = "events-rack1-rank0.jsonl"


class Said:
    """What people were told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def __call__(self, event: LoggedEvent, _: int) -> None:
        self.lines.append(pair(event))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.lines]


@pytest.fixture
def said() -> Said:
    return Said()


def steps(path: Path) -> list[Any]:
    """The steps in a file, and what else it says."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event.get("step", event["kind"]) for event in events]


def put(file: EventsFile, *numbers: int, pad: str = "") -> None:
    for number in numbers:
        file.put(TimedEvent(0, RackDiverged(number, 0, pad)))


# -------------------------------------------------------------- a disk that is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB: a real full disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path, *, but_bytes: int) -> Path:
    """Take all the space of a disk, and give that much back."""
    path = folder / "in-the-way"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"0" * 4096)
    os.truncate(path, path.stat().st_size - but_bytes)
    return path


def test_writing_goes_on_when_a_full_disk_has_space_again(
    small_disk: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stopped for ever after the first error."""
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module, "QUEUE_MAX", 50)
    monkeypatch.setattr(module, "BATCH", 10)
    way = fill(small_disk, but_bytes=8192)
    file = EventsFile(small_disk / NAME, said)
    number = 0
    while "events-stopped" not in said.kinds:
        put(file, number, pad="." * 200)
        number += 1
    while not file._backlog.lost:
        put(file, number, pad="." * 200)
        number += 1
    assert file.lost > file._backlog.lost, "those that wait are in no file either"
    lost_before = file._backlog.lost
    put(file, *range(number, number + 5))
    way.unlink()
    until(lambda: "events-resumed" in said.kinds, "the disk is noticed")
    put(file, 10_000)
    file.close()
    found = steps(small_disk / NAME)
    gap = found.index("events-lost")
    assert found[:gap] == list(range(gap)), "every line is whole, and in order"
    assert found[-1] == 10_000
    assert number + 5 - gap >= lost_before + 5
    lines = [json.loads(line) for line in (small_disk / NAME).read_text().splitlines()]
    gaps = [line["count"] for line in lines if line["kind"] == "events-lost"]
    lost = sum(gaps)  # a slow writer has gaps before the disk is full, too
    assert lost + len(found) - len(gaps) == number + 6, "what is missing is what is told"
    assert file.lost == lost
    assert said.kinds == ["events-stopped", "events-resumed"], "once, not for each event"
    assert said.lines[0][1]["remedy"] == "free some space"
    assert "No space left on device" in str(said.lines[0][1]["reason"])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_disk_that_stays_full_is_told_once_and_does_not_hold_the_end(
    tmp_path: Path, said: Said
) -> None:
    (tmp_path / NAME).symlink_to("/dev/full")
    file = EventsFile(tmp_path / NAME, said)
    put(file, *range(1000))
    until(lambda: file.lost == 1000, "events that wait are told as not written")
    file.close()
    assert file.lost == 1000
    assert said.lines[-1] == (
        "events-lost",
        {"count": 1000, "reason": "the file could not be written"},
    )
    assert said.kinds == ["events-stopped", "events-lost"]


def test_folders_above_the_file_are_made(tmp_path: Path, said: Said) -> None:
    path = tmp_path / "runs" / "first" / NAME
    file = EventsFile(path, said)
    put(file, 0)
    file.close()
    assert steps(path) == [0]


def test_a_directory_that_cannot_be_is_told(tmp_path: Path, said: Said) -> None:
    (tmp_path / "file").write_text("")
    file = EventsFile(tmp_path / "file" / NAME, said)
    put(file, 1)
    file.close()
    assert file.lost == 1
    assert said.kinds == ["events-stopped", "events-lost"]
    assert str(said.lines[0][1]["remedy"]).startswith("set diagnostics_dir to a folder that")


# -------------------------------------------------------------- a disk that hangs


class HungDisk:
    """A pipe in place of the file: to open it blocks until `back`."""

    def __init__(self, folder: Path) -> None:
        self._pipe = folder / NAME
        os.mkfifo(self._pipe)
        self.steps: list[Any] = []

    def back(self) -> None:
        """Blocks until the writer has closed the file; `steps` are those that it wrote."""
        self.steps = steps(self._pipe)


@pytest.fixture
def small_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_MAX", 4)
    monkeypatch.setattr(module, "BATCH", 1)


@pytest.mark.usefixtures("small_queue")
def test_a_disk_that_hangs_for_a_while_loses_what_does_not_fit(tmp_path: Path, said: Said) -> None:
    disk = HungDisk(tmp_path)
    file = EventsFile(tmp_path / NAME, said)
    put(file, *range(10))
    assert file.lost == 6
    reader = threading.Thread(target=disk.back)
    reader.start()
    file.close()
    reader.join()
    assert disk.steps == [0, 1, 2, 3, "events-lost"]


@pytest.mark.usefixtures("small_queue")
def test_a_disk_that_hangs_for_good_does_not_hold_the_end(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did: with a full queue `close` waited for ever to say that it is over."""
    monkeypatch.setattr(module, "CLOSE_S", 0.01)
    disk = HungDisk(tmp_path)
    file = EventsFile(tmp_path / NAME, said)
    put(file, *range(10))
    file.close()
    assert file.lost == 10
    assert said.lines == [("events-lost", {"count": 4, "reason": "the disk hangs"})]
    disk.back()
    assert disk.steps == ["events-lost"], "what is told as lost is not written after all"


# -------------------------------------------------------------- a file that goes away


def by_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def by_name(path: Path) -> None:
    path.unlink()


def by_another(path: Path) -> None:
    """As logrotate does it."""
    path.rename(path.with_suffix(".1"))
    path.touch()


@pytest.mark.parametrize("remove", [by_folder, by_name, by_another])
def test_a_file_that_was_removed_is_made_again_and_goes_on(
    tmp_path: Path, said: Said, remove: Callable[[Path], None]
) -> None:
    """It was written to, unseen, until the end of the job."""
    path = tmp_path / "run" / NAME
    file = EventsFile(path, said)
    put(file, 0, 1)
    until(lambda: path.exists() and len(steps(path)) == 2, "two lines are written")
    remove(path)
    put(file, 2, 3)
    until(lambda: "events-anew" in said.kinds, "the file is missed")
    put(file, 4)
    file.close()
    found = steps(path)
    assert found[0] == 0, "which job it is stands at the top"
    assert "events-anew" in found
    assert [step for step in found if isinstance(step, int)][-3:] == [2, 3, 4]
    assert said.kinds == ["events-anew"]
    assert file.lost == 0


def test_a_file_that_was_removed_is_noticed_at_the_end_at_the_latest(
    tmp_path: Path, said: Said
) -> None:
    path = tmp_path / NAME
    file = EventsFile(path, said)
    put(file, 0, 1)
    until(lambda: path.exists() and len(steps(path)) == 2, "two lines are written")
    path.unlink()
    file.close()
    assert steps(path) == [0, "events-anew"]


def test_burst_behind_a_removal_is_in_the_new_file(tmp_path: Path, said: Said) -> None:
    path = tmp_path / NAME
    file = EventsFile(path, said)
    put(file, 0)
    until(lambda: path.exists() and len(steps(path)) == 1, "a line is written")
    path.unlink()
    count = 3_000
    for number in range(1, count):
        put(file, number)
    file.close()
    assert [step for step in steps(path) if isinstance(step, int)] == list(range(count))
    assert file.lost == 0


def test_half_a_line_is_taken_back_when_the_disk_is_full(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the size lets a part of a write pass, and then fails as a full disk does."""
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    path = tmp_path / NAME
    file = EventsFile(path, said)
    put(file, 0)
    until(lambda: path.exists() and len(steps(path)) == 1, "a line is written")
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        put(file, 1)
        until(lambda: "events-stopped" in said.kinds, "the disk is full")
        full = path.stat().st_size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert full == size
    until(lambda: "events-resumed" in said.kinds, "there is room again")
    file.close()
    assert steps(path) == [0, 1]


# -------------------------------------------------------------- a file that grows


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is cut at 20,000 bytes; each event is written at once."""
    monkeypatch.setattr(module, "BYTES_MAX", 20_000)
    monkeypatch.setattr(module, "BATCH", 1)


def test_a_long_file_loses_its_oldest_half(tmp_path: Path, said: Said, short: None) -> None:
    path = tmp_path / NAME
    file = EventsFile(path, said)
    file.put(TimedEvent(0, ProcessStarted((1, 0), "", "job")))
    put(file, *range(1000))
    file.close()
    older, newer = steps(older_of(path)), steps(path)
    assert older[:2] == newer[:2] == ["start", "events-cut"], "it says that something was deleted"
    assert older[2:] + newer[2:] == list(range(older[2], 1000))
    assert older[2] > 0
    assert path.stat().st_size + older_of(path).stat().st_size <= 20_000
    assert {each.name for each in tmp_path.iterdir()} == {NAME, older_of(path).name}
    assert file.lost == 0


def test_cut_file_with_start_behind_first_line_begins_with_both(
    tmp_path: Path, said: Said, short: None
) -> None:
    """A rack says how it is protected before it names its job."""
    path = tmp_path / NAME
    file = EventsFile(path, said)
    file.put(TimedEvent(0, ProtectionChosen("keys")))
    put(file, -1)
    file.put(TimedEvent(0, ProcessStarted((1, 0), "", "job")))
    put(file, *range(1000))
    file.close()
    for half in (older_of(path), path):
        assert steps(half)[:3] == ["protection", "start", "events-cut"]
    shutil.rmtree(tmp_path)
    again = EventsFile(path, said)
    again.put(TimedEvent(0, ProtectionChosen("keys")))
    put(again, -1)
    again.put(TimedEvent(0, ProcessStarted((1, 0), "", "job")))
    again.close()
    assert steps(path) == ["protection", -1, "start"]


def test_disk_that_is_full_when_a_file_is_halved_does_not_cost_its_first_line(
    tmp_path: Path, said: Said, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a reader does not know what job the file is of."""
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    path, failed = tmp_path / NAME, threading.Event()
    put_all = module._File._put

    def failing(file: Any, raw: Any, data: bytes) -> None:
        if older_of(path).exists() and not failed.is_set():
            failed.set()
            file.close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put_all(file, raw, data)

    monkeypatch.setattr(module._File, "_put", failing)
    file = EventsFile(path, said)
    file.put(TimedEvent(0, ProcessStarted((1, 0), "", "job")))
    put(file, *range(200))
    until(lambda: "events-resumed" in said.kinds, "there is room again")
    file.close()
    newer = steps(path)
    assert newer[0] == "start"
    assert steps(older_of(path))[1:] + newer[1:] == list(range(200))


def test_nothing_is_called_deleted_while_both_halves_are_there(
    tmp_path: Path, said: Said, short: None
) -> None:
    path = tmp_path / NAME
    file = EventsFile(path, said)
    put(file, *range(200))
    file.close()
    older, newer = steps(older_of(path)), steps(path)
    assert older + newer[1:] == list(range(200))
    assert newer[0] == 0, "the first line is copied"
