"""A certificate that was edited does not hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mend.errors import CertificateError
from mend.tools.certificate import document_of, verified

CONTENT: dict[str, Any] = {
    "claim": "On one machine (ein Prüfstand), 3 steps of train.py gave equal bits in two runs.",
    "cuts": [{"cut": "uncut", "verdict": "uncut", "weights": "ab"}],
    "leaves": 8,
    "level": "shape",
    "machine": {"CPU": "Prüfstand"},
    "script": {"command": ["train.py"], "sha256": None},
    "seed": 7,
    "steps": 3,
    "versions": {"torch": "2.13.0"},
}


def written(folder: Path, text: str) -> Path:
    path = folder / "certificate.json"
    path.write_text(text)
    return path


def test_certificate_holds_as_it_was_written(tmp_path: Path) -> None:
    assert verified(written(tmp_path, document_of(CONTENT)))["claim"] == CONTENT["claim"]


def test_equal_content_has_equal_files() -> None:
    mixed = dict(reversed(CONTENT.items()))
    one, other = (json.loads(document_of(each)) for each in (CONTENT, mixed))
    assert one == other


WHOLE = json.loads(document_of(CONTENT))


def test_edited_certificate_is_refused(tmp_path: Path) -> None:
    edited = {**WHOLE, "content": {**WHOLE["content"], "steps": 4}}
    with pytest.raises(CertificateError, match="was edited"):
        verified(written(tmp_path, json.dumps(edited)))


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"content": {}}', "[" * 100_000, "9" * 5_000,
        json.dumps({**WHOLE, "content": {**WHOLE["content"], "cuts": 1}}),
        json.dumps({**WHOLE, "content": {**WHOLE["content"], "format": "mend-certificate-2"}}),
        json.dumps({**WHOLE, "more": 1}),
        json.dumps({name: each for name, each in WHOLE.items() if name != "sha256"}),
        json.dumps(WHOLE).replace('"sha256": ', '"sha256": "00", "sha256": ', 1),
    ],
)  # fmt: skip
def test_file_that_is_no_certificate_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(CertificateError, match=r"is no (JSON of a certificate|mend-certificate-1)"):
        verified(written(tmp_path, text))


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CertificateError, match="cannot be read"):
            verified(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(CertificateError, match="is no JSON"):
        verified(tmp_path / "binary")
