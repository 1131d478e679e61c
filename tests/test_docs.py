"""The docs name only what exists: files, headings, commands, settings, events, limits."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

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
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
COMMANDS = {
    **typer.main.get_command(app).commands,
    "bench": typer.main.get_command(bench_app),
}
LAB_COMMANDS = typer.main.get_command(lab_app).commands
DEFAULTS = {setting.field: setting.default for setting in describe()}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
OTHERS = {"SERVICE_HOST", "MERGE_MIN"} | {name.removeprefix("MEND_") for name in RESERVED}
"""What has a meaning of its own; two examples of names that are refused."""

CODE = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
LOGGED = set(re.findall(r"mend %s ([a-z-]+) ", CODE)) | {"rack-mesh"}
"""Lines that go to the log alone."""
NAMING = ("src", "tests", "benchmarks", "examples")
"""Folders whose files may name a page."""


def messages() -> Iterator[str]:
    """Every string of the source, with a blank for what is put in."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    each.value if isinstance(each, ast.Constant) else "" for each in node.values
                )
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


MESSAGES = "\n".join(messages())
PICTURES = sorted(path for path in (ROOT / "docs" / "img").iterdir())
PICTURE_BYTES_MAX = 300_000

USER_PAGES = sorted((ROOT / "docs").glob("*.md"))
USER_WORDS_MAX = 22_000
DIALECT = (
    "told", "whoever", "nobody else", "somebody", "of use", "comes? to", "came to", "is said",
    "are said", "so long", "is no number", "are no numbers", "mended", "without a word", "for good",
    "would believe", "what there is", "on (?:his|her) side",
)  # fmt: skip
"""Phrases that neither the source uses, nor a page outside of code and quoted messages."""
RECORDS = ("DECISIONS.md", "LOG.md")
"""They keep the words of their time."""

Check = Callable[[Path], None]


def for_each(paths: Sequence[Path]) -> Callable[[Check], Callable[[], None]]:
    """A test of all of them at once, which names each that fails."""

    def wrap(check: Check) -> Callable[[], None]:
        def test() -> None:
            failed = list[str]()
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    failed.append(f"{path.relative_to(ROOT)}: {error}")
            assert not failed, "\n".join(failed)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return wrap


pages = for_each(PAGES)


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
        assert linked.exists(), f"links to {target}"
        assert not heading or heading in anchors(linked), f"{target}#{heading}"


def test_pages_that_the_source_names_exist() -> None:
    """And the headings, where a string ends with one: `page, Heading`."""
    for path in [p for folder in NAMING for p in (ROOT / folder).rglob("*.py")]:
        for page in re.findall(r"\bdocs/[\w/]+\.md", path.read_text()):
            assert (ROOT / page).exists(), f"{path.relative_to(ROOT)}: {page}"
    named = re.findall(r"(docs/[\w/]+\.md), ([A-Z][\w ]+)[\")]", CODE)
    assert len(named) >= 7
    for page, heading in named:
        found = heading.lower().replace(" ", "-")
        assert any(found in each for each in anchors(ROOT / page)), f"{page}, {heading}"


def test_messages_that_the_pages_quote_are_in_the_source() -> None:
    """First cells of tables on troubleshooting.md; a number, a name or a rack stands for any
    other."""
    table = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    quoted = [text for cell in table for text in re.findall(r"`([^`]+ [^`]+ [^`]+)`", cell)]
    assert len(quoted) >= 20
    for text in quoted:
        pieces = [piece.strip(" :;") for piece in re.split(r"(?:rack )?\d+|\.\.\.|'\w+'", text)]
        for piece in [piece for piece in pieces if " " in piece]:
            assert piece in MESSAGES, f"{text!r}: {piece!r} is in no message"


@pages
def test_commands_exist_with_their_options(page: Path) -> None:
    for line in commands(page):
        program, first, *rest = line.split("#")[0].split()
        known_commands = COMMANDS
        if rest[:1] == ["mend_lab"] and len(rest) > 1:  # python -m mend_lab COMMAND
            program, first, known_commands = "mend", rest[1], LAB_COMMANDS
            rest = rest[2:]
        if program == "make":
            assert first in TARGETS, f"{line}"
        elif program == "mend" and first != "witness":  # the witness's lines begin like that
            assert first in known_commands, f"{line}"
            command = known_commands[first]
            if rest and (subcommands := getattr(command, "commands", {})):
                assert rest[0] in subcommands, f"{line}"
                command = subcommands[rest.pop(0)]
            own = re.split(r"\S+\.py| -m | -- ", " ".join(rest))[0]  # the rest is the script's
            options = {
                name
                for option in command.params
                for name in (*option.opts, *option.secondary_opts)  # --witness, --no-witness
            }
            for option in re.findall(r"(?<!\S)--[a-z-]+", own):
                assert option in options, f"{line}"
        elif rest and re.match(r"(benchmarks|tests)\.[a-z]", rest[0]):
            module = ROOT / (rest[0].replace(".", "/") + ".py")
            assert module.exists(), f"{line}"
            known = module.read_text() + "--help --save"
            if "OPTIONS = {" in known:
                table = importlib.import_module(rest[0]).OPTIONS
                known += " ".join(f"--{name.replace('_', '-')}" for name in table)
            for option in re.findall(r"(?<!\S)--[a-z-]+", line):
                assert option in known, f"{line}"


@pages
def test_settings_exist(page: Path) -> None:
    for name in re.findall(r"\bMEND_([A-Z][A-Z_]*[A-Z])\b", page.read_text()):
        assert name in OTHERS or name.lower() in DEFAULTS, f"MEND_{name}"


@pages
def test_fields_of_the_status_exist(page: Path) -> None:
    known = {field.name for field in dataclasses.fields(Status)}
    named = set(re.findall(r"status\(\)\.(\w+)", page.read_text()))
    assert named <= known, f"{named - known}"


@pages
def test_names_of_the_package_exist(page: Path) -> None:
    """`mend.name` and `runtime.call()`, in code and in `ticks`."""
    for name in re.findall(r"(?<![\w./-])mend\.([A-Za-z_]\w*)", page.read_text()):
        modules = (SOURCE / f"{name}.py").exists() or (SOURCE / name).is_dir()
        assert name in mend.__all__ or modules or name == "toml", f"mend.{name}"
    for name in re.findall(r"\bruntime\.(\w+)\(", page.read_text()):
        assert hasattr(mend.Runtime, name), f"runtime.{name}()"


@pages
def test_lines_of_the_log_have_kinds_that_exist(page: Path) -> None:
    """`mend rack=0 rank=0 KIND ...` in code blocks."""
    for kind in re.findall(r"^mend rack=\d+ rank=\d+ ([a-z-]+)", page.read_text(), re.MULTILINE):
        assert kind in KINDS.keys() | LOGGED, f"{kind}"


def test_every_page_is_reachable_from_the_index() -> None:
    reached, ahead = set(), {ROOT / "docs" / "README.md"}
    while ahead:
        page = ahead.pop()
        reached.add(page)
        links = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text())
        ahead |= {(page.parent / link).resolve() for link in links} & {*PAGES} - reached
    assert {*PAGES} <= reached, {*PAGES} - reached


def test_every_user_page_is_in_the_index_and_on_the_site() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert all(page.name == "README.md" or f"]({page.name})" in index for page in USER_PAGES)
    site = (ROOT / "mkdocs.yml").read_text()
    assert not [page.name for page in USER_PAGES if f" {page.name}\n" not in site]


def test_every_command_and_option_is_on_a_user_page() -> None:
    text = "\n".join(page.read_text() for page in USER_PAGES)
    for name, command in COMMANDS.items():
        assert f"mend {name}" in text or f"`{name}`" in text, name
        if name == "bench":  # of a clone
            continue
        for each in getattr(command, "commands", {"": command}).values():
            for option in {o for p in each.params if p.name != "help" for o in p.opts[:1]}:
                negated = option.replace("--", "--no-")
                assert not option.startswith("--") or option in text or negated in text, option


def test_user_pages_stay_short() -> None:
    """Tables and code count; a bar or a dash alone is no word."""
    words = {
        page.name: sum(bool(re.search(r"\w", each)) for each in page.read_text().split())
        for page in USER_PAGES
    }
    assert sum(words.values()) <= USER_WORDS_MAX, (sum(words.values()), words)


@for_each(PICTURES)
def test_pictures_are_used_small_and_whole(picture: Path) -> None:
    assert any(f"img/{picture.name})" in page.read_text() for page in PAGES), "no page shows it"
    assert picture.stat().st_size <= PICTURE_BYTES_MAX
    if picture.suffix == ".svg":
        assert ElementTree.parse(picture).getroot().tag.endswith("}svg")


@pages
def test_source_files_exist(page: Path) -> None:
    """`room/file.py`, as the pages name modules of src/mend and src/mend_lab."""
    roots = (SOURCE, SOURCE.with_name("mend_lab"), ROOT)
    for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", page.read_text()):
        assert any((root / name).exists() for root in roots), f"{name}"


@for_each([page for page in PAGES if page.name not in RECORDS])
def test_prose_has_no_dialect(page: Path) -> None:
    prose = re.sub(r"^```.*?^```|`[^`\n]*`|\"[^\"\n]*\"", "", page.read_text(), flags=re.S | re.M)
    found = re.findall(rf"\b(?:{'|'.join(DIALECT)})\b[^\n]*", prose, re.IGNORECASE)
    assert not found, found


@for_each(sorted((ROOT / "src").rglob("*.py")))
def test_source_has_no_dialect(path: Path) -> None:
    found = re.findall(rf"\b(?:{'|'.join(DIALECT)})\b[^\n]*", path.read_text(), re.IGNORECASE)
    assert not found, found


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
    listed = (ROOT / "docs" / "internals" / "benchmarks.md").read_text()
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
    rows = re.findall(row, (ROOT / "docs" / "internals" / "protocol.md").read_text(), re.MULTILINE)
    assert len(rows) >= 15
    for file, name, value in rows:
        line = f"\n{name} = {value}\n"
        assert line in (SOURCE / file).read_text(), f"{file}: not {line.strip()}"


def test_events_page_has_every_event_that_is_shown_and_no_other() -> None:
    page = (ROOT / "docs" / "events.md").read_text()
    _, _, tables = page.partition("<!-- table: begin -->")
    rows = re.findall(r"^\| `([a-z-]+)` \|", tables, re.MULTILINE)
    others = re.findall(r"`([a-z-]+)`", tables.rpartition("## ")[2])
    assert sorted([*rows, *others]) == sorted(kind for kind, made in KINDS.items() if made.loud)
