"""A certificate that was edited, or that another key has signed, does not hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mend.errors import CertificateError, ConfigError
from mend.tools.certificate import document_of, private_key, public_key, verified

CONTENT: dict[str, Any] = {
    "claim": "On one machine (ein Prüfstand), 3 steps of train.py gave equal bits in two runs.",
    "cuts": [{"cut": "uncut", "verdict": "uncut", "weights": "ab"}], "leaves": 8, "level": "shape",
    "machine": {"CPU": "Prüfstand"}, "script": {"command": ["train.py"], "sha256": None}, "seed": 7,
    "steps": 3, "versions": {"torch": "2.13.0"},
}  # fmt: skip
PEM, SSH = serialization.Encoding.PEM, serialization.Encoding.OpenSSH
PRIVATE = serialization.PrivateFormat
PUBLIC = serialization.PublicFormat
PLAIN = serialization.NoEncryption()


def key(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)


def written(folder: Path, text: str) -> Path:
    path = folder / "certificate.json"
    path.write_text(text)
    return path


def test_certificate_holds_with_and_without_signature(tmp_path: Path) -> None:
    content, signer = verified(written(tmp_path, document_of(CONTENT, None)), None)
    assert (content["claim"], signer) == (CONTENT["claim"], None)
    path = written(tmp_path, document_of(CONTENT, key(1)))
    hexadecimal = key(1).public_key().public_bytes_raw().hex()
    assert verified(path, None)[1] == hexadecimal
    assert verified(path, key(1).public_key())[1] == hexadecimal


def test_equal_content_has_equal_files() -> None:
    mixed = dict(reversed(CONTENT.items()))
    one, other = (json.loads(document_of(each, key(1))) for each in (CONTENT, mixed))
    assert one == other


def edited(change: str) -> str:
    document = json.loads(document_of(CONTENT, key(1)))
    other = json.loads(document_of({**CONTENT, "steps": 4}, key(2)))
    if change == "content":
        document["content"]["steps"] = 4
    elif change == "content and hash":
        document |= {"content": other["content"], "sha256": other["sha256"]}
    elif change == "signature":
        document["signature"] = other["signature"]
    elif change == "no hexadecimal":
        document["signature"] = "zz"
    elif change == "short key":
        document["public_key"] = "abcd"
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("content", "was edited"),
        ("content and hash", "wrong signature"),
        ("signature", "wrong signature"),
        ("no hexadecimal", "wrong signature"),
        ("short key", "wrong signature"),
    ],
)
def test_edited_certificate_is_refused(tmp_path: Path, change: str, said: str) -> None:
    with pytest.raises(CertificateError, match=said):
        verified(written(tmp_path, edited(change)), None)


def test_certificate_needs_the_key_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="signed by another key"):
        verified(written(tmp_path, document_of(CONTENT, key(1))), key(2).public_key())
    with pytest.raises(CertificateError, match="is not signed"):
        verified(written(tmp_path, document_of(CONTENT, None)), key(2).public_key())


WHOLE = json.loads(document_of(CONTENT, key(1)))


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"content": {}}', "[" * 100_000, "9" * 5_000,
        json.dumps({**WHOLE, "content": {**WHOLE["content"], "cuts": 1}}),
        json.dumps({**WHOLE, "content": {**WHOLE["content"], "format": "mend-certificate-2"}}),
        json.dumps({**WHOLE, "more": 1}),
        json.dumps({name: each for name, each in WHOLE.items() if name != "signature"}),
        json.dumps(WHOLE).replace('"sha256": ', '"sha256": "00", "sha256": ', 1),
    ],
)  # fmt: skip
def test_file_that_is_no_certificate_is_refused(tmp_path: Path, text: str) -> None:
    said = r"is not (the JSON of a certificate|a mend-certificate-1)"
    with pytest.raises(CertificateError, match=said):
        verified(written(tmp_path, text), None)


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CertificateError, match="cannot be read"):
            verified(path, None)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(CertificateError, match="is not the JSON"):
        verified(tmp_path / "binary", None)


def test_keys_of_openssl_and_of_openssh_are_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    for encoding, of_private, of_public in (
        (PEM, PRIVATE.PKCS8, PUBLIC.SubjectPublicKeyInfo),
        (PEM, PRIVATE.OpenSSH, None),
        (SSH, None, PUBLIC.OpenSSH),
    ):
        if of_private is not None:
            path.write_bytes(key(1).private_bytes(encoding, of_private, PLAIN))
            assert private_key(path).private_bytes_raw() == bytes([1]) * 32
        if of_public is not None:
            path.write_bytes(key(1).public_key().public_bytes(encoding, of_public))
            assert public_key(path).public_bytes_raw() == key(1).public_key().public_bytes_raw()


def test_keys_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match=r"--sign=.*cannot be read \(No such file"):
        private_key(path)
    path.write_bytes(b"not a key")
    with pytest.raises(ConfigError, match="is not a private Ed25519 key"):
        private_key(path)
    with pytest.raises(ConfigError, match=r"--key=.*is not a public Ed25519 key"):
        public_key(path)
    path.write_bytes(generate_private_key(SECP256R1()).private_bytes(PEM, PRIVATE.PKCS8, PLAIN))
    with pytest.raises(ConfigError, match="is not a private Ed25519 key"):
        private_key(path)
    locked = serialization.BestAvailableEncryption(b"word")
    path.write_bytes(key(1).private_bytes(PEM, PRIVATE.PKCS8, locked))
    with pytest.raises(ConfigError, match=r"has a password.*openssl genpkey"):
        private_key(path)
