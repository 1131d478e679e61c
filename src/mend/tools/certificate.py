"""The file that `mend repro --certify` writes: content and its SHA-256, which shows an accidental
edit. A signature of the file (`ssh-keygen -Y sign`) would show who made it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mend.errors import CertificateError

FORMAT = "mend-certificate-1"

FILE_BYTES_MAX = 1 << 24

FIELDS: dict[str, type | tuple[type, ...]] = {
    "claim": str,
    "cuts": list,
    "leaves": (int, type(None)),
    "level": str,
    "machine": dict,
    "script": dict,
    "seed": (int, type(None)),
    "steps": int,
    "versions": dict,
}
"""Of the content, besides `format`."""


def document_of(content: dict[str, Any]) -> str:
    """The text of the file."""
    whole = {"format": FORMAT, **content}
    return json.dumps({"content": whole, "sha256": _digest(whole)}, indent=2) + "\n"


def verified(path: Path) -> dict[str, Any]:
    """The content. Raises CertificateError."""
    document = _parsed(path)
    content: dict[str, Any] = document["content"]
    if _digest(content) != document["sha256"]:
        raise CertificateError(f"{path} was edited: its content has not the SHA-256 that it names")
    return content


def _parsed(path: Path) -> dict[str, Any]:
    """Raises CertificateError where it is no document of this format."""
    try:
        with path.open("rb") as file:
            octets = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise CertificateError(f"{path} cannot be read ({error.strerror})") from None
    if len(octets) > FILE_BYTES_MAX:
        raise CertificateError(f"{path} has more than {FILE_BYTES_MAX} bytes")
    try:
        found = json.loads(octets, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise CertificateError(f"{path} is no JSON of a certificate: {error}") from None
    if not isinstance(found, dict) or not _is_document(found):
        raise CertificateError(f"{path} is no {FORMAT}; mend repro --certify writes them")
    return found


def _is_document(found: dict[str, Any]) -> bool:
    content = found.get("content")
    if found.keys() != {"content", "sha256"} or not isinstance(content, dict):
        return False
    fields = all(isinstance(content.get(name), kind) for name, kind in FIELDS.items())
    return fields and content.get("format") == FORMAT


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A reader may see the first of two fields of one name, and Python takes the last."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name is there twice")
    return made


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
