"""A killed process keeps its port for a while, and whoever starts again waits for it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mend.engine.io.io_loop import IoLoop, IoLoopOptions
from mend.engine.io.port_holders import find_holder, open_when_free
from mend.errors import AddressInUse
from mend.events.base import LoggedEvent
from mend.events.kinds import PortAwaited
from mend.status.event_log import EventLog
from mend.transport.bulk_server import listen
from mend.types import SECOND, Member, Peer

DYING_STAT = "77 (my ) rank) R 1 77 77 0 -1 4 0"  # flags: PF_EXITING
LISTENS = "0: 0100007F:{port:04X} 00000000:0000 0A 0:0 00:0 0 {user} 0 4711 1 0"

HOLD = """
import socket, sys
held = socket.create_server(("127.0.0.1", int(sys.argv[1])))
memory = b"x" * (200 << 20)  # the kernel takes it back before the socket
print("up", flush=True)
sys.stdin.read()
"""


class Notes(list[dict[str, object]]):
    def __call__(self, event: LoggedEvent) -> None:
        assert isinstance(event, PortAwaited)
        self.append(event.fields())


@pytest.fixture
def holder(free_port: int) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    command = [sys.executable, "-IS", "-c", HOLD, str(free_port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield free_port, process
        process.kill()


def open_port(port: int) -> None:
    listen("127.0.0.1", (port, port)).close()


def test_a_living_holder_is_named_at_once(holder: tuple[int, subprocess.Popen[bytes]]) -> None:
    port, process = holder
    notes = Notes()
    with pytest.raises(AddressInUse, match=rf"Held by process {process.pid} \(.*python") as raised:
        open_when_free(lambda: open_port(port), notes, lambda: False)
    assert raised.value.ports == (port,)
    assert notes == []


def test_a_killed_holder_is_waited_for(
    holder: tuple[int, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """`kill -9; restart`, and `mend launch` behind a torchrun that died, met AddressInUse: the
    signal is on its way, or the kernel still gives the memory back."""
    port, process = holder
    bind = f"tcp://127.0.0.1:{port}"
    options = IoLoopOptions(bind, "127.0.0.1", "", None, SECOND)
    recorder = EventLog({"rack": 0, "rank": 0}, tmp_path)
    process.kill()
    io_loop = IoLoop(Peer(0, 0), Member(0, 1), "job", options, recorder)
    assert io_loop.address == bind
    io_loop.close()
    recorder.close()


def root(folder: Path, port: int, user: int, stat: str, status: str) -> Path:
    """A /proc with one socket that listens, and process 77, which has it if `stat` is given."""
    (folder / "proc/net").mkdir(parents=True)
    line = LISTENS.format(port=port, user=user)
    (folder / "proc/net/tcp").write_text(f"  sl  local_address\n {line}\n")
    if stat:
        (folder / "proc/77/fd").mkdir(parents=True)
        (folder / "proc/77/fd/9").symlink_to("socket:[4711]")
        (folder / "proc/77/stat").write_text(stat)
        (folder / "proc/77/status").write_text(status)
        (folder / "proc/77/comm").write_text("rank\n")
    return folder


@pytest.mark.parametrize(
    ("stat", "status", "dying"),
    [
        (DYING_STAT, "", True),
        (DYING_STAT.replace(" 4 0", " 0 0"), "ShdPnd:\t0000000000000100\n", True),
        (DYING_STAT.replace(" 4 0", " 0 0").replace(") R", ") Z"), "", True),
        (DYING_STAT.replace(" 4 0", " 0 0"), "ShdPnd:\t0000000000004000\n", False),  # SIGTERM
    ],
    ids=["exits", "killed", "zombie", "asked"],
)
def test_exiting_holder_is_distinguished_from_a_running_one(
    tmp_path: Path, stat: str, status: str, dying: bool
) -> None:
    found = find_holder(21_900, root(tmp_path, 21_900, 0, stat, status))
    assert found == ("process 77 (rank)", dying)
    assert find_holder(21_901, tmp_path) is None


def test_holder_without_memory_is_identified_by_its_user_only(tmp_path: Path) -> None:
    """Its descriptors then belong to root, in /proc."""
    mine, other = os.geteuid(), os.geteuid() + 1
    assert find_holder(21_900, root(tmp_path / "mine", 21_900, mine, "", "")) == ("", True)
    assert find_holder(21_900, root(tmp_path / "other", 21_900, other, "", "")) == ("", False)


def test_port_of_an_outgoing_connection_is_refused(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process listens, so there is none whose end could be awaited for long."""
    monkeypatch.setattr("mend.engine.io.port_holders.CLOSES_S_MAX", 0.2)
    with closing(socket.socket()) as end:
        end.bind(("127.0.0.1", free_port))
        with pytest.raises(AddressInUse, match="No process listens there"):
            open_when_free(lambda: open_port(free_port), Notes(), lambda: False)


def test_the_wait_is_told_once_and_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, tries = Notes(), 0
    proc = root(tmp_path, 21_900, 0, DYING_STAT, "")
    monkeypatch.setattr(find_holder, "__defaults__", (proc,))

    def taken() -> None:
        nonlocal tries
        tries += 1
        raise AddressInUse("sideband: taken.", (21_900,))

    with pytest.raises(AddressInUse, match=r"taken. Held by process 77 \(rank\)"):
        open_when_free(taken, notes, lambda: tries == 3)
    assert notes == [{"ports": "21900", "by": "process 77 (rank)", "max_s": 120.0}]
    with contextlib.suppress(AddressInUse):
        open_when_free(taken, notes, lambda: True)
