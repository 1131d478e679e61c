"""Reads the file with a job's keys, and decides whether this process may run without one.

    # comments and empty lines are skipped
    mend-key-1 4S1tVbdyx4FTMrcKPN0zUWZgNKPs2bGlE3dPFEbkPfg
    mend-key-1 ...                                          also accepted, while keys are replaced

The first key is the one that this process uses; it accepts all of them.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import os
import stat
import warnings
from pathlib import Path

from mend.config.settings import MendConfig
from mend.config.sources import KEY_FILE, named_key_file
from mend.errors import ConfigError
from mend.files import open_regular
from mend.transport.probe import host_and_port, numbers_of
from mend.transport.security import READER_BYTES, SECRET_BYTES, SECRETS_MAX

WORD, READER_WORD = "mend-key-1", "mend-reader-1"
FILE_BYTES_MAX = 16 << 10
OTHERS = stat.S_IRWXG | stat.S_IRWXO
HEAD = (
    "# A key of mend jobs. Anyone who reads this file can join the job, and read and forge\n"
    "# all of its traffic. Copy it to every rack and the witness by a way that you trust.\n"
)
READER_HEAD = (
    "# A reader's key of mend jobs. Anyone who reads this file can read the status and the merged\n"
    "# weights of the job, and take no part in it.\n"
)
MAKE_ONE = "Make one with `mend keys new FILE`."


def line_of(secret: bytes) -> str:
    """The line of a key in a file. `secret`: of a job, or a reader's key."""
    word = READER_WORD if len(secret) == READER_BYTES else WORD
    return f"{word} {base64.urlsafe_b64encode(secret).decode().rstrip('=')}"


def read_secrets(path: Path) -> tuple[bytes, ...]:
    """Read all keys of a file; the first is the one to use. Raises ConfigError, which never
    contains a key, if the file is missing, empty or damaged, if others may read it, or if it has a
    reader's key."""
    keys = read_keys(path)
    if any(len(key) == READER_BYTES for key in keys):
        rule = "has a reader's key, which cannot take part in a job"
        raise ConfigError("key_file", str(path), rule, "Use the key of the job.")
    return keys


def read_keys(path: Path) -> tuple[bytes, ...]:
    """As `read_secrets`, for tools that look at a job: they may have a reader's key."""
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
        raise ConfigError("key_file", str(path), rule, MAKE_ONE) from None
    if too_open(status, os.geteuid()):
        rule = f"may be read by others (mode {stat.S_IMODE(status.st_mode):04o})"
        remedy = f"Run `chmod 600 {path}`; if others may have read it, make a new one."
        raise ConfigError("key_file", str(path), rule, remedy)
    if len(text) > FILE_BYTES_MAX:
        raise ConfigError("key_file", str(path), f"is over {FILE_BYTES_MAX} bytes", MAKE_ONE)
    lines = [line.split() for line in text.splitlines()]
    words = [line for line in lines if line and not line[0].startswith(b"#")]
    secrets = [_secret(path, number, line) for number, line in enumerate(words, start=1)]
    if len(set(secrets)) != len(secrets) or not 0 < len(secrets) <= SECRETS_MAX:
        rule = f"needs 1 to {SECRETS_MAX} different keys, has {len(secrets)}"
        raise ConfigError("key_file", str(path), rule, MAKE_ONE)
    return tuple(secrets)


def too_open(status: os.stat_result, user: int) -> bool:
    """Whether others than `user` may read or write the file. Root always may. If root owns the
    file, its group may read it as well, since that lets this process read it: in a pod with an
    fsGroup, Kubernetes mounts a Secret in this way (0440)."""
    mounted = status.st_uid == 0 != user and status.st_mode & stat.S_IRWXG == stat.S_IRGRP
    return bool(status.st_mode & (stat.S_IRWXO if mounted else OTHERS))


def _secret(path: Path, number: int, line: list[bytes]) -> bytes:
    try:
        word, text = line
        secret = base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
        sizes = {WORD.encode(): SECRET_BYTES, READER_WORD.encode(): READER_BYTES}
        if len(secret) == sizes.get(word):
            return secret
    except (ValueError, binascii.Error):
        pass
    rule = f"its key {number} is not `{WORD}` and 43 letters, or `{READER_WORD}` and 86"
    raise ConfigError("key_file", str(path), rule, MAKE_ONE)


def secrets_of(config: MendConfig, bind: str, field: str = "sideband_addr") -> tuple[bytes, ...]:
    """The keys of a process that listens at `bind`. There may be none on the loopback interface, or
    with `insecure`, which causes a warning.

    Raises ConfigError for any other address without a key.
    """
    if config.key_file is not None:
        return read_secrets(Path(config.key_file))
    if is_loopback(bind):
        return ()
    remedy = (
        f"Make a key with `mend keys new FILE` and set {KEY_FILE}=FILE on every rack and the "
        "witness, or set MEND_INSECURE=1 (insecure=True) where everybody who reaches this network "
        "may read and forge the job's traffic."
    )
    if not config.insecure:
        raise ConfigError(field, bind, "is reached from outside, and there is no key", remedy)
    warnings.warn(
        f"insecure: {bind} is reached from outside without a key: anyone who reaches it can read "
        f"and forge the job's traffic. Two commands end that: `mend keys new FILE`, and `export "
        f"{KEY_FILE}=FILE` on every rack and the witness",
        stacklevel=3,
    )
    return ()


def protection_of(config: MendConfig, bind: str) -> str:
    """The protection of this process: keys, loopback or insecure; or none, which is refused at the
    start."""
    if config.key_file is not None:
        return "keys"
    if is_loopback(bind):
        return "loopback"
    return "insecure" if config.insecure else "none"


def is_loopback(bind: str) -> bool:
    """Return whether only processes of this machine can reach an address. Names are looked up."""
    host, _ = host_and_port(bind)
    try:
        numbers: tuple[str, ...] = (str(ipaddress.ip_address(host)),)
    except ValueError:
        numbers = numbers_of(host)
    return bool(numbers) and all(ipaddress.ip_address(each).is_loopback for each in numbers)


def secrets_in_force() -> tuple[bytes, ...]:
    """The keys of tools that look at a job, from MEND_KEY_FILE or the file of MEND_CONFIG."""
    path = named_key_file()
    return read_keys(path) if path is not None else ()
