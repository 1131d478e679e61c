"""Tapes as files: rotated, bounded, cut where a process died, refused where a byte is wrong. A disk
that is full or hangs loses tape, never training."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mend.coordination.events import Effect, Encoded, Event, Note, StateTaken, StepReached, Tick
from mend.coordination.fragment_replica import RankOptions
from mend.coordination.machines import RANK_MACHINE, ProcessSpec, RankSpec, machines_of
from mend.errors import TapeError
from mend.events.base import LoggedEvent
from mend.events.kinds import ProtocolFault
from mend.trace import format as form
from mend.trace import writer as tape_module
from mend.trace.format import Entry, Gap
from mend.trace.reader import part_to_replay, read_tape, tapes_in
from mend.trace.replay import replay
from mend.trace.writer import TapeWriter, handled, header_of
from mend.types import MB, MS, Member, Peer
from tests.noted import pair
from tests.process.racks import until

PARTS = ProcessSpec(Peer(1, 0), Member(1, 7))


class Notes:
    """What the recorder is told."""

    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, object]]] = []

    def __call__(self, event: LoggedEvent) -> None:
        self.said.append(pair(event))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.said]


def writer(folder: Path, notes: Notes | None = None, bytes_max: int = 100 * MB) -> TapeWriter:
    header = header_of("job", PARTS, config={"folder": folder})
    return TapeWriter(folder, header, bytes_max, notes or Notes())


def put(tape: TapeWriter, *numbers: int, text: str = "") -> None:
    for number in numbers:
        tape.put(RANK_MACHINE, number, StepReached(number, 1), [Note(ProtocolFault(text))])


def steps(path: Path) -> list[object]:
    """The numbers that were put; a gap is its count in words."""
    return [
        entry.event.step if isinstance(entry, Entry) and isinstance(entry.event, StepReached)
        else f"gap {entry.count}" if isinstance(entry, Gap) else entry
        for entry in read_tape(path).entries()
    ]  # fmt: skip


def written(folder: Path, *numbers: int) -> Path:
    tape = writer(folder)
    put(tape, *numbers)
    tape.close()
    return folder / "tape-rack1-rank0.mend"


@pytest.mark.parametrize(
    "event", [Encoded(0, 1, "c" * 32), StateTaken(Member(2, 1), 8, 100, "d" * 64)]
)
def test_event_that_other_racks_depend_on_is_written_at_once(
    tmp_path: Path, event: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rack that was killed had lost its last capture, and with it the replay of all that was
    merged afterwards."""
    monkeypatch.setattr(tape_module, "FLUSH_S", 3600.0)
    tape = writer(tmp_path)
    put(tape, 1)
    tape.put(RANK_MACHINE, 2, event, [])
    path = tmp_path / "tape-rack1-rank0.mend"

    def read() -> list[object]:
        return steps(path) if path.exists() and path.stat().st_size else []

    until(lambda: len(read()) == 2, "both are on disk")
    tape.close()


def test_written_events_are_read_in_order(tmp_path: Path) -> None:
    path = written(tmp_path / "made" / "here", *range(100))
    tape = read_tape(path)
    assert steps(path) == list(range(100))
    assert (tape.lost, tape.whole) == ("", True)
    assert tape.header.parts == PARTS
    assert tape.header.config == {"folder": str(tmp_path / "made" / "here")}
    assert tape.header.argv
    assert set(tape.header.versions) == {"mend", "torch", "python", "threads"}


def test_paths_that_are_no_text_are_on_the_tape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With LANG=C the tape of a script or folder with an umlaut was empty, and its folder could not
    be explained."""
    monkeypatch.setattr(sys, "orig_argv", ["python", os.fsdecode(b"m\xfc.py")])
    strange = {"folder": tmp_path / os.fsdecode(b"\xff"), "hosts": ("a", os.fsdecode(b"\xfe"))}
    notes = Notes()
    tape = TapeWriter(tmp_path, header_of("job", PARTS, config=strange), MB, notes)
    put(tape, 1)
    tape.close()
    header = read_tape(*tapes_in([tmp_path])).header
    assert notes.kinds == []
    assert header.argv == ("python", "m\\udcfc.py")
    assert header.config == {"folder": f"{tmp_path}/\\udcff", "hosts": ["a", "\\udcfe"]}


def test_an_empty_tape_is_named_as_empty(tmp_path: Path) -> None:
    (tmp_path / "tape-rack0-rank0.mend").touch()
    with pytest.raises(TapeError, match="it is empty"):
        read_tape(tmp_path / "tape-rack0-rank0.mend")


def test_a_machine_that_raises_leaves_that_on_the_tape(tmp_path: Path) -> None:
    class Broken:
        def handle(self, event: Event, now_ns: int) -> list[Effect]:
            raise ValueError("a bug")

        def deadline_ns(self) -> int | None:
            return None

    tape = writer(tmp_path)
    with pytest.raises(ValueError, match="a bug"):
        handled(tape, RANK_MACHINE, Broken(), Tick(), 5)
    tape.close()
    (entry,) = read_tape(tmp_path / "tape-rack1-rank0.mend").entries()
    assert isinstance(entry, Entry)
    assert (entry.event, entry.effects, entry.error) == (Tick(), (), "ValueError: a bug")


def test_a_life_never_writes_over_the_one_before(tmp_path: Path) -> None:
    written(tmp_path, 1)
    written(tmp_path, 2)
    written(tmp_path, 3)
    found = {path.name: steps(path) for path in tapes_in([tmp_path])}
    assert found == {
        "tape-rack1-rank0.mend": [1],
        "tape-rack1-rank0-life2.mend": [2],
        "tape-rack1-rank0-life3.mend": [3],
    }


# ------------------------------------------------------------------ segments


def segments(folder: Path, monkeypatch: pytest.MonkeyPatch, bytes_max: int) -> None:
    """A tape that goes over from file to file; every entry is a chunk, and does not compress."""
    monkeypatch.setattr(form, "CHUNK_RAW_BYTES", 1)
    monkeypatch.setattr(tape_module, "SEGMENT_BYTES", 4_000)
    tape = writer(folder, bytes_max=bytes_max)
    for number in range(60):
        put(tape, number, text=os.urandom(300).hex())
    tape.close()


def test_a_long_tape_goes_over_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments(tmp_path, monkeypatch, bytes_max=100 * MB)
    files = sorted(tmp_path.iterdir())
    assert len(files) > 4
    for path in files:  # whichever is named, it is the whole tape
        assert steps(path) == list(range(60))
    assert tapes_in([tmp_path, files[2]]) == [tmp_path / "tape-rack1-rank0.mend"]


def test_the_oldest_files_go_when_there_is_no_more_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments(tmp_path, monkeypatch, bytes_max=16_000)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 17_000
    (first,) = tapes_in([tmp_path])
    left = steps(first)
    assert left == list(range(60))[-len(left) :]
    assert 0 < len(left) < 60
    assert read_tape(first).header.segment > 0


def test_a_life_takes_no_name_of_an_earlier_one_whose_first_files_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the name of the first file, which was free: no command could read either tape, and
    the new one ended where the old one had a file."""
    segments(tmp_path, monkeypatch, bytes_max=16_000)
    (first,) = tapes_in([tmp_path])
    assert read_tape(first).header.segment > 0
    before, notes = steps(first), Notes()
    tape = writer(tmp_path, notes)
    for number in range(60):
        put(tape, number, text=os.urandom(300).hex())
    tape.close()
    assert notes.kinds == []
    found = {path.name: steps(path) for path in tapes_in([tmp_path])}
    assert found == {first.name: before, "tape-rack1-rank0-life2.mend": list(range(60))}


def long_tape(folder: Path, monkeypatch: pytest.MonkeyPatch, **kept: object) -> Notes:
    """Of a machine that trains for long, with room for its end only. It keeps these as well."""
    monkeypatch.setattr(tape_module, "SEGMENT_BYTES", 400)
    parts = ProcessSpec(
        Peer(1, 0), Member(1, 7), RankSpec(RankOptions(100 * MS, ranks=2), ("0" * 64,))
    )
    notes, machines = Notes(), machines_of(parts).named()
    vars(machines[RANK_MACHINE]).update(kept)
    tape = TapeWriter(folder, header_of("job", parts), 20_000, notes)
    tape.watch(machines)
    written = 0
    while len(list(folder.glob("*"))) < 2 or (folder / "tape-rack1-rank0.mend").exists():
        written += 1
        handled(tape, RANK_MACHINE, machines[RANK_MACHINE], StepReached(written, MS), written * MS)
        tape._wake.set()  # at once, in place of four times a second
        until(lambda: not tape._waiting, "what waits is written")
    tape.close()
    return notes


def test_a_tape_whose_beginning_is_gone_replays_from_the_state_that_its_first_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused: after 12 days of a long run nothing of it could be replayed any more."""
    assert long_tape(tmp_path, monkeypatch).kinds == []
    (first,) = tapes_in([tmp_path])
    tape = read_tape(first)
    assert tape.header.segment > 0
    base, part = part_to_replay(tape)
    assert base
    assert part.files == tape.files
    found = replay(part.header.parts, part.entries(), base)
    assert (found.difference, found.gap) == (None, None)
    assert found.events == len(list(tape.entries())) > 10
    assert found.effects > 0
    assert replay(part.header.parts, part.entries()).difference, "its beginning does matter"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 21_000


def test_without_a_state_a_tape_goes_on_says_so_and_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = long_tape(tmp_path, monkeypatch, strange=pytest)
    assert set(notes.kinds) == {"tape-no-base"}
    assert "is not part of a machine's state" in str(notes.said[0][1]["reason"])
    (first,) = tapes_in([tmp_path])
    tape = read_tape(first)
    assert len(list(tape.entries())) > 10
    with pytest.raises(TapeError, match="no file has the state"):
        part_to_replay(tape)


def test_a_file_that_is_missing_in_the_middle_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments(tmp_path, monkeypatch, bytes_max=100 * MB)
    (tmp_path / "tape-rack1-rank0.2.mend").unlink()
    with pytest.raises(TapeError, match=r"rank0\.3\.mend: segment 3 follows segment 1"):
        read_tape(tmp_path / "tape-rack1-rank0.mend")


# ------------------------------------------------------------------ what may happen to a file


def test_a_tail_that_is_cut_anywhere_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, *range(3))
    whole = path.read_bytes()
    for size in range(len(whole) - form.HEAD_BYTES, len(whole)):
        path.write_bytes(whole[:size])
        tape = read_tape(path)
        assert not tape.whole
        assert steps(path) == [0, 1, 2]
        assert bool(tape.lost) == (size > len(whole) - form.HEAD_BYTES)
    path.write_bytes(whole[: len(whole) - form.HEAD_BYTES - 1])
    lost = read_tape(path).lost
    assert lost.startswith("the tail is cut: ")
    assert steps(path) == []


def test_zeros_that_a_dead_machine_leaves_are_a_cut_tail(tmp_path: Path) -> None:
    path = written(tmp_path, *range(3))
    whole = path.read_bytes()
    path.write_bytes(whole[: -form.HEAD_BYTES] + bytes(5000))
    assert "5000 bytes" in read_tape(path).lost
    assert steps(path) == [0, 1, 2]


def test_a_byte_that_changed_is_an_error_that_names_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, "CHUNK_RAW_BYTES", 1)
    path = written(tmp_path, *range(20))
    whole = path.read_bytes()
    for place in range(0, len(whole) - 2 * form.HEAD_BYTES - 60):
        spoiled = bytearray(whole)
        spoiled[place] ^= 0x10
        path.write_bytes(bytes(spoiled))
        with pytest.raises(TapeError, match=r"tape-rack1-rank0\.mend: "):
            read_tape(path)


def test_more_behind_the_end_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, 1)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(TapeError, match="data after its end"):
        read_tape(path)


@pytest.mark.parametrize("garbage", [b"mend", bytes(100), b"\x7fELF" * 100])
def test_garbage_is_no_tape(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "tape-rack0-rank0.mend"
    path.write_bytes(garbage)
    with pytest.raises(TapeError, match="does not begin like a tape"):
        read_tape(path)


def test_a_tape_of_another_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "tape-rack0-rank0.mend"
    path.write_bytes(form.file_begin()[:-2] + (form.VERSION + 1).to_bytes(2, "big") + b"more")
    said = f"format {form.VERSION + 1}, this mend reads format {form.VERSION}; read it with the"
    with pytest.raises(TapeError, match=said):
        read_tape(path)


def test_where_there_is_no_tape_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(TapeError, match="diagnostics_dir"):
        tapes_in([tmp_path])
    with pytest.raises(TapeError, match="no such file"):
        tapes_in([tmp_path / "absent.mend"])


# ------------------------------------------------------------------ disks


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_is_told_once_and_nothing_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode: real(Path("/dev/full"), "wb"))
    notes = Notes()
    tape = writer(tmp_path, notes)
    put(tape, *range(10))
    tape.close()
    put(tape, 10)
    assert tape.lost == 11
    assert notes.kinds == ["tape-stopped"]
    assert "No space left" in str(notes.said[0][1]["reason"])
    assert notes.said[0][1]["remedy"] == "free some space"


def test_a_folder_that_cannot_be_made_is_told_with_a_remedy_that_fits() -> None:
    """It was told to leave the folder where it is."""
    notes = Notes()
    writer(Path("/proc/ck"), notes).close()
    assert notes.kinds == ["tape-stopped"]
    assert str(notes.said[0][1]["remedy"]).startswith("set diagnostics_dir to a folder that")


class HungDisk:
    """A disk that takes nothing until it is back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hangs, self.back = threading.Event(), threading.Event()
        real = tape_module._Files.write

        def write(files: Any, records: Sequence[bytes]) -> None:
            self.hangs.set()
            assert self.back.wait(60)
            real(files, records)

        monkeypatch.setattr(tape_module._Files, "write", write)


def test_a_disk_that_hangs_for_a_while_leaves_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tape_module, "WAITING_MAX", 4)
    disk, notes = HungDisk(monkeypatch), Notes()
    tape = writer(tmp_path, notes)
    put(tape, 0)
    assert disk.hangs.wait(60)
    put(tape, 1, 2, 3, 4, 5, 6, 7)
    assert tape.lost == 3
    disk.back.set()
    tape.close()
    assert steps(tmp_path / "tape-rack1-rank0.mend") == [0, 1, 2, 3, 4, "gap 3"]
    assert notes.said == [("tape-gap", {"events": 3, "reason": "the disk was too slow"})]


def test_an_entry_that_is_too_long_is_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, "RECORD_BYTES_MAX", 100)
    tape = writer(tmp_path)
    put(tape, 0)
    put(tape, 1, text="x" * 200)
    put(tape, 2)
    tape.close()
    assert steps(tmp_path / "tape-rack1-rank0.mend") == [0, "gap 1", 2]


def test_a_tape_whose_file_was_removed_says_so(tmp_path: Path) -> None:
    """It was written on, unseen, and the replay found no tape."""
    notes = Notes()
    tape = writer(tmp_path, notes)
    until(lambda: (tmp_path / "tape-rack1-rank0.mend").exists(), "the tape begins")
    (tmp_path / "tape-rack1-rank0.mend").unlink()
    put(tape, 1, 2, 3)
    tape.close()
    assert notes.kinds == ["tape-stopped"]
    assert notes.said[0][1]["reason"] == "the file was removed"
    assert notes.said[0][1]["remedy"] == "leave the folder where it is"
    assert tape.lost == 3
