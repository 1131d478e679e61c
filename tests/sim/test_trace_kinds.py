"""A trace hashes numbers of kinds; tests/trace_kinds.py must have each kind once, and for ever."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mend.coordination import ladder
from mend.coordination.events import Note
from tests.trace_kinds import GONE, KINDS, WORDS, numbered

SOURCE = Path(__file__).parent.parent.parent / "src"
ROOMS = ("coordination", "engine")
"""What a simulated process runs."""

CALLS = frozenset({"note", "_note", Note.__name__})


def kinds_in(path: Path) -> Iterator[str]:
    """The kinds that a module notes: as literals, as one of two, or by names of constants."""
    module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or len(node.args) != 2:
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if called in CALLS:
            yield from _kinds_of(node.args[0], module)


def _kinds_of(node: ast.expr, module: str) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(kind)):
            yield kind
        case ast.IfExp(body=one, orelse=other):
            yield from _kinds_of(one, module)
            yield from _kinds_of(other, module)
        case ast.Name(id=name) if name.isupper():
            yield getattr(importlib.import_module(module), name)
        case ast.Call(func=ast.Name(id="kind_of")):
            yield from (ladder.LEFT, ladder.AWAITED_AGAIN, ladder.BATCH, ladder.PUT_OUT)
        case ast.Name(id="kind"):
            pass  # one that was noted elsewhere is passed on
        case _:
            raise AssertionError(f"{module}: what kind is {ast.unparse(node)}?")


def test_every_kind_that_a_simulated_process_may_note_has_a_number() -> None:
    paths = [path for room in ROOMS for path in (SOURCE / "mend" / room).rglob("*.py")]
    found = {kind for path in paths for kind in kinds_in(path)}
    assert found == KINDS.keys(), (found - KINDS.keys(), KINDS.keys() - found)


def test_numbers_are_used_once() -> None:
    numbers = [number for number, _ in KINDS.values()]
    assert sorted([*numbers, *GONE]) == list(range(1, len(numbers) + len(GONE) + 1))
    assert len(set(WORDS.values())) == len(WORDS)
    for kind, (_, places) in KINDS.items():
        named = [name for name in places if name]
        assert len(set(named)) == len(named), kind


def test_names_and_sentences_are_not_hashed() -> None:
    about = {"step": 4, "fragment": 1, "version": 2, "fate": "named", "seq": 3, "why": "it was"}
    assert numbered("applied", about) == (37, (1, 4), (2, 1), (3, 2), (4, 1), (5, 3))
    members = [{"rack": 0, "seq": 1}, {"rack": 1, "seq": 5}]
    commit = {"version": 7, "reason": "all in", "digests": ["ab"], "members": members}
    renamed = {**commit, "reason": "2 of 2", "members": [{"of": 0, "n": 1}, {"of": 1, "n": 5}]}
    assert numbered("commit", commit) == (34, (2, 7), (3, ((0, 1), (1, 5))))
    assert numbered("commit", renamed) == numbered("commit", commit)


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        ("unheard-of", {}, "give 'unheard-of' the next number"),
        ("applied", {"weight": 3}, "give 'weight' of 'applied' a place"),
        ("applied", {"fate": "lost"}, "lost"),
    ],
)
def test_what_has_no_number_is_refused(kind: str, fields: dict[str, object], named: str) -> None:
    """Else a trace would be silent about it."""
    with pytest.raises(KeyError, match=named):
        numbered(kind, fields)
