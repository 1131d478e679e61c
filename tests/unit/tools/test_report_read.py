"""Files as crashes leave them: what is whole counts, the rest is told."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mend.errors import ConfigError
from mend.tools.report import read as report_read
from mend.tools.report.facts import RunFacts
from mend.tools.report.read import LINE_BYTES_MAX, read_run, runs_in


def line(step: int, time_ns: int | None = None) -> bytes:
    event = {
        "kind": "progress", "time_ns": step if time_ns is None else time_ns, "step": step,
        "tokens": step, "at_ns": step, "stall_ms_total": 0.0, "bytes_sent": 0, "bytes_received": 0,
    }  # fmt: skip
    return json.dumps(event).encode() + b"\n"


def steps(facts: RunFacts, rack: int = 0) -> list[int]:
    return [point.step for point in facts.ranks[rack, 0].track.points()]


def write(folder: Path, data: bytes, name: str = "events-rack0-rank0.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return folder


def test_a_torn_last_line_is_left_out_and_told(tmp_path: Path) -> None:
    facts = read_run(write(tmp_path, line(1) + line(2) + line(3)[:-20]))
    assert steps(facts) == [1, 2]
    (note,) = facts.notes
    assert note.startswith("events-rack0-rank0.jsonl ends inside a line")


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\0" * 5000 + b"\n", b"\xff\xfe not text\n", b"[1, 2]\n", b'{"kind": "progress"}\n',
        b'{"kind": "progress", "time_ns": "now"}\n', b'{"kind": "progress", "time_ns": -1}\n',
        b"[" * 100_000 + b"\n", b"{" + b" " * (3 * LINE_BYTES_MAX) + b"}\n",
    ],
    ids=["zeros", "binary", "list", "timeless", "words", "past", "deep", "endless"],
)  # fmt: skip
def test_a_line_that_is_no_event_is_left_out(tmp_path: Path, rubbish: bytes) -> None:
    facts = read_run(write(tmp_path, line(1) + rubbish + line(2)))
    assert steps(facts) == [1, 2]
    assert any("can make no event: 1;" in note for note in facts.notes), facts.notes


def test_an_event_of_another_kind_of_program_is_counted(tmp_path: Path) -> None:
    data = line(1) + b'{"kind": "progress", "time_ns": 2, "step": "two"}\n'
    data += b'{"kind": "whatever", "time_ns": 2}\n'  # unknown kinds are of a newer mend
    assert read_run(write(tmp_path, data)).notes == [
        "events-rack0-rank0.jsonl: lines left out, of which this version of mend can make no "
        "event: 2; the first: progress: Expected `int`, got `str` - at `$.step`"
    ]


def test_the_files_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    write(tmp_path, line(1) + line(5))
    write(tmp_path, line(2) + line(4), "events-rack1-rank0.jsonl")
    write(tmp_path, b"", "events-rack2-rank0.jsonl")
    facts = read_run(tmp_path)
    assert (steps(facts, 0), steps(facts, 1)) == ([1, 5], [2, 4])
    assert (facts.begin_ns, facts.end_ns) == (1, 5)
    assert facts.racks == [0, 1]


def test_the_older_half_of_a_long_file_is_read_and_what_was_deleted_is_told(tmp_path: Path) -> None:
    """The report drew the newer half alone, without a word."""
    start = b'{"kind":"start","time_ns":0,"member":[0,1],"plan":"","job":"long"}\n'
    write(tmp_path, start + line(1) + line(2), "events-rack0-rank0.older.jsonl")
    write(tmp_path, start + line(3) + line(4))
    facts = read_run(tmp_path)
    assert (facts.job, steps(facts), facts.notes) == ("long", [1, 2, 3, 4], [])
    write(tmp_path, start + b'{"kind":"events-cut","time_ns":3,"path":"x"}\n' + line(3) + line(4))
    (note,) = read_run(tmp_path).notes
    assert note.startswith("events-rack0-rank0.jsonl: the oldest events were deleted"), note


def test_lowest_ranks_of_very_many_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_read, "FILES_MAX", 2)
    for rack in (0, 1):
        for rank in (0, 1):
            write(tmp_path, line(1), f"events-rack{rack}-rank{rank}.jsonl")
    facts = read_run(tmp_path)
    assert sorted(facts.ranks) == [(0, 0), (1, 0)]
    assert facts.notes == ["2 event files of higher ranks are not read (2 at most)"]


def test_a_folder_of_runs_gives_them_by_age(tmp_path: Path) -> None:
    for age, name in enumerate(["late", "early"]):
        path = write(tmp_path / name / "events", line(1)) / "events-rack0-rank0.jsonl"
        os.utime(path, ns=(10 - age, 10 - age))
    assert [name for name, _ in runs_in(tmp_path)] == ["early", "late"]
    ((name, folder),) = runs_in(tmp_path / "late")
    assert (name, folder) == ("late", tmp_path / "late" / "events")


def missing(tmp_path: Path) -> Path:
    return tmp_path / "none"


def empty(tmp_path: Path) -> Path:
    return tmp_path


def a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


def a_folder_in_place_of_a_file(tmp_path: Path) -> Path:
    (tmp_path / "events-rack0-rank0.jsonl").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (missing, "does not exist"),
        (empty, "there is no events-rack"),
        (a_file, "is not a folder"),
        (a_folder_in_place_of_a_file, "are not files"),
    ],
)
def test_folder_without_a_run_is_refused_with_the_remedy(
    tmp_path: Path, make: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        runs_in(make(tmp_path))
    assert "MEND_DIAGNOSTICS_DIR" in caught.value.remedy
