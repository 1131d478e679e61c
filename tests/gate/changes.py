"""What a change touches: its rooms, its test files, and the names of what it edits."""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("src", "benchmarks", "examples", "tests/gate")


def git(*arguments: str) -> str | None:
    """The output, or None if git is missing or the command fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def base() -> str:
    """The commit that the change starts from: where it left the main branch, or, on that branch,
    the commit before. GATE_BASE overrides it."""
    if given := os.environ.get("GATE_BASE"):
        return given
    head = git("rev-parse", "HEAD")
    for main in ("origin/main", "main"):
        fork = git("merge-base", "HEAD", main)
        if fork is not None and fork != head:
            return fork
    return "HEAD^" if git("rev-parse", "--verify", "--quiet", "HEAD^") else "HEAD"


def changed_paths(since: str) -> list[str]:
    texts = [git("diff", "--name-only", since), git("ls-files", "--others", "--exclude-standard")]
    return [path for text in texts for path in (text or "").splitlines()]


def rooms_and_tests(paths: list[str]) -> frozenset[str]:
    """Rooms and test files among changed paths."""
    parts = [path.split("/") for path in paths]
    inside = {part[2].removesuffix(".py") for part in parts if part[:2] == ["src", "mend"]}
    code = {part[part[0] == "src"] for part in parts if part[-1].endswith(".py")}
    beside = code & {"benchmarks", "examples", "mend_lab"}
    beside |= {"gate"} if any(path.startswith("tests/gate/") for path in paths) else set()
    return frozenset(inside | beside | {path for path in paths if path.startswith("tests/")})


def changed_lines(since: str, *folders: str) -> dict[str, set[int] | None] | None:
    """Python file -> its lines that are new or next to deleted ones; None: all. None in place of
    the whole: git does not know `since`."""
    changed: dict[str, set[int] | None] = {}
    lines = set[int]()
    text = git("diff", "-U0", "--no-color", "--relative", since, "--", *folders)
    if text is None:
        return None
    for line in text.splitlines():
        if line.startswith("+++ "):
            lines = set()  # of other files than Python's, too, whose lines follow
            if line.startswith("+++ b/") and line.endswith(".py"):
                changed[line[len("+++ b/") :]] = lines
        elif line.startswith("@@"):
            first, _, count = line.split()[2].removeprefix("+").partition(",")
            lines.update(range(int(first), int(first) + max(1, int(count or 1))))
    new = git("ls-files", "--others", "--exclude-standard", "--", *folders) or ""
    return changed | dict.fromkeys(file for file in new.splitlines() if file.endswith(".py"))


def changed_names(since: str) -> frozenset[str]:
    """Modules, and the classes and functions in them, that differ from `since`, without paths."""
    found = set[str]()
    for file, lines in (changed_lines(since, *CODE) or {}).items():
        path = ROOT / file
        found.add(path.parent.name if path.stem == "__init__" else path.stem)
        found.update(_names_at(ast.parse(path.read_text(encoding="utf-8")), lines))
    return frozenset(found)


def _names_at(module: ast.Module, lines: set[int] | None) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            own = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if lines is None or not lines.isdisjoint(own):
                yield node.name
