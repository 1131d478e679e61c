"""docs/api.md is the reference of the public names: all of them, as they are, and no other."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mend
from mend import MendConfig, Runtime, SlowRack, Status, TokenLedger, errors

PAGE = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: value for name in mend.__all__ if inspect.isfunction(value := getattr(mend, name))
}
METHODS: dict[str, Callable[..., Any]] = {
    f"Runtime.{name}": value
    for name, value in vars(Runtime).items()
    if inspect.isfunction(value) and not name.startswith("_")
}
CALLS = FUNCTIONS | METHODS


def sections() -> dict[str, str]:
    """Heading -> what is below it, up to the next heading of any depth."""
    parts = re.split(r"^#+ (.+)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(section: str) -> list[list[str]]:
    """Cells of the tables' rows whose first cell is a `name`."""
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def said(section: str) -> ast.FunctionDef:
    """The signature that a section shows."""
    blocks = re.findall(r"```python\n(def .*?)```", section, re.DOTALL)
    assert len(blocks) == 1, section[:80]
    (function,) = ast.parse(blocks[0]).body
    assert isinstance(function, ast.FunctionDef)
    return function


def of_page(function: ast.FunctionDef) -> Iterator[tuple[str, str, str]]:
    """(kind, name, default) of each parameter; no default: an empty string."""
    given = function.args
    defaults: list[ast.expr | None] = [*given.defaults]
    missing: list[ast.expr | None] = [None] * (len(given.args) - len(defaults))
    for parameter, default in zip(given.args, missing + defaults, strict=True):
        yield "plain", parameter.arg, ast.unparse(default) if default else ""
    for parameter, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield "keyword", parameter.arg, ast.unparse(default) if default else ""
    if given.kwarg:
        yield "rest", given.kwarg.arg, ""


def of_code(function: Callable[..., Any]) -> Iterator[tuple[str, str, str]]:
    kinds = {
        inspect.Parameter.POSITIONAL_OR_KEYWORD: "plain",
        inspect.Parameter.KEYWORD_ONLY: "keyword",
        inspect.Parameter.VAR_KEYWORD: "rest",
    }
    for name, parameter in inspect.signature(function).parameters.items():
        default = parameter.default
        shown = "" if default is inspect.Parameter.empty else repr(default)
        yield kinds[parameter.kind], name, shown


def test_every_public_name_has_its_place() -> None:
    headings = sections()
    for name in set(mend.__all__) - {"__version__", "MendError"}:
        assert name in headings, name
    assert "| `__version__` |" in PAGE
    assert "| `MendError` |" in headings["Errors"]


@pytest.mark.parametrize("name", CALLS)
def test_signatures_are_those_of_the_code(name: str) -> None:
    section = sections()[name]
    function = said(section)
    assert function.name == name.rpartition(".")[2]
    assert list(of_page(function)) == list(of_code(CALLS[name]))


@pytest.mark.parametrize("name", CALLS)
def test_every_parameter_is_explained_and_every_call_shown(name: str) -> None:
    prose = re.sub(r"```.*?```", "", sections()[name], flags=re.DOTALL)
    for _, parameter, _ in of_code(CALLS[name]):
        assert parameter == "self" or f"`{parameter}`" in prose, parameter
    blocks = re.findall(r"```python\n(.*?)```", sections()[name], re.DOTALL)
    assert any(name.rpartition(".")[2] in block for block in blocks[1:]), "an example"


def test_api_page_documents_exactly_the_existing_calls() -> None:
    told = {name for name, body in sections().items() if "```python\ndef " in body}
    assert told == set(CALLS)


@pytest.mark.parametrize("shown", [Status, SlowRack, TokenLedger], ids=lambda shown: shown.__name__)
def test_fields_are_those_of_the_code(shown: type) -> None:
    told = [cells[0].strip("`") for cells in rows(sections()[shown.__name__])]
    assert told == [field.name for field in dataclasses.fields(shown)]


def test_properties_of_the_config_are_those_of_the_code() -> None:
    told = {cells[0].strip("`").removesuffix("()") for cells in rows(sections()["MendConfig"])}
    own = vars(MendConfig).items()
    mine = {name for name, value in own if isinstance(value, property) or inspect.isfunction(value)}
    assert told == {name for name in mine if not name.startswith("_")}


def test_errors_are_those_of_the_code() -> None:
    classes = filter(inspect.isclass, vars(errors).values())
    found = {kind.__name__: kind for kind in classes if issubclass(kind, BaseException)}
    told = {cells[0].strip("`"): cells[1] for cells in rows(sections()["Errors"])}
    assert set(told) == set(found)
    for name, also in told.items():
        bases = [base.__name__ for base in found[name].__bases__ if base is not errors.MendError]
        assert also == ", ".join(bases), name
