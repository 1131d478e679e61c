"""The docs name only what exists: files, commands, settings, benchmarks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer

from mend.cli import app
from mend.config import describe

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
COMMANDS = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
FIELDS = {setting.field for setting in describe()}
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
OTHERS = {"CONFIG", "SERVICE_HOST", "QUORUM"}
"""Names the TOML file; two examples of names that are refused."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pages
def test_commands_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`mend ([a-z]+)[ `]", text):
        assert name in COMMANDS, f"{page.name}: mend {name}"
    for name in re.findall(r"`make ([a-z]+)`", text):
        assert name in TARGETS, f"{page.name}: make {name}"
    for name in re.findall(r"-m benchmarks\.([a-z_]+)", text):
        assert (ROOT / "benchmarks" / f"{name}.py").exists(), f"{page.name}: benchmarks.{name}"


@pages
def test_settings_exist(page: Path) -> None:
    for name in re.findall(r"\bMEND_([A-Z][A-Z_]*[A-Z])\b", page.read_text()):
        assert name in OTHERS or name.lower() in FIELDS, f"{page.name}: MEND_{name}"


@pages
def test_python_compiles(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        ast.parse(block)


def test_every_benchmark_is_on_the_page() -> None:
    listed = (ROOT / "docs" / "benchmarks.md").read_text()
    names = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    assert all(f"| `{name}` |" in listed for name in names), names
