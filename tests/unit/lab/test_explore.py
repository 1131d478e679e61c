"""`python -m mend_lab explore`: what was visited, and the shortest way to what is broken."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mend.errors import ConfigError
from mend_lab.commands import app
from mend_lab.commands.explore import bounds_of, explore
from mend_lab.sim.model_check import explore as explore_module
from mend_lab.sim.model_check.state import Bounds
from tests.sim.planted import PLANTS

SMALL = Bounds(witness=False, ballots=1, crashes=0)


def told(bounds: Bounds, limit: int | None = None) -> tuple[int, str]:
    text = io.StringIO()
    return explore(bounds, limit, Console(file=text, width=200)), text.getvalue()


def test_members_are_racks_and_perhaps_a_witness() -> None:
    assert bounds_of("0,1", rounds=2) == Bounds(racks=2, witness=False, rounds=2)
    assert bounds_of("0, 1, 2, witness") == Bounds(racks=3, witness=True)


@pytest.mark.parametrize("members", ["", "0", "witness", "0,2", "1,0", "0,1,x", "0,1,2,3,4"])
def test_other_members_are_refused_with_what_to_give(members: str) -> None:
    with pytest.raises(ConfigError, match=r"Give 0,1 or 0,1,witness"):
        bounds_of(members)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"demoted": 2, "demotions": True, "rosters": 1}, "demoted.*is not a member"),
        ({"candidate": 3}, "candidate.*is not a member"),
        ({"demoted": 1, "rosters": 1}, "no roster can take its vote"),
        ({"demoted": 1, "demotions": True}, "no roster can take its vote"),
    ],
)
def test_bounds_with_a_node_outside_the_members_are_refused(
    numbers: dict[str, int], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        bounds_of("0,1,witness", **numbers)
    assert bounds_of("0,1,witness", candidate=2).candidate == 2, "the witness is the last node"


@pytest.mark.parametrize("option", ["--crashes", "--questions"])
def test_a_negative_number_is_refused(option: str) -> None:
    answer = CliRunner().invoke(app, ["explore", "--members", "0,1", option, "-1"])
    assert answer.exit_code == 2
    assert f"Invalid value for '{option}': " in answer.output


def test_a_job_that_holds_is_exit_status_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explore_module, "REPORT_STATES", 100)
    status, text = told(SMALL)
    assert status == 0
    assert text.startswith("100 states, ")
    assert text.endswith("visited every state within these bounds; no invariant broke\n")


def test_how_a_job_begins_is_a_search_of_its_own() -> None:
    arguments = ["explore", "--founding", "--members", "0,1", "--crashes", "0", "--ballots", "0"]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0
    assert "visited every state within these bounds" in found.output


def test_a_limit_is_not_the_end() -> None:
    status, text = told(SMALL, limit=50)
    assert status == 2
    assert "stopped at the limit of 50 states" in text


def test_a_broken_invariant_is_a_story(monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS["7-tie-break-on-both-halves"](monkeypatch)
    status, text = told(SMALL)
    assert status == 1
    story = text[text.index("BROKEN: agreement: record 2 is decided as ") :].splitlines()
    assert "rack 1 promise ballot 2.1 to rack 1, which leads" in text
    assert story[-1].lstrip().startswith(f"{len(story) - 1} ")


def test_ctrl_c_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(explore_module.Explorer, "run", interrupted)
    status, text = told(SMALL)
    assert status == 2
    assert text == "stopped after 0 states; no invariant broke\n"


def test_the_command_passes_its_numbers_on() -> None:
    arguments = ["explore", "--members", "0,1", "--crashes", "0", "--ballots", "0", "--limit", "10"]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 2, answer.output
    assert "10 states" in answer.output
