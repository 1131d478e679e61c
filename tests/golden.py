"""Texts of errors and warnings, compared with golden.json of the folder of the test.

    with golden.raises(ConfigError):
        MendConfig(rack=2)

The file has the texts of a test by its name, in their order. `make golden ARGS=FOLDER` writes them
anew after a rewording; read its diff. For texts of mend alone: those of torch, zlib and others
depend on their versions.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).parent.parent
FILE = "golden.json"
WRITE = "GOLDEN"
"""Set: write the texts, do not compare."""

E = TypeVar("E", bound=BaseException)

FOLDERS = re.compile(rf"[^\s'\"]*/pytest-of-[^/]+/pytest-\d+/(popen-gw\d+/)?[^/\s'\"]+|{ROOT}")
"""They are others in every run, or on every machine."""

WRITING = bool(os.environ.get(WRITE))
given: list[str] = []
"""Texts that the running test has compared; tests/conftest.py empties it before each test."""

written = set[str]()
"""Tests whose texts this process has written."""


@contextmanager
def raises(kind: type[E]) -> Generator[pytest.ExceptionInfo[E]]:
    """pytest.raises, and the error has the golden text."""
    with pytest.raises(kind) as caught:
        yield caught
    compare(str(caught.value))


@contextmanager
def warns(kind: type[Warning]) -> Generator[pytest.WarningsRecorder]:
    """pytest.warns, and the warnings have the golden text."""
    with pytest.warns(kind) as caught:
        yield caught
    compare("\n".join(str(each.message) for each in caught if issubclass(each.category, kind)))


def compare(text: str) -> None:
    path, _, name = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0].partition("::")
    file, key = ROOT / path, f"{Path(path).name}::{name}"
    found = FOLDERS.sub("FOLDER", text)
    given.append(found)
    if WRITING:
        write(file.with_name(FILE), key)
        return
    kept = read(file.with_name(FILE)).get(key, [])
    golden = kept[len(given) - 1] if len(given) <= len(kept) else None
    assert found == golden, f"make golden ARGS={path} if it is meant to say: {found}"


@cache
def read(file: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(file.read_text()) if file.exists() else {}
    return found


def write(file: Path, key: str) -> None:
    """The texts of this test so far. Those of tests and parameters that are gone go, too."""
    texts, test = read(file), key.partition("[")[0]
    for each in list(texts):
        first = test not in written and each.partition("[")[0] == test
        if first or not is_there(file.parent, each):
            del texts[each]
    written.add(test)
    texts[key] = list(given)
    file.write_text(json.dumps(dict(sorted(texts.items())), indent=1, ensure_ascii=False) + "\n")


def is_there(folder: Path, key: str) -> bool:
    name, _, test = key.partition("::")
    file = folder / name
    return file.exists() and f"def {test.partition('[')[0]}(" in file.read_text()
