"""`python -m mend_lab replay`: what is read of its arguments, and how it reports its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mend.errors import ConfigError
from mend.tools.launch import LaunchResult
from mend.types import Peer
from mend_lab.commands import app
from mend_lab.commands import replay as replay_command
from mend_lab.commands.replay import Rerun
from mend_lab.replay.comparison import TRAINING, Finding, ReplayReport
from mend_lab.replay.script import Part, ReplayScript
from mend_lab.replay.settings import REPLAY
from tests.unit.coordination.nouns import commit, genesis, offer

ROUNDS = 2


@pytest.fixture
def made(tmp_path: Path) -> Rerun:
    """Of two racks of one rank; no process is started."""
    parts = tuple(Part(rack, ((),), True, {}, "3") for rack in (0, 1))
    records = tuple(commit(version, [offer(0)]) for version in (1, 2))
    script = ReplayScript("then", (), genesis(), records, 2, parts, (), {"torch": "1.0"}, ())
    return Rerun(script, ["-m", "train", "--lr", "1"], tmp_path)


def told(made: Rerun, folder: Path, findings: Sequence[Sequence[Finding]], **outcome: int) -> int:
    """The exit status; `findings`: by rack."""
    for rack, found in enumerate(findings):
        for each in found:
            ReplayReport(folder, Peer(rack, 0)).tell(each)
    made._poll_children()
    ended = {rack: outcome.get(f"rack{rack}", 0) for rack in (0, 1)}
    return made.print_result(LaunchResult(ended, None, outcome.get("interrupted", 0)))


ROUND, DONE = [Finding("round", 1), Finding("round", 2)], Finding("done", ROUNDS)


def test_the_racks_are_started_as_then(made: Rerun, tmp_path: Path) -> None:
    job = made.job
    assert (job.racks, job.nproc_per_rack, job.witness, job.job_id) == (2, 1, False, "then")
    assert job.command == ("-m", replay_command.CHILD, "-m", "train", "--lr", "1")
    assert job.env[REPLAY] == str(tmp_path / "script.mend-replay")
    assert job.env["OMP_NUM_THREADS"] == "3"


def test_equal_is_one_sentence(
    made: Rerun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(made, tmp_path, [[*ROUND, DONE], [*ROUND, DONE]], rack1=9) == 0
    said = capsys.readouterr().out
    assert "replayed 2 rounds of 2 racks: every digest equals that on the tape" in said
    assert "after that, rack 1 ended with status 9" in said


def test_the_earliest_difference_is_told(
    made: Rerun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = Finding("differs", 0, (2, 1), "merge", "round 2 differs")
    first = Finding("differs", 0, (2, 0), TRAINING, "rack 1 trained otherwise")
    assert told(made, tmp_path, [[ROUND[0], later], [ROUND[0], first]]) == 1
    said = capsys.readouterr().out
    assert "different: rack 1 trained otherwise\n" in said
    assert "may mean  other data" in said
    assert "recorded by torch=1.0; this is mend=" in said
    assert "round 2 differs" not in said


def test_a_script_that_dies_is_no_proof(
    made: Rerun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made._sink("rack 1", "ValueError: no data")
    assert told(made, tmp_path, [[*ROUND], [ROUND[0]]], rack1=1) == 1
    said = capsys.readouterr().out
    assert "[rack 1] ValueError: no data" in said
    assert "the script ended early, after 1 of 2 rounds, which are equal" in said


def test_an_interrupt_is_told_with_how_far_it_came(
    made: Rerun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(made, tmp_path, [ROUND, ROUND], interrupted=2) == 130
    assert "interrupted after 2 of 2 rounds" in capsys.readouterr().out


def test_arguments_after_two_dashes_belong_to_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def record(*arguments: object) -> int:
        asked.append(arguments)
        return 1

    monkeypatch.setattr(replay_command, "replay_training", record)
    line = ["replay", "a", "b", "--log-dir", "c", "--", "t.py", "--log-dir", "d", "--", "-m"]
    assert CliRunner().invoke(app, line).exit_code == 1
    assert asked == [([Path("a"), Path("b")], ["t.py", "--log-dir", "d", "--", "-m"], Path("c"))]


def test_a_training_without_a_script_is_refused(tmp_path: Path) -> None:
    for line in (["replay", str(tmp_path)], ["replay", str(tmp_path), "--"]):
        answer = CliRunner().invoke(app, line)
        assert isinstance(answer.exception, ConfigError), answer.output
        assert "-- train.py" in str(answer.exception)


def test_help_teaches() -> None:
    said = CliRunner().invoke(app, ["replay", "--help"]).output
    assert "mend replay" in said, "the decisions alone need no script"
    assert "python -m mend_lab replay events -- train.py --lr 3e-4" in said
