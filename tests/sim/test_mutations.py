"""Bugs planted in the running code: seeds show them, and the same seeds are clean without them.

Only those that a few seeds show; `make mutation-table` draws up to 2,000 for each.
"""

from __future__ import annotations

import pytest
import torch

from mend.protocol import proposer
from mend.sim import draw, problems_of
from tests.sim.bugs import BUGS, ELSEWHERE, occurrences, planted

NAMED = {bug.name: bug for bug in BUGS}

SHOWN: tuple[tuple[str, int, str], ...] = ()
"""(bug, its first seed, how the first problem begins)"""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_every_bug_changes_a_text_that_is_there_once() -> None:
    assert len(NAMED) == len(BUGS)
    for bug in BUGS:
        assert bug.edits
        for edit in bug.edits:
            assert occurrences(edit) == 1, f"bug {bug.name}: {edit.old!r} in {edit.file}"
            assert edit.old != edit.new


@pytest.mark.parametrize("name", NAMED)
def test_a_bug_can_be_planted_and_is_taken_out_again(name: str) -> None:
    before = proposer.Proposer.decide.__code__
    with planted(NAMED[name]):
        pass
    assert proposer.Proposer.decide.__code__ is before


def test_what_is_shown_elsewhere_is_a_bug_of_the_list() -> None:
    assert ELSEWHERE.keys() <= NAMED.keys()


@pytest.mark.parametrize(("name", "seed", "said"), SHOWN)
def test_a_seed_shows_the_bug(name: str, seed: int, said: str) -> None:
    scenario = draw(seed)
    with planted(NAMED[name]):
        problems = problems_of(scenario)
    assert problems, f"seed {seed} does not show bug {name} any more: {NAMED[name].says}"
    assert problems[0].startswith(said)
    assert problems_of(scenario) == []
