"""The docs name only what exists: files, headings, commands, settings, events, limits."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer

import mend
from benchmarks._commands import bench_app
from mend.config import describe
from mend.config.sources import RESERVED
from mend.events.lines import KINDS
from mend.status.status import Status
from mend.tools import app
from mend_lab.commands import app as lab_app

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "mend"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
COMMANDS = {
    **typer.main.get_command(app).commands,  # type: ignore[attr-defined]
    "bench": typer.main.get_command(bench_app),
}
LAB_COMMANDS = typer.main.get_command(lab_app).commands  # type: ignore[attr-defined]
DEFAULTS = {setting.field: setting.default for setting in describe()}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
OTHERS = {"SERVICE_HOST", "QUORUM"} | {name.removeprefix("MEND_") for name in RESERVED}
"""What has a meaning of its own; two examples of names that are refused."""

CODE = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
LOGGED = set(re.findall(r"mend %s ([a-z-]+) ", CODE)) | {"rack-mesh"}
"""Lines that go to the log alone."""
PICTURES = sorted(path for path in (ROOT / "docs" / "img").iterdir())
PICTURE_BYTES_MAX = 300_000

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """What a link to a heading of this page may say behind #, as GitHub makes it."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def commands(page: Path) -> list[str]:
    """Command lines of `mend`, `make` and the benchmarks: in code blocks and in `ticks`."""
    text = page.read_text()
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", text)
    before = r"\s*(?:\$ )?(?:[A-Z_]+=\S* )*(?:sudo |ssh -t \S+ )?"  # what may stand before it
    lines = [re.sub(f"^{before}", "", line) for line in lines]
    return [line for line in lines if re.match(r"(mend [a-z]+( |$)|make [a-z]|python -m )", line)]


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not heading or heading in anchors(linked), f"{page.name}: {target}#{heading}"


@pages
def test_commands_exist_with_their_options(page: Path) -> None:
    for line in commands(page):
        program, first, *rest = line.split("#")[0].split()
        known_commands = COMMANDS
        if rest[:1] == ["mend_lab"] and len(rest) > 1:  # python -m mend_lab COMMAND
            program, first, known_commands = "mend", rest[1], LAB_COMMANDS
            rest = rest[2:]
        if program == "make":
            assert first in TARGETS, f"{page.name}: {line}"
        elif program == "mend" and first != "witness":  # the witness's lines begin like that
            assert first in known_commands, f"{page.name}: {line}"
            command = known_commands[first]
            if rest and (subcommands := getattr(command, "commands", {})):
                assert rest[0] in subcommands, f"{page.name}: {line}"
                command = subcommands[rest.pop(0)]
            own = re.split(r"\S+\.py| -m | -- ", " ".join(rest))[0]  # the rest is the script's
            options = {
                name
                for option in command.params
                for name in (*option.opts, *option.secondary_opts)  # --witness, --no-witness
            }
            for option in re.findall(r"(?<!\S)--[a-z-]+", own):
                assert option in options, f"{page.name}: {line}"
        elif rest and re.match(r"(benchmarks|tests)\.[a-z]", rest[0]):
            module = ROOT / (rest[0].replace(".", "/") + ".py")
            assert module.exists(), f"{page.name}: {line}"
            known = module.read_text() + "--help --save"
            if "OPTIONS = {" in known:
                table = importlib.import_module(rest[0]).OPTIONS
                known += " ".join(f"--{name.replace('_', '-')}" for name in table)
            for option in re.findall(r"(?<!\S)--[a-z-]+", line):
                assert option in known, f"{page.name}: {line}"


@pages
def test_settings_exist(page: Path) -> None:
    for name in re.findall(r"\bMEND_([A-Z][A-Z_]*[A-Z])\b", page.read_text()):
        assert name in OTHERS or name.lower() in DEFAULTS, f"{page.name}: MEND_{name}"


@pages
def test_fields_of_the_status_exist(page: Path) -> None:
    known = {field.name for field in dataclasses.fields(Status)}
    named = set(re.findall(r"status\(\)\.(\w+)", page.read_text()))
    assert named <= known, f"{page.name}: {named - known}"


@pages
def test_names_of_the_package_exist(page: Path) -> None:
    """`mend.name` and `runtime.call()`, in code and in `ticks`."""
    for name in re.findall(r"(?<![\w./-])mend\.([A-Za-z_]\w*)", page.read_text()):
        modules = (SOURCE / f"{name}.py").exists() or (SOURCE / name).is_dir()
        assert name in mend.__all__ or modules or name == "toml", f"{page.name}: mend.{name}"
    for name in re.findall(r"\bruntime\.(\w+)\(", page.read_text()):
        assert hasattr(mend.Runtime, name), f"{page.name}: runtime.{name}()"


@pages
def test_lines_of_the_log_have_kinds_that_exist(page: Path) -> None:
    """`mend rack=0 rank=0 KIND ...` in code blocks."""
    for kind in re.findall(r"^mend rack=\d+ rank=\d+ ([a-z-]+)", page.read_text(), re.MULTILINE):
        assert kind in KINDS.keys() | LOGGED, f"{page.name}: {kind}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page.name


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_pictures_are_used_small_and_whole(picture: Path) -> None:
    assert any(f"](img/{picture.name})" in page.read_text() for page in PAGES), "no page shows it"
    assert picture.stat().st_size <= PICTURE_BYTES_MAX
    if picture.suffix == ".svg":
        assert ElementTree.parse(picture).getroot().tag.endswith("}svg")


@pages
def test_source_files_exist(page: Path) -> None:
    """`room/file.py`, as the pages name modules of src/mend and src/mend_lab."""
    roots = (SOURCE, SOURCE.with_name("mend_lab"), ROOT)
    for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", page.read_text()):
        assert any((root / name).exists() for root in roots), f"{page.name}: {name}"


@pages
def test_python_compiles(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        ast.parse(block)


@pages
def test_no_table_is_torn_in_two(page: Path) -> None:
    """Rows behind an empty line, without a head of their own, are shown as plain text."""
    lines = page.read_text().splitlines()
    rows = [i for i in range(2, len(lines) - 1) if lines[i].startswith("|")]
    torn = [i + 1 for i in rows if not lines[i - 1] and not lines[i + 1].startswith(("|-", "| -"))]
    assert not torn, torn


def test_every_benchmark_is_on_the_page() -> None:
    listed = (ROOT / "docs" / "benchmarks.md").read_text()
    names = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    assert all(f"| `{name}` |" in listed for name in names), names


def test_defaults_in_the_readme_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) >= 5
    for field, default in rows:
        assert field in DEFAULTS, field
        if DEFAULTS[field] is not None:  # None: made from other settings, told in words
            assert default.lower() == str(DEFAULTS[field]).lower(), field


def test_limits_are_those_of_the_code() -> None:
    row = r"^\| `(\w+/\w+\.py)` \| `(\w+(?:, \w+)*)` \| `([^`]+)` \|"
    rows = re.findall(row, (ROOT / "docs" / "protocol.md").read_text(), re.MULTILINE)
    assert len(rows) >= 15
    for file, name, value in rows:
        line = f"\n{name} = {value}\n"
        assert line in (SOURCE / file).read_text(), f"{file}: not {line.strip()}"
