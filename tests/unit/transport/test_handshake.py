"""A handshake is timed whether it is accepted or refused; no answer at all is an error."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from mend.transport import handshake
from mend.transport.handshake import handshake_ms


def test_an_open_and_a_closed_port_both_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert handshake_ms("127.0.0.1", port) > 0
    assert handshake_ms("127.0.0.1", port) > 0


def test_silence_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.05)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        with socket.create_connection(address), pytest.raises(OSError, match="timed out"):
            handshake_ms(*address)


def test_as_a_program_it_prints_one_figure_per_line() -> None:
    """As it is run in a namespace: by itself, without the rest of mend."""
    command = [sys.executable, "-I", handshake.__file__, "127.0.0.1", "3"]
    lines = subprocess.check_output(command, text=True).splitlines()
    assert len(lines) == 3
    assert all(float(line) > 0 for line in lines)
