"""One port for the lanes of several processes of a host.

The process that could bind the port is the door. The first bytes of a connection have the token of
the rank that is wanted; the door hands a connection for another rank over to that process, which
then serves it alone: no byte is copied. The processes find each other by names of abstract Unix
sockets. A process that can send to these can also connect to the port, so its messages are
trusted no more than those of a connection.

A connection that greets as ZeroMQ is for the sideband of the rack's leader, whose token is the job.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time

from mend.errors import AddressInUse
from mend.transport.bulk_wire import HELLO, TOKEN_BYTES

LOOK_S = 0.5
"""How often a process that is not the door looks whether there is one."""

SIDEBAND = b"\xff"
"""The first byte of a ZeroMQ greeting, and of no greeting of a lane."""

PEEK_MS = 20
HAND_S = 1.0
"""Longest wait for a process whose queue is full; the reader then tries again."""


class SharedPort:
    """One process's part. `token`: of its rank; `job`: the same in all processes that share."""

    def __init__(self, port: int, token: bytes, job: bytes) -> None:
        self.port, self._token, self._job = port, token, job
        self._door_name = b"\0mend door %d %s" % (port, job.hex().encode())
        self._door: socket.socket | None = None
        self._mail = _bound(self._name(token), port)
        self._mail.settimeout(LOOK_S)

    def _name(self, token: bytes) -> bytes:
        return b"\0mend lane %d %s" % (self.port, token.hex().encode())

    def has_door(self) -> bool:
        """Whether a process of this job listens at the port and hands connections over."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way:
            return way.connect_ex(self._door_name) == 0

    def open_door(self) -> None:
        """This process listens at the port from now on."""
        self._door = _bound(self._door_name, self.port)

    def take(self) -> socket.socket | None:
        """A connection for this rank. None: none has come for LOOK_S, or this is closed."""
        try:
            _, descriptors, _, _ = socket.recv_fds(self._mail, 1, 1)
        except OSError:
            return None
        return socket.socket(fileno=descriptors[0]) if descriptors else None

    def hand(self, sock: socket.socket, wanted: bytes) -> bool:
        """Hand a connection over to the process of this host that it is for, see `wanted_in`.
        False: there is none, or it is this one. Only the door may hand."""
        token = self._job if wanted == SIDEBAND else wanted
        if token == self._token:
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way:
            way.settimeout(HAND_S)
            try:
                way.connect(self._name(token))
                socket.send_fds(way, [b"x"], [sock.fileno()])
            except OSError:
                return False
        return True

    def wake(self) -> None:
        """The next or present `take` returns at once. A shutdown would not do: without bytes a
        datagram socket with a time-out goes on to look."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way:
            way.setblocking(False)
            with contextlib.suppress(OSError):  # its queue is full, so nobody waits
                way.sendto(b"x", self._name(self._token))

    def close(self) -> None:
        self._mail.close()
        if self._door is not None:
            self._door.close()


def _bound(name: bytes, port: int) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        made.bind(name)
    except OSError as error:
        made.close()
        text = f"port {port} is shared by a process of the same rank. Stop it"
        raise AddressInUse(text, (port,)) from error
    return made


def wanted_in(sock: socket.socket, until_ns: int) -> bytes:
    """The token in the greeting, or SIDEBAND; the greeting stays to be read. Empty: none came in
    time."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    while time.monotonic_ns() < until_ns:
        try:
            greeting = sock.recv(HELLO.size, socket.MSG_PEEK)
        except BlockingIOError:
            continue
        if greeting.startswith(SIDEBAND):
            return SIDEBAND
        if len(greeting) == HELLO.size:
            return greeting[-TOKEN_BYTES:]
        if not greeting:
            break
        if poller.poll(PEEK_MS):
            break  # it has ended in the middle
    return b""
