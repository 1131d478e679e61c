"""Plants bugs in functions that are named, as changes of their syntax trees.

Neither a new format nor another place in the file breaks such a bug, and a name that is replaced
everywhere is replaced in it too. A function that is gone, or a piece of code that is not in it
exactly once, is an error that names both.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import mend

SOURCE = Path(mend.__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Edit:
    """`function`: a module and the name in it, as `consensus.proposer:Proposer.decide`. Modules are
    below mend, or have their whole name, as `mend_lab.sim.world`.
    `old`: an expression or statements that are in it exactly once; `new` takes their place."""

    function: str
    old: str
    new: str

    @property
    def file(self) -> str:
        """Relative to src/mend."""
        path = self.function.partition(":")[0].replace(".", "/") + ".py"
        return f"../{path}" if path.startswith("mend_lab/") else path

    @property
    def module(self) -> str:
        named = self.function.partition(":")[0]
        return named if named.startswith("mend_lab.") else f"mend.{named}"

    @property
    def name(self) -> str:
        return self.function.partition(":")[2]


@functools.cache
def text_of(file: str) -> str:
    """Of the first time that somebody asks, so that a long run does not mix what runs with what is
    being written meanwhile."""
    return (SOURCE / file).read_text(encoding="utf-8")


def edited(edits: Sequence[Edit]) -> ast.Module:
    """The module with all edits, which are of one file."""
    tree = ast.parse(text_of(edits[0].file))
    for edit in edits:
        _edit(tree, edit)
    return tree


def changes(edit: Edit) -> bool:
    """Whether it is another program; an edit that does not fit raises."""
    tree = ast.parse(text_of(edit.file))
    before = ast.dump(_function(tree, edit))
    _edit(tree, edit)
    return ast.dump(_function(tree, edit)) != before


def _edit(tree: ast.Module, edit: Edit) -> None:
    function, old, new = _function(tree, edit), _statements(edit.old), _statements(edit.new)
    expression = all(len(piece) == 1 and isinstance(piece[0], ast.Expr) for piece in (old, new))
    places = list(_expressions(function, old[0]) if expression else _runs(function, old))
    assert len(places) == 1, f"{edit.old!r} is {len(places)} times in {edit.function}, not once"
    (holder, field, index) = places[0]
    if expression:
        value = new[0].value
        if index is None:
            setattr(holder, field, value)
        else:
            getattr(holder, field)[index] = value
        return
    body = getattr(holder, field)
    body[index : index + len(old)] = new
    if not body and field == "body":
        body += _statements("pass")


def _function(tree: ast.Module, edit: Edit) -> Function:
    """A method is looked for in its class."""
    nodes: list[ast.AST] = [tree]
    for name in edit.name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        nodes = [
            each
            for node in nodes
            for each in ast.iter_child_nodes(node)
            if isinstance(each, kinds) and each.name == name
        ]
    (found,) = nodes or [None]
    assert isinstance(found, Function), f"there is no function {edit.function} (any more)"
    return found


def _statements(text: str) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(text)).body


def _expressions(function: Function, wanted: Any) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where an expression stands: its parent, the field, the index in a list."""
    kind, dumped = type(wanted.value), ast.dump(wanted.value)
    for holder in ast.walk(function):
        for field, value in ast.iter_fields(holder):
            for index, each in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(each, kind) and ast.dump(each) == dumped:
                    yield holder, field, index if isinstance(value, list) else None


def _runs(function: Function, wanted: list[ast.stmt]) -> Iterator[tuple[ast.AST, str, Any]]:
    """Where statements stand one behind the other."""
    dumped = [ast.dump(each) for each in wanted]
    for holder in ast.walk(function):
        for field, value in ast.iter_fields(holder):
            if not (isinstance(value, list) and value and isinstance(value[0], ast.stmt)):
                continue
            there = [ast.dump(each) for each in value]
            for index in range(len(there) - len(dumped) + 1):
                if there[index : index + len(dumped)] == dumped:
                    yield holder, field, index


def codes(edits: Sequence[Edit]) -> Iterator[tuple[FunctionType, CodeType]]:
    """Every function that is edited, and its new code."""
    for file in dict.fromkeys(edit.file for edit in edits):
        mine = [edit for edit in edits if edit.file == file]
        module = importlib.import_module(mine[0].module)
        made = _made(tuple(mine))
        for name in dict.fromkeys(edit.name for edit in mine):
            found: Any = module
            for part in name.split("."):
                found = inspect.getattr_static(found, part)
            found = found.fget if isinstance(found, property) else found
            yield inspect.unwrap(getattr(found, "__func__", found)), made[name]


@functools.lru_cache(maxsize=4)
def _made(edits: tuple[Edit, ...]) -> dict[str, CodeType]:
    """By qualified name. A test that plants a bug has often asked for its codes before."""
    code = compile(edited(edits), edits[0].file, "exec")
    return {each.co_qualname: each for each in _codes(code)}


def _codes(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes(inner)


@contextmanager
def planted(edits: Sequence[Edit]) -> Iterator[None]:
    """The running code has the bugs; whoever imported these functions has them too."""
    before: list[tuple[FunctionType, CodeType]] = []
    try:
        for function, code in codes(edits):
            before.append((function, function.__code__))
            function.__code__ = code
        yield
    finally:
        for function, code in before:
            function.__code__ = code


def own_environment(**more: str) -> dict[str, str]:
    """For a run of pytest inside a test: it is no part of the run that the test belongs to."""
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "GATE_"))
    }
    return inherited | more
