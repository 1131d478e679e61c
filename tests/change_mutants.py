"""Mutants made from a change: small edits of the functions that it touches.

    python -m tests.mutants --since                          what differs from the main branch
    python -m tests.mutants --since HEAD~3 --most 40
    python -m tests.mutants --of transport.socks config.kinds

Each mutant runs the tests that should see it: the unit tests of its module by their path, and those
that import it; if these pass, those of the modules that import it; where there are neither, the
simulator. A survivor is printed with its diff: a test is missing, or the edit changes nothing that
matters.
"""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import IO

from tests.gate import changes
from tests.planting import own_environment
from tests.small_edits import SmallEdit, choose, edits_of

ROOT = Path(__file__).parent.parent
PACKAGE = "src/mend"
UNIT = ("tests/unit", "tests/conformance", "tests/numerics")
SIMULATOR = ("tests/sim/test_seeds.py",)
IMPORTERS_MAX = 8
"""Test files of one module besides its own, those about the fewest modules first."""

NEEDED = ("src", "tests", "benchmarks", "examples", "docs", "pyproject.toml", "CHANGELOG.md",
          "README.md", "Makefile", "constraints.txt")  # fmt: skip
CLEAN_LIMIT_S = 600.0
LIMIT_S, LIMIT_RUNS = 20.0, 4
"""A mutant has so many seconds, and so many times what the tests take without it."""

PARALLEL = 2


@dataclass(frozen=True, slots=True)
class Result:
    edit: SmallEdit
    caught: bool
    how: str
    seconds: float


# What has changed, and which tests should see it


def module_of(file: str) -> str:
    """src/mend/transport/zmq.py -> mend.transport.zmq."""
    return file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def imports_of(file: str) -> frozenset[str]:
    """Modules of mend that a file imports; of `from mend.a import b` both mend.a and mend.a.b."""
    found = set[str]()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(name for name in found if name.startswith("mend."))


@cache
def files(*folders: str) -> tuple[str, ...]:
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return tuple(sorted(str(path.relative_to(ROOT)) for path in found))


def find_tests(file: str) -> list[tuple[str, ...]]:
    """Arguments of pytest; the second ones are run where the first ones pass."""
    direct, module = _direct_tests(file), module_of(file)
    users = [each for each in files(PACKAGE) if module in imports_of(each)]
    near = dict.fromkeys(test for user in users for test in _direct_tests(user))
    wider = tuple(test for test in near if test not in direct)[:IMPORTERS_MAX]
    return [tests for tests in (direct, wider) if tests] or [SIMULATOR]


def _direct_tests(file: str) -> tuple[str, ...]:
    module, path = module_of(file), Path(file).relative_to(PACKAGE)
    tests = [each for each in files(*UNIT) if Path(each).name.startswith("test_")]
    rooms = (path.parent, *path.parent.parents)  # those of engine have one folder of tests
    near = [str(Path("tests/unit", room, f"test_{path.stem}.py")) for room in rooms]
    own = [each for each in near if each in tests][:1]
    importers = [each for each in tests if module in imports_of(each) and each not in own]
    importers.sort(key=lambda each: (len(imports_of(each)), each))
    return (*own, *importers[:IMPORTERS_MAX])


# Running


def copy_tree(folder: Path, *left_out: str) -> None:
    """What tests need of the tree, without the files and folders of these names."""
    for name in NEEDED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns(*left_out))
        else:
            shutil.copy(source, folder / name)


class Server:
    """A copy of the tree, and the process that runs tests in it."""

    def __init__(self, folder: Path) -> None:
        copy_tree(folder, "__pycache__")
        command = [sys.executable, "-P", str(folder / "tests/mutant_server.py"), str(folder)]
        self.process = subprocess.Popen(
            command, env=own_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self, file: str, text: str | None, tests: Sequence[str], limit_s: float
    ) -> tuple[int | None, str, float]:
        """Exit status of pytest (None: beyond the limit), first failure, seconds. `text` None: the
        file as it is."""
        job = {"file": file, "text": text, "tests": tests, "limit_s": limit_s}
        asks, answers = _pipes(self.process)
        print(json.dumps(job), file=asks, flush=True)
        line = answers.readline()
        if not line:
            raise RuntimeError(f"the process that runs the tests ended: {self.process.wait()}")
        status, how, seconds = json.loads(line)
        return status, how, seconds


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("a server has two pipes")
    return process.stdin, process.stdout


@contextmanager
def servers(count: int) -> Iterator[SimpleQueue[Server]]:
    with tempfile.TemporaryDirectory(prefix="mend-mutants-") as folder:
        made = [Server(Path(folder) / str(number)) for number in range(count)]
        idle = SimpleQueue[Server]()
        for server in made:
            idle.put(server)
        try:
            yield idle
        finally:
            for server in made:
                asks, answers = _pipes(server.process)
                asks.close()
                server.process.wait()
                answers.close()


class Hunt:
    """Runs mutants and prints each as it ends. Of the tests that pass with no mutant; those that
    do not prove nothing, and their mutants are left out."""

    def __init__(self, edits: Sequence[SmallEdit], minutes: float) -> None:
        self.edits, self.sources = edits, {edit.file: _read(edit.file) for edit in edits}
        self.deadline_s = time.monotonic() + 60 * minutes
        self.limits: dict[tuple[str, tuple[str, ...]], float | None] = {}
        self.red: list[str] = []
        self.results: list[Result] = []
        self.begun_s = time.monotonic()

    def run(self, parallel: int) -> None:
        with servers(parallel) as idle, ThreadPoolExecutor(parallel) as pool:
            self.idle = idle
            for _ in pool.map(self.try_edit, self.edits):
                pass

    def limit_s(self, server: Server, file: str, tests: tuple[str, ...]) -> float | None:
        """Of a mutant; None: the tests fail without one. Run once, when they are needed first."""
        if (file, tests) not in self.limits:
            status, how, seconds = server.run(file, None, tests, CLEAN_LIMIT_S)
            print(f"{seconds:5.1f} s without a mutant, {file}: {' '.join(tests)}", flush=True)
            self.limits[(file, tests)] = LIMIT_S + LIMIT_RUNS * seconds if status == 0 else None
            self.red += [f"{file}: {how}"] if status != 0 else []
        return self.limits[(file, tests)]

    def try_edit(self, edit: SmallEdit) -> None:
        if time.monotonic() > self.deadline_s:
            return
        server, text = self.idle.get(), edit.applied(self.sources[edit.file])
        status, how, taken_s, tried = 0, "", 0.0, False
        for tests in find_tests(edit.file):
            if (limit_s := self.limit_s(server, edit.file, tests)) is None:
                continue
            status, how, seconds = server.run(edit.file, text, tests, limit_s)
            tried, taken_s = True, taken_s + seconds
            if status != 0:
                break
        self.idle.put(server)
        if tried:
            how = f"no end within {seconds:.0f} s" if status is None else how
            self.results.append(Result(edit, status != 0, how, taken_s))
            self.say(self.results[-1])

    def say(self, result: Result) -> None:
        done = len(self.results)
        left_s = (time.monotonic() - self.begun_s) / done * (len(self.edits) - done)
        where = f"{result.edit.file.removeprefix(PACKAGE + '/')}:{result.edit.line}"
        verdict = "caught" if result.caught else "SURVIVED"
        counted = f"{done}/{len(self.edits)}, {left_s / 60:.1f} min left"
        what = f"{result.edit.function}: {result.edit.kind}"
        print(f"{verdict:8} {result.seconds:5.1f} s  [{counted}]  {where} {what}", flush=True)
        if result.caught:
            print(f"{'':18}{result.how[:150]}", flush=True)


def hunt(edits: Sequence[SmallEdit], minutes: float, parallel: int) -> int:
    """The exit status: 1 with a survivor, or tests that fail with no mutant."""
    made = Hunt(edits, minutes)
    made.run(parallel)
    survivors = [result.edit for result in made.results if not result.caught]
    survivors.sort(key=lambda edit: (edit.file, edit.start))
    for edit in survivors:
        print(f"\nSURVIVED {edit.file}:{edit.line} {edit.function}: {edit.kind}")
        print(edit.diff(made.sources[edit.file]))
    for red in made.red:
        print(f"\nthe tests fail without a mutant, so they prove nothing: {red}")
    print()
    for file in dict.fromkeys(edit.file for edit in edits):
        mine = [result for result in made.results if result.edit.file == file]
        caught = sum(result.caught for result in mine)
        print(f"{caught:3} of {len(mine):3} caught  {file}")
    left = len(edits) - len(made.results)
    late = f", {left} were not tried" if left else ""
    print(f"{len(made.results) - len(survivors)} of {len(made.results)} mutants were caught{late}")
    return 1 if survivors or made.red else 0


def edits_since(since: str | None, most: int) -> list[SmallEdit]:
    """`since` None: the base that tests/gate/shards.py finds."""
    since = since or changes.base()
    changed = changes.changed_lines(since, PACKAGE)
    if changed is None:
        raise SystemExit(f"git knows no {since!r}")
    return _chosen(((file, lines) for file, lines in sorted(changed.items())), most)


def edits_in(modules: Iterable[str], most: int) -> list[SmallEdit]:
    """`most` of each module, named as `transport.socks`."""
    made = [f"{PACKAGE}/{module.replace('.', '/')}" for module in modules]
    paths = [f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py" for path in made]
    return [edit for path in paths for edit in _chosen([(path, None)], most)]


def _chosen(files: Iterable[tuple[str, set[int] | None]], most: int) -> list[SmallEdit]:
    there = [(file, lines) for file, lines in files if (ROOT / file).exists()]
    found = [edit for file, lines in there for edit in edits_of(_read(file), file, lines)]
    return choose(found, most, _read)


@cache
def _read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")
