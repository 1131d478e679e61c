"""The demo's text: every byte in one part, the same parts every time, and no part starves."""

from __future__ import annotations

from pathlib import Path

import pytest

from mend.tools.demo_corpus import HELD_OUT_PCT, packages, split, standard_library


def test_a_package_is_in_exactly_one_part_and_no_byte_is_lost() -> None:
    texts = {f"package{i}": f"<{i}>".encode() * (i + 1) for i in range(40)}
    corpus = split(texts, racks=3)
    for text in texts.values():
        assert sum(text in part for part in (*corpus.racks, corpus.held_out)) == 1
    joints = sum(max(0, part.count(b"\n")) for part in (*corpus.racks, corpus.held_out))
    assert sum(map(len, (*corpus.racks, corpus.held_out))) == sum(map(len, texts.values())) + joints


def test_the_split_follows_the_names_and_not_their_order() -> None:
    texts = {f"package{i}": bytes([65 + i]) * 100 for i in range(20)}
    assert split(texts, 2) == split(dict(reversed(texts.items())), 2)


def test_tests_and_installed_packages_stay_out(tmp_path: Path) -> None:
    for name in (
        "json/a.py",
        "json/b.py",
        "os.py",
        "test/x.py",
        "site-packages/y.py",
        "json/tests/z.py",
        "empty.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.py" else name)
    assert packages(tmp_path) == {"json": b"json/a.py\njson/b.py", "os": b"os.py"}


def test_too_few_packages_are_refused() -> None:
    with pytest.raises(ValueError, match="2 packages cannot be cut into 2 racks"):
        split({"a": b"1", "b": b"2"}, 2)


def test_the_standard_library_gives_each_rack_about_the_same() -> None:
    corpus = standard_library(2)
    total = sum(map(len, corpus.racks)) + len(corpus.held_out)
    assert total > 2_000_000
    assert abs(len(corpus.racks[0]) - len(corpus.racks[1])) < 0.1 * total
    assert HELD_OUT_PCT / 2 < 100 * len(corpus.held_out) / total < 2 * HELD_OUT_PCT
