"""What `mend repro` starts, reads and says. With real runs: tests/process/test_repro.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mend.determinism.comparison import Finding, Recording
from mend.determinism.recorder import FORMAT
from mend.errors import UsageError
from mend.tools.repro import Found, _equal_so_far, compare_folders, lines_of, print_verdict
from mend.tools.repro_runs import Asked, RunExtent, RunProgress, RunSetting, command_of, read

HEADER = {"format": FORMAT, "rank": 0, "ranks": 1, "facts": {"threads": 1}}


def recording(folder: Path, *records: object) -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join(f"{json.dumps(each)}\n" for each in records)
    (folder / "rank-0.jsonl").write_text(text)
    return folder


def test_ranks_are_started_by_torchrun() -> None:
    asked = Asked(("train.py", "--lr", "1"), (RunSetting("A"), RunSetting("B", 2, ("--x",))))
    plain, many = (
        command_of(asked, each, Path("f"), RunExtent(0, (3, 4))) for each in asked.settings
    )
    child = ["-m", "mend.tools.repro_child", "f", "0", "3:4", "-"]
    assert plain[1:] == [*child, "train.py", "--lr", "1"]
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
    assert print_verdict(Found(read(one), read(other), None, 1), True) == 0
    assert json.loads(capsys.readouterr().out)["finding"] is None


def test_recordings_of_a_cpu_and_a_gpu_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are hashed in ways of their own, and were reported as different from step 1 on."""
    step = {"step": 1, "end": True, "losses": ["1"], "weights": "a", "devices": ["cpu"]}
    one = recording(tmp_path / "one", HEADER, step)
    other = recording(tmp_path / "other", HEADER, {**step, "devices": ["cuda"], "weights": "b"})
    with pytest.raises(UsageError, match=r"devices=\['cpu'\].*\['cuda'\].*hashed"):
        compare_folders([one, other], False)
    assert capsys.readouterr().out == ""
    recording(other, HEADER, {**step, "weights": "b"})
    assert compare_folders([one, other], False) == 1


def test_a_difference_that_does_not_come_again_is_said_so() -> None:
    lines = lines_of(Finding(4, "weights", "a.weight", rank=1), [], 4)
    assert lines[0] == "different: step 4, weights (a.weight), rank 1"
    assert "depends on time: 4 pairs" in lines[1]


def test_cause_that_runs_have_shown_is_not_called_likely() -> None:
    lines = lines_of(Finding(1, "losses", located=True, cause="a set", measured=True), [], 2)
    assert lines[1] == "    cause      a set"


def test_progress_has_phase_steps_and_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # "run A: 0 steps", for two minutes.
    now_s = [100.0]
    monkeypatch.setattr("mend.tools.repro_runs.time.monotonic", lambda: now_s[0])
    said: list[str] = []
    lines = ["reading the corpus"]
    progress = RunProgress("run A (1 of 2)", tmp_path, said.append, 6, lines)

    def look_after(seconds: float) -> str:
        now_s[0] += seconds
        progress.look()
        return said.pop() if said else ""

    assert look_after(1) == ""
    assert look_after(1) == (
        "run A (1 of 2): no step of an optimizer yet, 2 s; the script said: reading the corpus"
    )
    ends = [{"step": step, "end": True} for step in (1, 2, 3)]
    recording(tmp_path, HEADER, {"step": 1, "at": ["forward", "", ""]}, *ends[:2])
    assert look_after(4) == ""
    assert look_after(2) == "run A (1 of 2): step 2 of 6, 8 s, 16 s left"
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write(f"{json.dumps(ends[2])}\n")
    assert look_after(6) == "run A (1 of 2): step 3 of 6, 14 s, 18 s left"
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write(f"{json.dumps(ends[2])}\n" * 3)
    assert look_after(6) == "run A (1 of 2): step 6 of 6, 20 s, ending"
    unknown = RunProgress("run A (1 of 2)", tmp_path, said.append, 0)
    now_s[0] += 10
    unknown.look()
    assert said == [
        "run A (1 of 2): step 6, 10 s, until the script ends (--steps N ends it earlier)"
    ]


def test_hash_seed_is_chosen_unless_the_user_has_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert RunSetting("A", hash_seed="1").chooses_hash_seed
    assert not RunSetting("A").chooses_hash_seed
    assert not RunSetting("A", env={"PYTHONHASHSEED": "3"}, hash_seed="1").chooses_hash_seed
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert not RunSetting("A", hash_seed="1").chooses_hash_seed


def test_runs_are_equal_up_to_where_others_parted() -> None:
    def run(*weights: str) -> list[Recording]:
        steps = {at: {"step": at, "weights": each} for at, each in enumerate(weights, 1)}
        return [Recording(HEADER, steps)]

    parted = Finding(2, "weights")
    assert _equal_so_far(run("a", "b", "c"), run("a", "b"), parted)
    assert not _equal_so_far(run("a", "b", "c"), run("a", "c"), parted)
    assert not _equal_so_far(run("a", "b", "c"), run("a"), parted)
    assert not _equal_so_far(run("a", "b"), run("a"), Finding(2, "length"))
