"""Texts are compared with the golden file, which is written on demand and names no test in vain."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import golden


def test_other_text_than_the_golden_one_fails_and_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(golden, "ROOT", tmp_path)
    monkeypatch.setattr(golden, "WRITING", False)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "test_it.py::test_a[x (y)] (call)")
    (tmp_path / "test_it.py").write_text("def test_a(x): ...\n")
    file = tmp_path / golden.FILE
    file.write_text('{"test_it.py::test_gone": ["b"]}')
    with pytest.raises(AssertionError, match=r"ARGS=test_it\.py if .* say: one of FOLDER"):
        golden.compare(f"one of {tmp_path}")
    golden.given.clear()
    monkeypatch.setattr(golden, "WRITING", True)
    for text in ("one", "two"):
        golden.compare(text)
    assert golden.read.__wrapped__(file) == {"test_it.py::test_a[x (y)]": ["one", "two"]}
    golden.given.clear()
    monkeypatch.setattr(golden, "WRITING", False)
    golden.read.cache_clear()
    for text in ("one", "two"):
        golden.compare(text)
    with pytest.raises(AssertionError, match="say: three"):
        golden.compare("three")


def test_golden_files_name_tests_that_are_there() -> None:
    for file in Path(__file__).parent.rglob(golden.FILE):
        assert all(golden.is_there(file.parent, key) for key in golden.read(file)), file
