"""One port for the lanes of several processes of a host.

The process that was able to bind the port is the door. The first bytes of a connection contain the
token of the requested rank. The door passes a connection for another rank to the process of that
rank as a file descriptor, so no byte is copied. The processes find each other by the names of
abstract Unix sockets. A process that can send to these can also connect to the port, so its
messages are trusted no more than those of a connection.

A connection that greets as ZeroMQ is for the sideband of the rack's leader. The leader's token is
`job`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time

from mend.errors import AddressInUse
from mend.transport.bulk_wire import HELLO, TOKEN_BYTES

LOOK_S = 0.5
"""How often a process that is not the door checks whether there is one."""

SIDEBAND = b"\xff"
"""The first byte of a ZeroMQ greeting. No greeting of a lane begins with it."""

PEEK_MS = 20
HAND_S = 1.0
"""Longest wait for a process whose queue is full. Afterwards the reader has to retry."""


class SharedPort:
    """The part of one process. `token`: of its rank. `job`: equal in all processes that share the
    port."""

    def __init__(self, port: int, token: bytes, job: bytes) -> None:
        self.port, self._token, self._job = port, token, job
        self._door_name = b"\0mend door %d %s" % (port, job.hex().encode())
        self._door: socket.socket | None = None
        self._mail = _bound(self._name(token), port)
        self._mail.settimeout(LOOK_S)

    def _name(self, token: bytes) -> bytes:
        return b"\0mend lane %d %s" % (self.port, token.hex().encode())

    def has_door(self) -> bool:
        """Whether a process of this job listens at the port and passes connections on."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way:
            return way.connect_ex(self._door_name) == 0

    def open_door(self) -> None:
        """Become the door: this process listens at the port now."""
        self._door = _bound(self._door_name, self.port)

    def take(self) -> socket.socket | None:
        """Wait for a connection for this rank. None: there was none for LOOK_S, or this is
        closed."""
        try:
            _, descriptors, _, _ = socket.recv_fds(self._mail, 1, 1)
        except OSError:
            return None
        return socket.socket(fileno=descriptors[0]) if descriptors else None

    def hand(self, sock: socket.socket, wanted: bytes) -> bool:
        """Pass a connection to the process of this host that it is for (see `wanted_in`). Returns
        False if there is none, or it is this one. Only the door may do this."""
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
        """Make the current or next `take` return at once. A shutdown has no such effect: without
        data, a datagram socket with a time-out continues to wait."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way:
            way.setblocking(False)
            with contextlib.suppress(OSError):  # the queue is full, so `take` does not wait
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
    """Peek at the greeting of a connection. Returns its token, or SIDEBAND; empty if no greeting
    arrived in time."""
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
            break  # the other end has closed it within the greeting
    return b""
