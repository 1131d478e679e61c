"""What a user may name in place of a file."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from mend.config.keyfile import read_secrets
from mend.errors import ConfigError, TapeError
from mend.files import open_regular
from mend.trace.reader import read_tape, tapes_in


def made(folder: Path, what: str) -> Path:
    path = folder / "named"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    elif what == "device":
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("what", ["pipe", "folder", "socket", "device", "nothing"])
def test_open_regular_something_else_is_refused_at_once(tmp_path: Path, what: str) -> None:
    path = made(tmp_path, what)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=str(path)):
        open_regular(path)
    assert os.listdir("/proc/self/fd") == before


def test_open_regular_file_and_null_device_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a file"
    path.write_bytes(b"data")
    with open_regular(str(path)) as file, open_regular(os.devnull) as null:
        assert (file.read(), null.read()) == (b"data", b"")


def test_tape_or_key_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    pipe = made(tmp_path, "pipe")
    with pytest.raises(TapeError, match="Not a regular file"):
        read_tape(pipe)
    with pytest.raises(ConfigError, match="Not a regular file"):
        read_secrets(pipe)


def test_tapes_in_folder_that_changes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish(folder: Path, pattern: str) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(folder / "gone"))

    monkeypatch.setattr(Path, "rglob", vanish)
    with pytest.raises(TapeError, match=r"cannot be read .*gone"):
        tapes_in([tmp_path])
