"""Edits find their place by structure, and say so when there is none."""

from __future__ import annotations

import ast

import pytest

from mend.consensus.proposer import Proposer
from mend.consensus.quorum import quorum
from mend.types import Member
from tests.planting import Edit, changes, edited, planted

ONE, TWO = Member(0, 1), Member(1, 1)
TIE = "bool(voters) and min(voters) in counted"


def test_a_bug_is_there_for_a_while_and_for_whoever_has_imported_the_function() -> None:
    assert not quorum({TWO}, {ONE, TWO})
    with planted([Edit("consensus.quorum:quorum", TIE, "bool(counted)")]):
        assert quorum({TWO}, {ONE, TWO})
    assert not quorum({TWO}, {ONE, TWO})


def test_a_property_and_statements_are_found_too() -> None:
    names = Proposer.__dict__["open"].fget.__code__.co_names
    with planted([Edit("consensus.proposer:Proposer.open", "self.opening", "0")]):
        assert Proposer.__dict__["open"].fget.__code__.co_names != names
    assert Proposer.__dict__["open"].fget.__code__.co_names == names
    refusal = Edit(
        "consensus.acceptor:Acceptor.append", "if ballot < self.promised:\n    return False", ""
    )
    assert changes(refusal)


def test_neither_format_nor_indentation_matters() -> None:
    written = Edit("consensus.quorum:quorum", TIE, "bool(counted)")
    otherwise = Edit(
        "consensus.quorum:quorum", "(bool( voters )\n  and min(voters)in(counted))", "bool(counted)"
    )
    assert ast.dump(edited([written])) == ast.dump(edited([otherwise]))


@pytest.mark.parametrize(
    ("function", "old", "said"),
    [
        ("consensus.quorum:majority", TIE, "no function consensus.quorum:majority"),
        ("consensus.quorum:quorum", "min(voters) in votes", "is 0 times in consensus.quorum"),
        ("consensus.quorum:quorum", "counted", "is 2 times in consensus.quorum:quorum"),
    ],
)
def test_an_edit_that_does_not_fit_says_where(function: str, old: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        changes(Edit(function, old, "True"))


def test_an_edit_that_changes_nothing_is_none() -> None:
    assert not changes(Edit("consensus.quorum:quorum", TIE, f"({TIE})"))
