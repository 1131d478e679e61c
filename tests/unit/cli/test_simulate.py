"""`mend simulate`: seeds that hold are counted, one that does not is told as a story."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mend.cli import app, main
from mend.cli import simulate as simulate_module
from mend.cli.simulate import FAILURES_SHOWN, Outcome, run_seed, simulate
from mend.sim import World, draw


def told(first: int, count: int) -> tuple[int, str]:
    text = io.StringIO()
    console = Console(file=text, width=200, color_system=None)
    return simulate(first, count, 1, console), text.getvalue()


def broken(seed: int) -> Outcome:
    problems = ("I3: offer (0, 0, 1) is in versions 1 and 2",) if seed % 2 else ()
    return Outcome(seed, problems, 3, 1_000_000)


def test_a_seed_runs_to_its_verdict() -> None:
    outcome = run_seed(0)
    assert outcome.problems == ()
    assert outcome.commits == World(0).run().commits > 0
    assert outcome.cpu_ns > 0


def test_an_exception_of_the_simulated_code_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: World) -> None:
        raise AssertionError("ends twice")

    monkeypatch.setattr(World, "run", fail)
    assert run_seed(5).problems == ("AssertionError: ends twice",)


def test_seeds_that_hold_are_one_line() -> None:
    failed, text = told(0, 2)
    assert failed == 0
    assert "2 seeds from 0: 0 broke an invariant" in text
    assert "mend simulate --seed" not in text


def test_a_seed_that_breaks_is_told_as_a_story(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_module, "run_seed", broken)
    failed, text = told(6, 2)
    assert failed == 1
    assert draw(7).story() in text
    assert "    I3: offer (0, 0, 1) is in versions 1 and 2" in text
    assert "look closer: mend simulate --seed N --trace, N of 7" in text


def test_many_that_break_do_not_flood_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_module, "run_seed", broken)
    failed, text = told(0, 60)
    assert failed == 30
    assert text.count("    I3: ") == FAILURES_SHOWN


def test_the_exit_status_says_whether_all_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_module, "run_seed", broken)
    arguments = ["simulate", "--jobs", "1", "--seeds", "1", "--first"]
    assert CliRunner().invoke(app, [*arguments, "2"]).exit_code == 0
    assert CliRunner().invoke(app, [*arguments, "3"]).exit_code == 1


def test_a_trace_shows_what_the_racks_noted() -> None:
    answer = CliRunner().invoke(app, ["simulate", "--seed", "0", "--trace"])
    assert answer.exit_code == 0, answer.output
    assert draw(0).story().splitlines()[0] in answer.output
    assert "genesis {'racks':" in answer.output
    assert " 0 problems, trace " in answer.output


def test_a_trace_needs_one_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mend", "simulate", "--trace"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "Give --seed N." in capsys.readouterr().err


def test_help_teaches() -> None:
    answer = CliRunner().invoke(app, ["simulate", "--help"])
    assert answer.exit_code == 0
    assert "mend simulate --seed 17 --trace" in answer.output


@pytest.mark.process
def test_several_processes_share_the_seeds() -> None:
    command = [sys.executable, "-m", "mend.cli", "simulate", "--seeds", "6", "--jobs", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "6 seeds from 0: 0 broke an invariant" in done.stdout
