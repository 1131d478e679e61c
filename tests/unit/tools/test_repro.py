"""What `mend repro` starts, reads and says. With real runs: tests/process/test_repro.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mend.determinism.comparison import Finding
from mend.errors import UsageError
from mend.tools import repro
from mend.tools.repro import (
    Asked,
    Setting,
    _Progress,
    command_of,
    compare_folders,
    lines_of,
    print_verdict,
    read,
)

HEADER = {"format": 1, "rank": 0, "ranks": 1, "facts": {"threads": 1}}


def recording(folder: Path, *records: object) -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join(f"{json.dumps(each)}\n" for each in records)
    (folder / "rank-0.jsonl").write_text(text)
    return folder


def test_ranks_are_started_by_torchrun() -> None:
    asked = Asked(("train.py", "--lr", "1"), (Setting("A"), Setting("B", 2, ("--x",))))
    plain, many = (
        command_of(asked, each, Path("f"), repro.Extent(0, (3, 4))) for each in asked.settings
    )
    assert plain[1:] == ["-m", "mend.tools.repro_child", "f", "0", "3:4", "train.py", "--lr", "1"]
    assert many[1:3] == ["-m", "mend.tools.torchrun"]
    assert many[-4:] == ["train.py", "--lr", "1", "--x"]
    assert "2" in many


def test_recordings_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no rank-N.jsonl"):
        read(tmp_path)
    with pytest.raises(UsageError, match="1 of 2 ranks"):
        read(recording(tmp_path, {**HEADER, "ranks": 2}))
    with pytest.raises(UsageError, match="no step of a torch optimizer"):
        read(recording(tmp_path, HEADER))
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"step": 1, "en')
    with pytest.raises(UsageError, match=r"rank-0.jsonl:2 is cut off"):
        read(tmp_path)
    with pytest.raises(UsageError, match="two folders that --record wrote"):
        compare_folders([tmp_path], False)


def test_two_folders_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = {"step": 1, "end": True, "losses": ["1"], "weights": "a"}
    one = recording(tmp_path / "one", HEADER, step)
    other = recording(tmp_path / "other", {**HEADER, "facts": {"threads": 2}}, step)
    assert compare_folders([one, other], False) == 0
    assert capsys.readouterr().out.startswith("equal: 1 steps")
    recording(other, {**HEADER, "facts": {"threads": 2}}, {**step, "weights": "b"})
    assert compare_folders([one, other], False) == 1
    said = capsys.readouterr().out
    assert said.startswith("different: step 1, weights, rank 0\n")
    assert "record both again with --at 1" in said
    assert "threads: 1 and 2" in said
    assert print_verdict(read(one), read(other), None, True, 1) == 0
    assert json.loads(capsys.readouterr().out)["finding"] is None


def test_a_difference_that_does_not_come_again_is_said_so() -> None:
    lines = lines_of(Finding(4, "weights", "a.weight", rank=1), [], 4)
    assert lines[0] == "different: step 4, weights (a.weight), rank 1"
    assert "depends on time: 4 pairs" in lines[1]


def test_a_run_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repro, "SAY_S", 0.0)
    said: list[str] = []
    progress = _Progress("A", tmp_path, said.append)
    progress.look()
    assert not said, "it has not begun"
    ends = [{"step": step, "end": True} for step in (1, 2)]
    recording(tmp_path, HEADER, {"step": 1, "at": ["forward", "", ""]}, ends[0])
    progress.look()
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write(f"{json.dumps(ends[1])}\n")
    progress.look()
    assert said == ["run A: 1 steps", "run A: 2 steps"]
