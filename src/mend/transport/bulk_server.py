"""The serving side of the bulk lane: one thread accepts, others serve."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from mend.errors import AddressInUse, ConfigError, TransportError, ensure, require
from mend.transport.bulk_link import REQUEST_NS_MAX, HolderEnd
from mend.transport.bulk_wire import BAD, GONE, LENGTH_MAX, REPLY, hello_bytes, shut, tune
from mend.transport.growth import Growth
from mend.transport.listeners import open_listener
from mend.transport.relay import Relay
from mend.transport.security import Secrets
from mend.transport.shared_port import SIDEBAND, SharedPort, wanted_in
from mend.types import KEY_BYTES, MS, READABLE, SECOND, Address, is_growing_key

CONNECTIONS_MAX = 64
LOOK_NS = SECOND
"""How often a connection that waits for a request checks its deadline."""

CARRIED_MAX = 2 * CONNECTIONS_MAX
"""Limit of the connections that are relayed to one other rank. That rank serves only
CONNECTIONS_MAX of them."""

GROW_NS_MAX = SECOND
"""How long a request waits for bytes of a payload that is still being made. It is also limited to
an eighth of the stall time-out, so that the reader does not consider the holder slow."""

GROW_LOOK_S = 0.25
"""How often a waiting request checks whether the server closes. Less than JOIN_SECONDS_MAX."""

ADMIT_NS = 5 * MS
"""Least time between two new connections after a burst of CONNECTIONS_MAX, because each needs a
thread. Faster ones wait in the kernel's queue."""

JOIN_SECONDS_MAX = 0.5


def listen(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """A listening socket on the first free port of the inclusive range (None: any port).

    Raises AddressInUse if every port is taken, TransportError if `host` is not of this machine.
    """
    if ports is not None and not 0 < ports[0] <= ports[1] <= 0xFFFF:
        rule = "must be (first, last) with 0 < first <= last <= 65535"
        raise ConfigError("ports", ports, rule, "Leave it out to take any free port.")
    candidates = [0] if ports is None else range(ports[0], ports[1] + 1)
    for port in candidates:
        try:
            addresses = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, _, _, _, where = addresses[0]
            return open_listener(family, where, CONNECTIONS_MAX)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise TransportError(
                f"lane host={host!r} port={port}: cannot be bound ({error}). "
                "Give the name or address of an interface of this machine, and a port it may open."
            ) from error
    raise AddressInUse(
        f"lane host={host!r} ports={ports}: every port is taken. "
        "Stop the process that holds them, or give a wider range.",
        tuple(candidates),
        lane=True,
    )


class _Connection(HolderEnd):
    """One accepted connection from `host`. `idle`: it waits for a request and may be evicted.
    `leaving`: its thread is about to end."""

    def __init__(
        self, sock: socket.socket, host: str, token: bytes, secrets: Secrets | None
    ) -> None:
        super().__init__(sock, token, secrets)
        self.host = host
        self.idle = False
        self.leaving = False


class PayloadServer:
    """Serves byte ranges of its payloads to connections of the job.

    A connection that sends anything else is closed and counted in `rejected`; nothing is allocated
    for it. If all places are taken, a new connection evicts the oldest one that has not proven that
    it belongs to this job, or else an idle one. In both cases it is one of the host that has the
    most of them, so that no host can take the places of others.
    """

    def __init__(
        self,
        host: str,
        ports: tuple[int, int] | None,
        token: bytes,
        stall_ns: int,
        secrets: Secrets | None = None,
        job: bytes = b"",
    ) -> None:
        """`job`: the token of the rack's leader. If `ports` is a single port, the processes of one
        host with the same `job` share it, each with a token of its own. Empty: they do not."""
        hello_bytes(token)  # checked before anything is open
        self._token, self._secrets = token, secrets
        self._stall_ns = stall_ns
        self._where = host, ports
        self._shared: SharedPort | None = None
        if job and ports is not None and ports[0] == ports[1]:
            self._shared = SharedPort(ports[0], token, job)
        try:
            self._listener = self._first_listener()
        except BaseException:
            if self._shared is not None:
                self._shared.close()
            raise
        self.port: int = self._shared.port if self._shared else _port_of(self._listener)
        self.bytes_sent = 0
        self.rejected = 0
        self._next_ns = 0
        self._served: dict[bytes, tuple[memoryview, Growth | None]] = {}
        self._find: Callable[[bytes], bytes | None] = lambda _: None
        self._news = threading.Condition()
        """Notified when a payload is served that requests may wait for."""
        self._grow_s = min(GROW_NS_MAX, stall_ns // 8) / SECOND
        self._relay: Relay | None = None
        if self._shared is not None:
            self._relay = Relay(f"mend-lane-relay-{self.port}", stall_ns)
        self._elsewhere: dict[bytes, tuple[Address, int]] = {}
        """Token or SIDEBAND -> where its connections are relayed to, and their limit."""
        self._lock = threading.Lock()
        self._connections: dict[_Connection, threading.Thread] = {}
        self._closed = threading.Event()
        self._accepting: list[threading.Thread] = []
        if self._listener is not None:
            self._begin(self._accept)
        if self._shared is not None:
            self._begin(self._take_in)

    def _first_listener(self) -> socket.socket | None:
        try:
            return self._listen()
        except AddressInUse:
            if self._shared is None or not self._shared.has_door():
                raise
            return None

    def _listen(self) -> socket.socket:
        listener = listen(*self._where)
        if self._shared is not None:
            try:
                self._shared.open_door()
            except AddressInUse:
                listener.close()
                raise
        return listener

    def _begin(self, work: Callable[[], None]) -> None:
        name = f"mend-lane-accept-{self.port}"
        self._accepting.append(threading.Thread(target=work, name=name, daemon=True))
        self._accepting[-1].start()

    def _close_sockets(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._shared is not None:
            self._shared.close()

    @property
    def bytes_relayed(self) -> int:
        """Bytes that this process has relayed for other ranks, in both directions."""
        return self._relay.bytes_carried if self._relay is not None else 0

    def relay(self, lanes: Mapping[bytes, Address]) -> None:
        """Relay connections for ranks of this rack on other hosts from now on. `lanes`: token ->
        numeric address and port. Only a shared port gets such connections."""
        self._elsewhere |= {token: (lane, CARRIED_MAX) for token, lane in lanes.items()}

    def relay_sideband(self, to: Address, most: int) -> None:
        """Relay up to `most` connections that greet as ZeroMQ. Only the rack's leader gets any."""
        self._elsewhere[SIDEBAND] = to, most

    def serve(self, key: bytes, view: memoryview, growth: Growth | None = None) -> None:
        """Answer requests for `key` from `view` (C-contiguous) until `drop`. `growth`: how much of
        it is there; requests for the rest wait. Any thread."""
        ensure(len(key) == KEY_BYTES, "no key of a payload", key=key)
        with self._news:
            self._served[key] = view.cast("B").toreadonly(), growth
            if is_growing_key(key):  # requests wait for no other kind
                self._news.notify_all()

    def find_by(self, find: Callable[[bytes], bytes | None]) -> None:
        """Answer requests for keys without a payload with `find(key)`; None: it is gone. Threads of
        connections call it, once per requested range."""
        self._find = find

    def drop(self, key: bytes) -> None:
        """Answer GONE from the next request on. A reply in flight keeps its own reference."""
        self._served.pop(key, None)

    def close(self) -> None:
        """Free the port and end all threads, including those that a stuck peer blocks in a send."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            connections = dict(self._connections)
        if self._listener is not None:
            shut(self._listener)
        if self._shared is not None:
            self._shared.wake()
        for connection in connections:
            shut(connection.sock)
        for thread in (*self._accepting, *connections.values()):
            thread.join(JOIN_SECONDS_MAX)
        if self._relay is not None:
            self._relay.close()
        self._close_sockets()
        self._served.clear()

    def _take_in(self) -> None:
        """Serve the connections that the door hands over. Become the door if there is none."""
        shared = require(self._shared, "no port is shared")
        while not self._closed.is_set():
            sock = shared.take()
            if sock is not None:
                self._admit(sock, _host_of(sock))
                self._rest()
            elif self._listener is None and not shared.has_door():
                self._become_door()

    def _become_door(self) -> None:
        """Listen at the shared port, unless this server is closed: perhaps the last door is gone
        because all processes end."""
        with (
            self._lock,
            contextlib.suppress(TransportError),
        ):  # another one was faster, or is ending
            if not self._closed.is_set():
                self._listener = self._listen()
                self._begin(self._accept)

    def _accept(self) -> None:
        listener = require(self._listener, "nobody listens")
        while not self._closed.is_set():
            try:
                sock, where = listener.accept()
            except OSError as error:  # of that connection, or the system is out of a resource
                if error.errno != errno.ECONNABORTED:
                    self._closed.wait(0.1)
                continue
            self._admit(sock, str(where[0]))
            self._rest()

    def _rest(self) -> None:
        """Limit the rate of new connections, because each needs a thread."""
        now_ns = time.monotonic_ns()
        self._next_ns = max(self._next_ns, now_ns - CONNECTIONS_MAX * ADMIT_NS) + ADMIT_NS
        if self._next_ns > now_ns:
            self._closed.wait((self._next_ns - now_ns) / SECOND)

    def _admit(self, sock: socket.socket, host: str) -> None:
        """Start a thread for the connection; evict another one when all places are taken."""
        connection = _Connection(sock, host, self._token, self._secrets)
        name = f"mend-lane-serve-{self.port}"
        thread = threading.Thread(target=self._converse, args=(connection,), name=name, daemon=True)
        with self._lock:
            staying = [each for each in self._connections if not each.leaving]
            full = len(staying) >= CONNECTIONS_MAX
            victim = _least_wanted(staying) if full else None
            may = not self._closed.is_set() and not (full and victim is None)
            if not (may and _started(thread)):
                self.rejected += 1
                sock.close()
                return
            if victim is not None:
                victim.leaving = True  # do not pick it twice
                shut(victim.sock)
            self._connections[connection] = thread  # the thread takes the lock to remove it

    def _converse(self, connection: _Connection) -> None:
        """Serve one connection until it ends, breaks or misbehaves."""
        sock, sane = connection.sock, False
        try:
            tune(sock, receive_ns=LOOK_NS, send_ns=2 * self._stall_ns, dead_ns=self._stall_ns)
            if self._shared is not None and self._pass_on(sock, self._shared):
                sane = True
                return
            if connection.greet():
                sane = self._answer_all(connection)
        except (EOFError, TimeoutError):
            sane = False  # an incomplete greeting or request, or one that takes too long
        except OSError:
            # The link broke or the reader gave up, which is not misbehaviour.
            sane = connection.greeted
        finally:
            with self._lock:
                self.rejected += not sane
                self._connections.pop(connection, None)
            sock.close()

    def _pass_on(self, sock: socket.socket, shared: SharedPort) -> bool:
        """Whether the connection was for another process, and was handed over to it."""
        wanted = wanted_in(sock, time.monotonic_ns() + REQUEST_NS_MAX)
        if wanted in (b"", self._token):
            return False
        if (to := self._elsewhere.get(wanted)) is not None:
            return require(self._relay, "a shared port has a relay").carry(sock, *to)
        return self._listener is not None and shared.hand(sock, wanted)

    def _answer_all(self, connection: _Connection) -> bool:
        """Answer requests. Returns True at a clean end, False at the first invalid request."""
        limit_ns = time.monotonic_ns() + REQUEST_NS_MAX
        while True:
            connection.idle = True
            try:
                begun = connection.sock.recv(connection.request_bytes)
            except BlockingIOError:
                if not connection.greeted and time.monotonic_ns() >= limit_ns:
                    return False
                continue
            if not begun:
                return connection.greeted
            request = connection.request(begun)
            connection.idle = False
            if request is None or not 0 < request[2] <= LENGTH_MAX:
                return False
            if not self._answer(connection, *request):
                return False

    def _answer(self, connection: _Connection, key: bytes, offset: int, length: int) -> bool:
        """Send one reply. Returns False if the range is not in the payload: close the
        connection."""
        if connection.reads_only and key[:1] not in READABLE:
            connection.refuse(GONE, 0, key, offset)
            return True
        found = self._found(connection, key, offset + length)
        if found is None:
            connection.refuse(GONE, 0, key, offset)
            return True
        view, there = found
        if offset + length > len(view):
            connection.refuse(BAD, len(view), key, offset)
            return False
        if not there:
            connection.refuse(GONE, len(view), key, offset)
            return True
        part = view[offset : offset + length]  # keeps the payload alive until it is sent
        with self._lock:  # counted first, so that the count is right once the reader has the bytes
            self.bytes_sent += REPLY.size + length
        connection.give(len(view), key, offset, part)
        return True

    def _found(
        self, connection: _Connection, key: bytes, end: int
    ) -> tuple[memoryview, bool] | None:
        """The payload, and whether its bytes before `end` are there. Waits for a payload that is
        being made and, for growing keys, for one that has not begun. A waiting connection may be
        evicted."""
        found, until_s = self._served.get(key), time.monotonic() + self._grow_s
        while found is None and is_growing_key(key) and self._may_wait(connection, until_s):
            with self._news:
                self._news.wait_for(lambda: key in self._served, GROW_LOOK_S)
            found = self._served.get(key)
        if found is None:
            made = self._find(key)
            return None if made is None else (memoryview(made), True)
        view, growth = found
        if growth is None or end > len(view):
            return view, True
        while not (there := growth.wait(end, GROW_LOOK_S)) and not growth.failed:
            if not self._may_wait(connection, until_s):
                break
        connection.idle = False
        return view, there

    def _may_wait(self, connection: _Connection, until_s: float) -> bool:
        connection.idle = time.monotonic() < until_s and not self._closed.is_set()
        return connection.idle


def _port_of(listener: socket.socket | None) -> int:
    return int(listener.getsockname()[1]) if listener is not None else 0


def _host_of(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except (OSError, IndexError):  # it has ended, or is not a TCP connection
        return ""


def _started(thread: threading.Thread) -> bool:
    """Start the thread. False: the limit of threads is reached, perhaps only for a moment."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def _least_wanted(connections: list[_Connection]) -> _Connection | None:
    """The connection to evict: the oldest that is not greeted, or else the oldest idle one, of the
    host that has the most of these."""
    strangers = [each for each in connections if not each.greeted]
    candidates = strangers or [each for each in connections if each.idle]
    if not candidates:
        return None
    hosts = Counter(each.host for each in candidates)
    host, _ = hosts.most_common(1)[0]
    return next(each for each in candidates if each.host == host)


def advertised(host: str, advertise: str, port: int) -> Address:
    """The address for other racks: `advertise`, or else `host` if it names one machine."""
    if not advertise and host in ("", "*", "0.0.0.0", "::"):
        remedy = "Set it to the name or address under which other racks reach this machine."
        raise ConfigError(
            "advertise", advertise, f"host {host!r} is not an address that others can use", remedy
        )
    return Address(advertise or host, port)
