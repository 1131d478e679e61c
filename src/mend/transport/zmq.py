"""The control plane over ZeroMQ: one ROUTER receives, and one DEALER per peer sends. Never blocks.

Why IMMEDIATE and a separate `early` queue: by default a DEALER queues frames for a dead peer up to
SNDHWM and then drops *new* ones, so a peer that returns would first get the oldest thousand frames.
With IMMEDIATE=1, libzmq queues only on an open connection and discards the queue with it, and
`send` correctly returns False without one. But the first frames after `connect`, before the end of
the handshake, would also be dropped. They wait in a short queue that discards the oldest. It is
used once per address.

Why no ZeroMQ heartbeats: an I/O thread answers them even if the process hangs, and they cut a
healthy connection if one large frame takes longer than their time-out. The heartbeats of the
protocol detect death. TCP_MAXRT and CONNECT_TIMEOUT only make sure that a repaired link is used
within about two seconds, and not after the kernel's backed-off retransmissions.

With secrets, every connection uses CURVE. The server's key is pinned. The client's key identifies
its process, so every frame comes with the `Peer` that sent it. While a secret is being replaced, a
process connects once per secret, because a server has only one key pair, and uses the connection
that opens.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import zmq

from mend.errors import AddressInUse, ConfigError, TransportError, ensure
from mend.transport.listeners import open_listener
from mend.transport.probe import host_and_port
from mend.transport.security import CurveKeys, Secrets
from mend.transport.tunnel import Tunnel
from mend.transport.zap import Strangers, Zap, peer_of, pin, protect
from mend.types import Address, Peer

INBOX_FRAMES_MAX = 16
"""Limit of the unread frames per connection. Further ones wait in the kernel's buffers, which are
bounded in bytes, and then at the sender."""

OUTBOX_FRAMES_MAX = 64
"""Limit of the unsent frames per peer, not less than EARLY_FRAMES_MAX. Every state is whole and
repeated, so older frames are out of date, and cost memory (up to 8 MiB each) and time to read."""

EARLY_FRAMES_MAX = 64
EARLY_BYTES_MAX = 1 << 20
FAREWELL_MS = 300
HANDSHAKE_MS = 5_000
RECONNECT_MS_MIN, RECONNECT_MS_MAX = 100, 2_000
RECONNECT_MS_REPLACING = 1_000
"""Used while a secret is being replaced: only one of the connections to a peer has its key. Each
attempt of the others is a failed handshake there, which the peer counts as a stranger's."""

CONNECT_MS_MAX = 2_000
CONNECTIONS_MAX = 100
"""Limit of the connections that wait to be accepted."""
UNACKED_MS_MAX = 5_000
CURVE_BYTES = 33
"""Bytes that CURVE adds to a frame: the name of its command, a nonce, flags and a seal."""

REPLIES_MAX = 2
"""Limit of the unsent answers per client connection; further ones are dropped."""

FRAMES_PER_TURN, BYTES_PER_TURN = 64, 8 << 20
"""Limit of one turn of reading, after which the loop runs other tasks. A turn lasts FLOOD_REST_S,
even if the inbox is empty in between, because a flood may arrive in small pieces."""

FLOOD_REST_S = 0.01
"""Pause of the inbox after a turn that has reached its limit. A peer that floods it makes the loop
read at most 6,400 frames a second; further ones wait at the sender. Connections are read in
rotation, so a frame of another peer waits for at most one pause per 64 flooding connections."""

_DONTWAIT, _POLLIN, _POLLOUT = int(zmq.DONTWAIT), int(zmq.POLLIN), int(zmq.POLLOUT)
"""Plain integers, because arithmetic on pyzmq's enums runs Python code for every frame."""


class Received(NamedTuple):
    """A frame, the connection that it arrived over, and the peer whose key that connection has
    proven (None: the sideband has no keys)."""

    frame: bytes
    route: bytes
    sender: Peer | None
    part: zmq.Frame

    def host(self) -> str:
        """The numeric address of the machine at the other end of the connection."""
        return cast(str, self.part.get("Peer-Address"))


@dataclass(slots=True)
class _Early:
    """Frames for one peer that wait for the first connection."""

    frames: deque[bytes] = field(default_factory=deque)
    bytes_held: int = 0

    def hold(self, frame: bytes) -> bool:
        """Keep a frame for the first connection; beyond the limits the oldest frames are
        dropped."""
        if len(frame) > EARLY_BYTES_MAX:
            return False
        self.frames.append(frame)
        self.bytes_held += len(frame)
        while len(self.frames) > EARLY_FRAMES_MAX or self.bytes_held > EARLY_BYTES_MAX:
            self.bytes_held -= len(self.frames.popleft())
        return True

    def take_all(self) -> list[bytes]:
        frames = list(self.frames)
        self.frames.clear()
        self.bytes_held = 0
        return frames


@dataclass(slots=True)
class _Outgoing:
    """A connection to one peer. `opened`: it was established once, and is not watched any more."""

    socket: zmq.Socket[bytes]
    address: str
    early: _Early
    opened: bool = False


class ZmqSideband:
    """Sends and receives small frames, best effort. Create, use and close it in one asyncio loop.

    `bind`: `tcp://host:port`; port 0 or `*` chooses a free one, which `address` has.
    `frame_bytes_max`: longer frames are not sent, and a peer that sends one is disconnected.
    `dropped` counts messages of several frames. `secrets`: only members of the job can connect, and
    this process connects only to members. `ranks`: number of ranks of this rack, which its leader
    accepts. `socks_proxy`: for all peers except those of rack `direct`.

    Raises AddressInUse if the port is taken, ConfigError if `bind` is not an address of this
    machine.
    """

    def __init__(
        self,
        bind: str,
        *,
        frame_bytes_max: int = 8 << 20,
        secrets: Secrets | None = None,
        ranks: int = 1,
        socks_proxy: str = "",
        direct: int = -1,
    ) -> None:
        self._proxy = Address(*host_and_port(socks_proxy)) if socks_proxy else None
        self._direct = direct
        self._tunnels: dict[Peer, Tunnel] = {}
        self._loop = asyncio.get_running_loop()
        self._frame_bytes_max = frame_bytes_max
        self._context = zmq.Context()  # a separate one, so that close can wait for thread and port
        self._outgoing: dict[Peer, tuple[_Outgoing, ...]] = {}
        self._take: Callable[[Received], None] | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._ready: deque[Received] = deque()
        self._armed = False
        self._watched = False
        self._resting: asyncio.TimerHandle | None = None
        self._turn_ends_s, self._frames_left, self._bytes_max = 0.0, 0, 0
        self._closed = False
        self._replied = False
        self._diverted: tuple[bytes, Callable[[bytes, bytes], None]] | None = None
        self.dropped = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self._zap: Zap | None = None
        self._ways: list[tuple[CurveKeys, CurveKeys] | None] = [None]
        if secrets is not None:
            self._zap = Zap(self._context, secrets.guests(ranks))
            self._ways = [(each.client(secrets.me), each.server()) for each in secrets.all]
        try:
            self._inbox = self._bind(bind, secrets)
        except BaseException:
            if self._zap is not None:
                self._zap.close()
            self._context.destroy(linger=0)
            raise
        self._strangers = Strangers(self._inbox) if secrets is not None else None
        self._descriptor = int(self._inbox.fileno())
        self.address: str = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def strangers(self) -> int:
        """Failed handshakes of clients without a key of this job."""
        return self._strangers.count if self._strangers is not None else 0

    def _bind(self, bind: str, secrets: Secrets | None) -> zmq.Socket[bytes]:
        where = _numeric(bind)
        inbox = self._socket(zmq.ROUTER, ipv6="[" in where)
        most = self._frame_bytes_max
        if secrets is not None:
            protect(inbox, secrets.own.server())
            most += CURVE_BYTES
        inbox.setsockopt(zmq.RCVHWM, INBOX_FRAMES_MAX)
        inbox.setsockopt(zmq.MAXMSGSIZE, most)
        inbox.setsockopt(zmq.ROUTER_MANDATORY, 1)  # so that `reply` gets errors
        inbox.setsockopt(zmq.SNDHWM, REPLIES_MAX)
        inbox.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        try:
            self._listener = _listener(where)
            if self._listener is not None:
                inbox.setsockopt(zmq.USE_FD, self._listener.fileno())
            inbox.bind(where)
        except (zmq.ZMQError, OSError) as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(
                    f"sideband address={bind!r}: the port is taken. Stop the process that holds it "
                    "(`ss -ltnp` names it), or choose another port.",
                    (int(port),) if (port := where.rpartition(":")[2]).isdigit() else (),
                ) from error
            rule = f"cannot be bound ({error})"
            remedy = "Give tcp://host:port with a host of this machine."
            raise ConfigError("sideband address", bind, rule, remedy) from error
        return inbox

    def _socket(self, kind: int, *, ipv6: bool) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, FAREWELL_MS)
        made.setsockopt(zmq.IPV6, int(ipv6))
        made.setsockopt(zmq.TCP_KEEPALIVE, 1)
        made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        made.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
        made.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        made.setsockopt(zmq.TCP_MAXRT, UNACKED_MS_MAX)
        return made

    def connect(self, peer: Peer, address: str) -> None:
        """Connect to `peer`. An existing connection is kept, or replaced if its address differs.

        Raises ConfigError if `address` is not `tcp://host:port` (IPv6 literals in brackets; libzmq
        looks names up as IPv4, again at each reconnect), TransportError if this process can open no
        more sockets.
        """
        known = self._outgoing.get(peer)
        if known is not None and known[0].address == address:
            return
        ensure(not self._closed, "connect after close", peer=peer)
        made: list[_Outgoing] = []
        early, tunnel = _Early(), cast(Tunnel | None, None)
        try:
            if self._proxy is not None and peer.rack != self._direct:
                tunnel = Tunnel(self._proxy, Address(*host_and_port(address)))
            at = tunnel.address if tunnel is not None else address
            made.extend(_Outgoing(self._way(peer, at, k), address, early) for k in self._ways)
        except BaseException:
            if tunnel is not None:
                tunnel.close()
            for out in made:
                out.socket.close(linger=0)
            raise
        self._disconnect(peer)
        if tunnel is not None:
            self._tunnels[peer] = tunnel
        self._outgoing[peer] = tuple(made)
        for out in made:
            self._loop.add_reader(out.socket.fileno(), functools.partial(self._flush_early, out))
            self._flush_early(out)  # also arms the descriptor, which is edge-triggered

    def _way(
        self, peer: Peer, address: str, keys: tuple[CurveKeys, CurveKeys] | None
    ) -> zmq.Socket[bytes]:
        try:
            outbox = self._socket(zmq.DEALER, ipv6="[" in address)
        except zmq.ZMQError as error:
            raise TransportError(
                f"sideband: no socket for {peer} at {address!r} besides {len(self._outgoing)} "
                f"others ({error}). Raise the limit of open files (ulimit -n), or find out which "
                "peers these are."
            ) from error
        if keys is not None:
            pin(outbox, *keys)
        outbox.setsockopt(zmq.SNDHWM, OUTBOX_FRAMES_MAX)
        outbox.setsockopt(zmq.IMMEDIATE, 1)
        replacing = len(self._ways) > 1
        outbox.setsockopt(
            zmq.RECONNECT_IVL, RECONNECT_MS_REPLACING if replacing else RECONNECT_MS_MIN
        )
        outbox.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        outbox.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS_MAX)
        outbox.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        try:
            outbox.connect(address)
        except zmq.ZMQError as error:
            outbox.close(linger=0)
            remedy = "Give tcp://host:port."
            raise ConfigError(
                f"address of {peer}", address, f"refused ({error})", remedy
            ) from error
        return outbox

    def _disconnect(self, peer: Peer) -> None:
        if (tunnel := self._tunnels.pop(peer, None)) is not None:
            self._loop.call_later(FAREWELL_MS / 1000, tunnel.close)
        for gone in self._outgoing.pop(peer, ()):
            if not gone.opened:
                self._loop.remove_reader(gone.socket.fileno())
            gone.socket.close()

    def _flush_early(self, out: _Outgoing) -> None:
        """Once the connection is established, send the frames that waited for it and stop
        watching it."""
        if out.opened or not _events(out.socket) & _POLLOUT:
            return
        self._loop.remove_reader(out.socket.fileno())
        out.opened = True
        for frame in out.early.take_all():
            self._send_now(out, frame)

    def send(self, peer: Peer, frame: bytes) -> bool:
        """Queue one frame. Returns False if the peer is unknown, the frame is too large, or there
        is no connection or no room now."""
        ways = self._outgoing.get(peer)
        if ways is None or len(frame) > self._frame_bytes_max:
            return False
        opened = False
        for out in ways:
            self._flush_early(out)
            if out.opened and self._send_now(out, frame):
                return True
            opened = opened or out.opened
        return not opened and ways[0].early.hold(frame)

    def _send_now(self, out: _Outgoing, frame: bytes) -> bool:
        try:
            out.socket.send(frame, _DONTWAIT)
        except zmq.Again:
            return False
        self.bytes_sent += len(frame)
        return True

    def divert(self, prefix: bytes, take: Callable[[bytes, bytes], None]) -> None:
        """Give frames that begin with `prefix` to `take(route, frame)` instead of `receive`. `take`
        must not raise. `route`: for `reply`."""
        self._diverted = prefix, take

    def reply(self, route: bytes, frame: bytes) -> bool:
        """Queue one frame for the connection that a diverted frame arrived over. Never blocks.
        Returns False if it is closed, or its client does not read its frames."""
        if self._push(route, frame):
            return False
        self._replied = True
        self.bytes_sent += len(frame)
        return True

    def is_connected(self, route: bytes) -> bool:
        """Whether the connection that a frame arrived over is still open, as far as this process
        knows. Sends an empty frame to find out, which no sideband reads."""
        return self._push(route, b"") in (0, errno.EAGAIN)

    def _push(self, route: bytes, frame: bytes) -> int:
        """Queue a frame. Returns an errno, or 0."""
        wrong = 0
        try:
            self._inbox.send_multipart([route, frame], _DONTWAIT)
        except zmq.ZMQError as error:
            wrong = error.errno or errno.EIO
        # Sending, even if it fails, consumes the descriptor's edge of frames that have arrived.
        if self._armed and _events(self._inbox) & _POLLIN:
            self._loop.call_soon(self._on_readable)
        return wrong

    def hear(self, take: Callable[[Received], None]) -> None:
        """Give each frame to `take` from now on, on the loop. It must not raise, nor close this
        sideband. Until then, frames wait in libzmq's queues, which are bounded."""
        self._take = take
        self._listen()

    async def receive(self) -> bytes:
        """The next frame of any peer. One caller at a time. Raises TransportError once closed."""
        return (await self.receive_from()).frame

    async def receive_from(self) -> Received:
        """The next frame and its origin. Further frames that the same turn has read wait for the
        next call; nothing more is read until then."""
        ensure(self._waiting is None, "two tasks receive on one sideband")
        while not self._ready and not self._closed:
            self._waiting = self._loop.create_future()
            self.hear(self._keep)
            try:
                await self._waiting
            finally:
                self._waiting = self._take = None
        if self._closed:
            raise TransportError("sideband: closed while receiving. Cancel the receiver first.")
        return self._ready.popleft()

    def _keep(self, received: Received) -> None:
        self._ready.append(received)
        self._take = None
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _listen(self) -> None:
        """Read the frames that have arrived, and those that will. `_armed`: there was none, and the
        descriptor signals the next."""
        if not (self._armed or self._resting or self._closed):
            self._watch()
            self._on_readable()

    def _on_readable(self) -> None:
        """Read and handle frames within the wake-up that they cause, and keep the descriptor
        registered, because most of the cost of a heartbeat is that of a wake-up."""
        if self._resting is not None:
            return
        self._armed = False
        if self._take is None:
            self._unwatch()  # without a receiver, frames stay in libzmq's queues
        elif self._read(self._take):
            self._armed = True
        else:
            self._unwatch()  # new connections would also signal
            self._resting = self._loop.call_later(FLOOD_REST_S, self._rested)

    def _rested(self) -> None:
        self._resting = None
        self._listen()

    def _read(self, take: Callable[[Received], None]) -> bool:
        """Read what has arrived, up to the limits of the turn. Returns whether that was all.

        libzmq's descriptor is edge-triggered, so waiting on it is correct only after everything was
        read. After each frame the inbox is asked for more, because an EAGAIN exception costs as
        much as a frame.
        """
        inbox, keyed = self._inbox, self._zap is not None
        prefix, divert = self._diverted or (b"", None)
        if (now_s := self._loop.time()) >= self._turn_ends_s:
            self._turn_ends_s, self._frames_left = now_s + FLOOD_REST_S, FRAMES_PER_TURN
            self._bytes_max = self.bytes_received + BYTES_PER_TURN
        while self._frames_left > 0 and self.bytes_received < self._bytes_max:
            try:
                route = inbox.recv(_DONTWAIT)  # identifies the sender's connection
            except zmq.Again:
                return True
            self._frames_left -= 1
            part = inbox.recv(_DONTWAIT, copy=False)
            if part.more:
                self.dropped += 1
                while inbox.get(zmq.RCVMORE):
                    inbox.recv(_DONTWAIT)
            else:
                frame = part.bytes
                self.bytes_received += len(frame)
                if divert is not None and frame.startswith(prefix):
                    divert(route, frame)
                else:
                    sender = peer_of(cast(str, part.get("User-Id"))) if keyed else None
                    take(Received(frame, route, sender, part))
            if not _events(inbox) & _POLLIN:
                return True
        return False

    def _watch(self) -> None:
        if not self._watched:
            self._loop.add_reader(self._descriptor, self._on_readable)
            self._watched = True

    def _unwatch(self) -> None:
        if self._watched:
            self._loop.remove_reader(self._descriptor)
            self._watched = False

    def close(self) -> None:
        """Wait up to FAREWELL_MS for queued frames to be sent, then free port and thread.
        Idempotent."""
        if self._closed:
            return
        self._closed, self._take = True, None
        self._unwatch()
        if self._resting is not None:
            self._resting.cancel()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        tunnels = list(self._tunnels.values())
        self._tunnels.clear()
        for peer in tuple(self._outgoing):
            self._disconnect(peer)
        if self._strangers is not None:
            self._strangers.close()
        self._inbox.close(linger=FAREWELL_MS if self._replied else 0)
        if self._listener is not None:
            self._listener.detach()  # libzmq closes it
        if self._zap is not None:
            self._zap.close()
        self._context.term()
        for tunnel in tunnels:  # only now, after the last frames
            tunnel.close()


def readable(sock: zmq.Socket[bytes]) -> bool:
    """Whether a frame can be read."""
    return bool(_events(sock) & _POLLIN)


def _events(sock: zmq.Socket[bytes]) -> int:
    """What the socket is ready for. The call also lets libzmq work, and re-arms its descriptor."""
    return cast(int, sock.get(zmq.EVENTS))


def _listener(where: str) -> socket.socket | None:
    """The socket for libzmq to listen on. None: `where` names an interface, which libzmq
    resolves."""
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    number = "0.0.0.0" if host == "*" else host.strip("[]")
    try:
        found = socket.getaddrinfo(
            number, 0 if port == "*" else port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except socket.gaierror:
        return None
    family, _, _, _, address = found[0]
    listener = open_listener(family, address, CONNECTIONS_MAX)
    listener.setblocking(False)
    return listener


def _numeric(bind: str) -> str:
    """`bind` with a numeric host, because libzmq binds numeric addresses and interfaces only."""
    host, colon, port = bind.removeprefix("tcp://").rpartition(":")
    if not bind.startswith("tcp://") or not colon or not (port.isdigit() or port == "*"):
        remedy = "Write it like tcp://10.0.0.1:5555."
        raise ConfigError("sideband address", bind, "must be tcp://host:port", remedy)
    if host in ("*", "") or host.startswith("["):
        return f"tcp://{host or '*'}:{port}"
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return bind  # an interface name, or nothing that bind will accept either
    family, *_, where = min(addresses, key=lambda info: info[0] != socket.AF_INET)
    number = str(where[0])
    return f"tcp://[{number}]:{port}" if family == socket.AF_INET6 else f"tcp://{number}:{port}"
