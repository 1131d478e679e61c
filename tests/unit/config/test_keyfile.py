"""The file with a job's key: what is refused, and where a process may do without one."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from mend import MendConfig
from mend.config import keyfile
from mend.config.keyfile import (
    FILE_BYTES_MAX,
    is_loopback,
    line_of,
    protection_of,
    read_secrets,
    secrets_in_force,
    secrets_of,
    too_open,
)
from mend.config.wiring import settings_of
from mend.errors import ConfigError
from mend.tools.keys_command import create
from tests import golden

ONE, OTHER = bytes(range(32)), bytes(range(1, 33))
OUTSIDE = "tcp://0.0.0.0:21900"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    create(tmp_path / "key", (ONE, OTHER))
    return tmp_path / "key"


def test_key_file_is_read_in_order_and_private_to_its_owner(key: Path) -> None:
    assert read_secrets(key) == (ONE, OTHER)
    assert key.stat().st_mode & 0o777 == 0o600


def test_a_key_is_never_written_over_another_file(key: Path) -> None:
    with golden.raises(ConfigError):
        create(key, (OTHER,))
    assert read_secrets(key) == (ONE, OTHER)


def test_a_key_that_does_not_fit_on_the_disk_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty file was left, which the next attempt refused to overwrite."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\)"):
            create(tmp_path / "key", (ONE,))
    create(tmp_path / "key", (ONE,))
    assert read_secrets(tmp_path / "key") == (ONE,)


def test_the_umask_makes_it_no_more_readable(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        create(tmp_path / "open", (ONE,))
    finally:
        os.umask(before)
    assert read_secrets(tmp_path / "open") == (ONE,)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666, 0o601])
def test_a_file_that_others_may_read_or_write_is_refused(key: Path, mode: int) -> None:
    key.chmod(mode)
    with golden.raises(ConfigError) as caught:
        read_secrets(key)
    assert f"chmod 600 {key}" in str(caught.value)


def test_a_secret_mounted_read_only_through_a_link_is_taken(key: Path) -> None:
    """As Kubernetes mounts it."""
    key.chmod(0o400)
    key.with_name("link").symlink_to(key)
    assert read_secrets(key.with_name("link")) == (ONE, OTHER)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing else\n\n",
        f"{line_of(ONE)}\n{line_of(ONE)}\n",
        "".join(f"{line_of(bytes([n]) * 32)}\n" for n in range(5)),
        line_of(ONE)[:-4],
        f"{line_of(ONE)}\nsecret hush\n",
        line_of(ONE).replace("key-1", "key-2"),
        line_of(ONE) + " hush",
        "\0" * 10,
        "#" * (FILE_BYTES_MAX + 1),
    ],
)
def test_a_damaged_file_is_refused_without_a_word_of_what_is_in_it(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    with golden.raises(ConfigError) as caught:
        read_secrets(path)
    assert "hush" not in str(caught.value)
    assert line_of(ONE)[12:20] not in str(caught.value)


def test_no_file_is_said_with_how_to_make_one(tmp_path: Path) -> None:
    with golden.raises(ConfigError):
        read_secrets(tmp_path / "none")


@pytest.mark.parametrize(
    ("bind", "loops"),
    [
        ("tcp://127.0.0.1:1", True), ("tcp://127.8.9.1:1", True), ("tcp://[::1]:1", True),
        ("tcp://localhost:1", True), ("tcp://0.0.0.0:1", False), ("tcp://[::]:1", False),
        ("tcp://10.0.0.1:1", False), ("tcp://no.such.host.invalid:1", False),
    ],
)  # fmt: skip
def test_loopback_is_what_only_this_machine_reaches(bind: str, loops: bool) -> None:
    assert is_loopback(bind) == loops


def test_beyond_loopback_there_is_a_key_or_a_word(key: Path) -> None:
    assert secrets_of(MendConfig(), "tcp://127.0.0.1:1") == ()
    assert protection_of(MendConfig(), "tcp://127.0.0.1:1") == "loopback"
    with pytest.raises(ConfigError) as caught:
        secrets_of(MendConfig(), OUTSIDE)
    for remedy in ("`mend keys new FILE`", "MEND_KEY_FILE=FILE", "MEND_INSECURE=1"):
        assert remedy in str(caught.value)
    assert protection_of(MendConfig(), OUTSIDE) == "none"
    insecure = MendConfig(insecure=True)
    with golden.warns(UserWarning):
        assert secrets_of(insecure, OUTSIDE) == ()
    assert protection_of(insecure, OUTSIDE) == "insecure"
    keyed = MendConfig(key_file=key)
    for bind in (OUTSIDE, "tcp://127.0.0.1:1"):
        assert secrets_of(keyed, bind) == (ONE, OTHER)
        assert protection_of(keyed, bind) == "keys"
    with golden.raises(ConfigError):
        MendConfig(key_file=key, insecure=True)


def test_no_repr_of_what_a_rank_is_made_of_has_the_key(key: Path) -> None:
    settings = settings_of(MendConfig(rack=0, key_file=key), None)
    assert settings.io_loop.secrets == (ONE, OTHER)
    assert str(ONE) not in repr(settings)
    assert line_of(ONE)[11:] not in repr(settings)


def test_key_in_force_is_read_although_other_settings_are_invalid(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEND_NONSENSE", "1")
    assert secrets_in_force() == ()
    (tmp_path / "mend.toml").write_text(f'[mend]\nracks = "many"\nkey_file = "{key}"\n')
    monkeypatch.setenv("MEND_CONFIG", str(tmp_path / "mend.toml"))
    assert secrets_in_force() == (ONE, OTHER)
    create(tmp_path / "second", (OTHER,))
    monkeypatch.setenv("MEND_KEY_FILE", str(tmp_path / "second"))
    assert secrets_in_force() == (OTHER,)


@pytest.mark.parametrize(
    ("owner", "mode", "open_"),
    [
        (0, 0o440, False), (0, 0o640, False), (0, 0o444, True), (0, 0o460, True), (0, 0o404, True),
        (1000, 0o440, True), (1000, 0o400, False),
    ],
)  # fmt: skip
def test_file_of_root_that_the_group_may_read_is_right_for_another_user(
    owner: int, mode: int, open_: bool
) -> None:
    """Kubernetes mounts a Secret with 0440 in a pod that does not run as root."""
    status = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 1000, 0, 0, 0, 0))
    assert too_open(status, 1000) == open_
    assert too_open(status, 0) == bool(mode & 0o077)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of root")
def test_mounted_secret_is_read_by_a_process_of_its_group(key: Path) -> None:
    os.chown(key, 0, 1000)
    key.chmod(0o440)
    for folder in key.parents:
        if folder.stat().st_uid == os.geteuid() and "pytest" in str(folder):
            folder.chmod(0o755)
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(1000)
            os.setuid(1000)
            os._exit(len(read_secrets(key)))
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2


def test_key_file_that_cannot_be_read_is_found_at_the_config(tmp_path: Path) -> None:
    """It was found by mend_init, minutes later, after the model had been loaded."""
    with golden.raises(ConfigError):
        MendConfig(key_file=tmp_path / "none")


def test_letters_that_are_no_base64_are_refused_and_not_left_out(key: Path) -> None:
    text = key.read_text()
    secret = text.index(keyfile.WORD) + len(keyfile.WORD) + 5
    key.write_text(f"{text[:secret]}!{text[secret:]}")
    with golden.raises(ConfigError):
        read_secrets(key)


@pytest.mark.parametrize(
    ("numbers", "inside"),
    [
        (("127.0.0.1",), True),
        (("127.0.0.1", "::1"), True),
        (("127.0.0.1", "10.0.0.7"), False),
        ((), False),
    ],
)
def test_name_is_loopback_only_with_all_its_addresses(
    numbers: tuple[str, ...], inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyfile, "numbers_of", lambda host: numbers)
    assert is_loopback("tcp://here:21900") == inside
