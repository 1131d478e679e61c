"""The serving side of the bulk lane: one thread accepts, others serve."""

from __future__ import annotations

import errno
import socket
import threading

import xxhash

from mend.errors import AddressInUse, ConfigError, TransportError
from mend.transport.bulk_wire import (
    BAD,
    GONE,
    HELLO,
    LENGTH_MAX,
    OK,
    REPLY,
    REPLY_MAGIC,
    REQUEST,
    REQUEST_MAGIC,
    hello_bytes,
    read_exactly,
    shut,
    tune,
)
from mend.types import KEY_BYTES, SECOND, Address

CONNECTIONS_MAX = 64
HELLO_NS_MAX = 5 * SECOND
JOIN_SECONDS_MAX = 0.5


def bound(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """A listening socket on the first free port of the inclusive range (None: any port).

    Raises AddressInUse when every port is taken, TransportError when `host` is not ours.
    """
    if ports is not None and not 0 < ports[0] <= ports[1] <= 0xFFFF:
        rule = "must be (first, last) with 0 < first <= last <= 65535"
        raise ConfigError("ports", ports, rule, "Leave it out to take any free port.")
    candidates = [0] if ports is None else range(ports[0], ports[1] + 1)
    for port in candidates:
        sock = None
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, proto, _, where = found[0]
            sock = socket.socket(family, kind, proto)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart finds its port
            sock.bind(where)
            sock.listen(CONNECTIONS_MAX)
        except OSError as error:
            if sock is not None:
                sock.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise TransportError(
                f"lane host={host!r} port={port}: cannot be bound ({error}). "
                "Give the name or address of an interface of this machine, and a port it may open."
            ) from error
        return sock
    raise AddressInUse(
        f"lane host={host!r} ports={ports}: every port is taken. "
        "Stop the process that holds them, or give a wider range."
    )


class _Connection:
    """One accepted connection. `idle` while it waits for a request: such a one may be evicted."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.idle = False


class Holder:
    """Serves byte ranges of its payloads to connections that open with the job's token.

    A connection that says anything else is closed and counted in `rejected`; nothing is allocated
    for it.
    """

    def __init__(
        self, host: str, ports: tuple[int, int] | None, token: bytes, stall_ns: int
    ) -> None:
        self._hello = hello_bytes(token)
        self._stall_ns = stall_ns
        self._listener = bound(host, ports)
        self.port: int = self._listener.getsockname()[1]
        self.bytes_sent = 0
        self.rejected = 0
        self._served: dict[bytes, memoryview] = {}
        self._lock = threading.Lock()
        self._connections: dict[_Connection, threading.Thread] = {}
        self._closed = threading.Event()
        name = f"mend-lane-accept-{self.port}"
        self._acceptor = threading.Thread(target=self._accept, name=name, daemon=True)
        self._acceptor.start()

    @property
    def connections(self) -> int:
        """How many connections are being served now."""
        return len(self._connections)

    def serve(self, key: bytes, view: memoryview) -> None:
        """Answer requests for `key` from `view` (C-contiguous) until `drop`."""
        assert len(key) == KEY_BYTES, f"{len(key)=} is not a key"
        self._served[key] = view.cast("B").toreadonly()

    def drop(self, key: bytes) -> None:
        """Answer GONE from the next chunk on; a chunk on its way keeps its own reference."""
        self._served.pop(key, None)

    def close(self) -> None:
        """Free the port and end the threads, also those that a stuck peer holds in a send."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            connections = dict(self._connections)
        shut(self._listener)
        for connection in connections:
            shut(connection.sock)
        for thread in (self._acceptor, *connections.values()):
            thread.join(JOIN_SECONDS_MAX)
        self._listener.close()
        self._served.clear()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._closed.wait(0.1)  # out of descriptors: others may give some back
                    continue
                if error.errno == errno.ECONNABORTED:
                    continue
                return
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        """Start a thread for it, at the cost of an idle connection when all places are taken."""
        connection = _Connection(sock)
        name = f"mend-lane-serve-{self.port}"
        thread = threading.Thread(target=self._converse, args=(connection,), name=name, daemon=True)
        with self._lock:
            full = len(self._connections) >= CONNECTIONS_MAX
            idle = next((c for c in self._connections if c.idle), None) if full else None
            if self._closed.is_set() or (full and idle is None):
                self.rejected += 1
                sock.close()
                return
            if idle is not None:
                idle.idle = False  # its thread is on its way out; do not pick it twice
                shut(idle.sock)
            self._connections[connection] = thread
            thread.start()

    def _converse(self, connection: _Connection) -> None:
        """Serve one connection until it ends, breaks or misbehaves."""
        sock, sane, greeted = connection.sock, False, False
        try:
            tune(sock, receive_ns=HELLO_NS_MAX, send_ns=2 * self._stall_ns, dead_ns=self._stall_ns)
            greeting = bytearray(HELLO.size)
            read_exactly(sock, memoryview(greeting))
            if greeting == self._hello:
                tune(sock, receive_ns=0, send_ns=2 * self._stall_ns, dead_ns=self._stall_ns)
                greeted = True
                sane = self._answer_all(connection)
        except EOFError:
            sane = False  # half a greeting, half a request
        except OSError:
            sane = greeted  # the link broke or the reader gave up, which is nobody's misbehaviour
        finally:
            with self._lock:
                self.rejected += not sane
                self._connections.pop(connection, None)
            sock.close()

    def _answer_all(self, connection: _Connection) -> bool:
        """Answer requests. True at a clean end, False at the first that is not one of ours."""
        request = memoryview(bytearray(REQUEST.size))
        while True:
            connection.idle = True
            if connection.sock.recv_into(request[:1]) == 0:
                return True
            connection.idle = False
            read_exactly(connection.sock, request[1:])
            magic, key, offset, length = REQUEST.unpack(request)
            if magic != REQUEST_MAGIC or not 0 < length <= LENGTH_MAX:
                return False
            if not self._answer(connection.sock, key, offset, length):
                return False

    def _answer(self, sock: socket.socket, key: bytes, offset: int, length: int) -> bool:
        """One reply. False when the range does not lie inside the payload (said, then closed)."""
        view = self._served.get(key)
        if view is None:
            sock.sendall(REPLY.pack(REPLY_MAGIC, GONE, 0, 0, b""))
            return True
        if offset + length > len(view):
            sock.sendall(REPLY.pack(REPLY_MAGIC, BAD, len(view), 0, b""))
            return False
        part = view[
            offset : offset + length
        ]  # holds the payload until the last byte is handed over
        digest = xxhash.xxh3_128_digest(part)
        header = REPLY.pack(REPLY_MAGIC, OK, len(view), length, digest)
        with (
            self._lock
        ):  # before the bytes leave, so that whoever has received them finds them counted
            self.bytes_sent += len(header) + length
        sent = sock.sendmsg([header, part])
        if sent < len(header):
            sock.sendall(header[sent:])
        sock.sendall(part[max(0, sent - len(header)) :])
        return True


def advertised(host: str, advertise: str, port: int) -> Address:
    """The address that others are told: `advertise`, or `host` where that names one machine."""
    if not advertise and host in ("", "*", "0.0.0.0", "::"):
        remedy = "Set it to the name or address under which other racks reach this machine."
        raise ConfigError(
            "advertise", advertise, f"host {host!r} is not an address to tell", remedy
        )
    return Address(advertise or host, port)
