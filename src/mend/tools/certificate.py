"""The file that `mend repro --certify` writes: content, its SHA-256, and an Ed25519 signature.

The SHA-256 shows that the content was not edited by accident: anyone can make another one. The
signature shows who made it, to readers who know the public key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from mend.errors import CertificateError, ConfigError
from mend.files import open_regular

FORMAT = "mend-certificate-1"

FILE_BYTES_MAX = 1 << 24
KEY_BYTES_MAX = 1 << 16

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


def document_of(content: dict[str, Any], key: Ed25519PrivateKey | None) -> str:
    """The text of the file; unsigned without a key."""
    whole = {"format": FORMAT, **content}
    octets = _canonical(whole)
    made: dict[str, Any] = {"content": whole, "sha256": hashlib.sha256(octets).hexdigest()}
    if key is not None:
        made["public_key"] = key.public_key().public_bytes_raw().hex()
        made["signature"] = key.sign(_message(octets)).hex()
    return json.dumps(made, indent=2) + "\n"


def verified(path: Path, key: Ed25519PublicKey | None) -> tuple[dict[str, Any], str | None]:
    """The content, and the public key in hexadecimal that signed it, None: it is not signed.

    `key`: the one that must have signed it. Raises CertificateError.
    """
    document = _parsed(path)
    content = document["content"]
    octets = _canonical(content)
    if hashlib.sha256(octets).hexdigest() != document["sha256"]:
        raise CertificateError(f"{path} was edited: its content has not the SHA-256 that it names")
    if "signature" not in document:
        if key is not None:
            raise CertificateError(f"{path} is not signed; ask its author to run with --sign")
        return content, None
    stated = document["public_key"]
    if key is not None and key.public_bytes_raw().hex() != stated:
        raise CertificateError(f"{path} is signed by another key, {stated}")
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(stated))
        public.verify(bytes.fromhex(document["signature"]), _message(octets))
    except (InvalidSignature, ValueError, TypeError):
        raise CertificateError(f"{path} has a wrong signature: {stated} did not sign it") from None
    return content, stated


def private_key(path: Path) -> Ed25519PrivateKey:
    """Read an Ed25519 key without a password, in PEM or of OpenSSH. Raises ConfigError."""
    pem, ssh = serialization.load_pem_private_key, serialization.load_ssh_private_key
    key = _key("--sign", path, [lambda data: pem(data, None), lambda data: ssh(data, None)])
    if isinstance(key, Ed25519PrivateKey):
        return key
    raise _no_key("--sign", path, "is not a private Ed25519 key")


def public_key(path: Path) -> Ed25519PublicKey:
    """Read a public Ed25519 key, in PEM or of OpenSSH. Raises ConfigError."""
    key = _key(
        "--key", path, [serialization.load_pem_public_key, serialization.load_ssh_public_key]
    )
    if isinstance(key, Ed25519PublicKey):
        return key
    raise _no_key("--key", path, "is not a public Ed25519 key")


def _key(field: str, path: Path, load: Sequence[Callable[[bytes], object]]) -> object:
    try:
        with open_regular(path) as file:
            octets = file.read(KEY_BYTES_MAX)
    except OSError as error:
        raise _no_key(field, path, f"cannot be read ({error.strerror})") from None
    for each in load:
        try:
            return each(octets)
        except TypeError:  # cryptography's answer to a key that is encrypted
            raise _no_key(field, path, "has a password") from None
        except (ValueError, UnsupportedAlgorithm):
            continue
    return None


def _no_key(field: str, path: Path, rule: str) -> ConfigError:
    remedy = "Make one: openssl genpkey -algorithm ed25519 -out key.pem; the public half: "
    return ConfigError(field, str(path), rule, f"{remedy}openssl pkey -in key.pem -pubout.")


def _parsed(path: Path) -> dict[str, Any]:
    """Raises CertificateError where it is not a document of this format."""
    try:
        with open_regular(path) as file:
            octets = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise CertificateError(f"{path} cannot be read ({error.strerror})") from None
    if len(octets) > FILE_BYTES_MAX:
        raise CertificateError(f"{path} has more than {FILE_BYTES_MAX} bytes")
    try:
        found = json.loads(octets, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise CertificateError(f"{path} is not the JSON of a certificate: {error}") from None
    if not isinstance(found, dict) or not _is_document(found):
        raise CertificateError(f"{path} is not a {FORMAT}; mend repro --certify writes them")
    return found


def _is_document(found: dict[str, Any]) -> bool:
    signed = {"public_key", "signature"} & found.keys()
    names = {"content", "sha256"} | (signed and {"public_key", "signature"})
    content = found.get("content")
    if found.keys() != names or not isinstance(content, dict):
        return False
    texts = all(isinstance(found[name], str) for name in names - {"content"})
    fields = all(isinstance(content.get(name), kind) for name, kind in FIELDS.items())
    return texts and fields and content.get("format") == FORMAT


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A reader may see the first of two fields of one name, and Python takes the last."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name is there twice")
    return made


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")


def _message(octets: bytes) -> bytes:
    """What is signed: no signature of a key for something else is one of a certificate."""
    return FORMAT.encode() + b"\n" + octets
