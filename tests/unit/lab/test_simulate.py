"""`python -m mend_lab simulate`: seeds that hold are counted, one that does not is shrunk and
told as a story."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mend.errors import ConfigError
from mend.types import SECOND
from mend_lab.commands import app, main
from mend_lab.commands import simulate as simulate_module
from mend_lab.commands.simulate import FAILURES_SHOWN, Outcome, Wanted, run_seed, simulate, span_of
from mend_lab.sim import Fault, Scenario, World, draw
from mend_lab.sim.story import setup

PROBLEM = "I3: offer (0, 0, 1) is in versions 1 and 2"


def told(first: int, count: int, **changes: object) -> tuple[int, str]:
    text = io.StringIO()
    console = Console(file=text, width=200, color_system=None)
    wanted = Wanted(first=first, stop=first + count, jobs=1, **changes)  # type: ignore[arg-type]
    return simulate(wanted, console), text.getvalue()


def broken(seed: int, fixed: object = None) -> Outcome:
    return Outcome(seed, (PROBLEM,) if seed % 2 else (), 3, 1_000_000, SECOND)


@pytest.fixture
def odd_seeds_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_module, "run_seed", broken)
    monkeypatch.setattr(simulate_module, "shrink", lambda scenario, problems: scenario)


def test_a_seed_runs_to_its_verdict() -> None:
    outcome = run_seed(0)
    assert outcome.problems == ()
    assert outcome.commits == World(0).run().commits > 0
    assert outcome.cpu_ns > 0
    assert outcome.virtual_ns > 0


def test_an_exception_of_the_simulated_code_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: World) -> None:
        raise AssertionError("ends twice")

    monkeypatch.setattr(World, "run", fail)
    assert run_seed(5).problems == ("AssertionError: ends twice",)


def test_seeds_that_hold_are_one_line() -> None:
    failed, text = told(0, 2)
    assert failed == 0
    assert "2 seeds from 0: 0 broke an invariant" in text
    assert "python -m mend_lab simulate --seed" not in text


@pytest.mark.usefixtures("odd_seeds_break")
def test_a_seed_that_breaks_is_told_as_a_story() -> None:
    failed, text = told(6, 2)
    assert failed == 1
    assert "seed 7 broke an invariant:" in text
    assert setup(draw(7)) in text
    assert "To have it again:" in text
    assert "for details: python -m mend_lab simulate --seed N --trace, with N one of 7" in text


def test_seed_is_shrunk_first_unless_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Scenario(seed=7, faults=(Fault("cut", 0, SECOND, 0, 1),))
    monkeypatch.setattr(simulate_module, "run_seed", broken)
    monkeypatch.setattr(simulate_module, "shrink", lambda scenario, problems: small)
    _, text = told(7, 1)
    assert "seed 7 broke an invariant, shrunk to the smallest scenario that still does:" in text
    assert setup(small) in text
    _, text = told(7, 1, shrink=False)
    assert "shrunk" not in text
    assert setup(draw(7)) in text


@pytest.mark.usefixtures("odd_seeds_break")
def test_failing_seed_is_kept_as_a_line_that_the_tests_can_run(tmp_path: Path) -> None:
    file = tmp_path / "regressions.txt"
    told(6, 4, regressions=file)
    lines = file.read_text().splitlines()
    assert len(lines) == 2
    case, _, why = lines[0].rpartition("  # ")
    assert eval(case, {"Scenario": Scenario, "Fault": Fault}) == draw(7)
    assert why == f"seed 7: {PROBLEM}"


@pytest.mark.usefixtures("odd_seeds_break")
def test_many_that_break_do_not_flood_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_module, "story_of", lambda scenario: "A STORY")
    failed, text = told(0, 60)
    assert failed == 30
    assert text.count("A STORY") == FAILURES_SHOWN


@pytest.mark.usefixtures("odd_seeds_break")
def test_programs_get_sums_and_nothing_else() -> None:
    failed, text = told(0, 4, as_json=True)
    assert failed == 2
    sums = json.loads(text)
    assert (sums["seeds"], sums["commits"], sums["interrupted"]) == (4, 12, False)
    assert sums["failed"] == [{"seed": n, "problems": [PROBLEM]} for n in (1, 3)]
    assert sums["virtual_s"] == 4.0


def test_ctrl_c_ends_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seed: int, fixed: object = None) -> Outcome:
        if seed == 3:
            raise KeyboardInterrupt
        return Outcome(seed, (), 3, 1_000_000)

    monkeypatch.setattr(simulate_module, "run_seed", interrupted)
    failed, text = told(0, 100)
    assert failed == 0
    assert "interrupted after 3 seeds from 0: 0 broke an invariant" in text


def test_the_time_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [0]

    def takes_a_second(seed: int, fixed: object = None) -> Outcome:
        now_ns[0] += SECOND
        return Outcome(seed, (), 1, 1_000_000)

    monkeypatch.setattr(simulate_module, "run_seed", takes_a_second)
    monkeypatch.setattr(simulate_module.time, "monotonic_ns", lambda: now_ns[0])
    text = io.StringIO()
    wanted = Wanted(first=100, stop=None, minutes=0.5, jobs=1)
    assert simulate(wanted, Console(file=text, width=200, color_system=None)) == 0
    assert "30 seeds from 100" in text.getvalue()


def test_seeds_are_a_count_or_a_span() -> None:
    assert span_of("2000") == (0, 2000)
    assert span_of("100:200") == (100, 200)
    for wrong in ("", "x", "5:", "7:7", "9:3", "-3", "\u00b2", "1:\u00b2"):
        with pytest.raises(ConfigError, match="seeds"):
            span_of(wrong)


def test_the_users_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mend.toml"
    file.write_text("racks = 3\nsync_period_steps = 12\nfragments = 3\nmerge_min_racks = 2\n")
    monkeypatch.setenv("MEND_CONFIG", "")
    fixed = simulate_module.fixed_by(file)
    scenario = draw(4, fixed)
    assert (scenario.racks, scenario.period_steps, scenario.fragments, scenario.k) == (3, 12, 3, 2)
    assert scenario.overlap_steps == 3  # a quarter of the period
    assert run_seed(4, fixed).problems == ()


def test_the_exit_status_says_whether_all_held(
    monkeypatch: pytest.MonkeyPatch, odd_seeds_break: None
) -> None:
    monkeypatch.setattr(simulate_module, "story_of", lambda scenario: "A STORY")
    arguments = ["simulate", "--jobs", "1", "--seeds"]
    assert CliRunner().invoke(app, [*arguments, "2:3"]).exit_code == 0
    assert CliRunner().invoke(app, [*arguments, "3:4"]).exit_code == 1


def test_a_trace_shows_what_broke_and_what_the_racks_noted() -> None:
    seed = next(
        s for s in range(99) if any(f.kind == "cut" and not f.after for f in draw(s).faults)
    )
    answer = CliRunner().invoke(app, ["simulate", "--seed", str(seed), "--trace"])
    assert answer.exit_code == 0, answer.output
    assert setup(draw(seed)).splitlines()[0] in answer.output
    assert re.search(r"^ +\d+\.\d+ s nothing reaches", answer.output, re.MULTILINE)
    assert " genesis racks=" in answer.output
    assert " 0 problems, trace " in answer.output


def test_a_trace_needs_one_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mend_lab", "simulate", "--trace"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "Give --seed N." in capsys.readouterr().err


def test_help_teaches() -> None:
    answer = CliRunner().invoke(app, ["simulate", "--help"])
    assert answer.exit_code == 0
    assert "python -m mend_lab simulate --seed 17 --trace" in answer.output
    assert "python -m mend_lab simulate --minutes 10 --jobs 2" in answer.output
