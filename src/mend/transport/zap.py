"""Decides who may connect to a sideband with keys: the ZAP handler (RFC 27) of libzmq.

CURVE alone proves only that a client has some key pair. At each handshake libzmq asks over an
inproc socket whether this client may connect, and admits every client if nothing listens there. So
the sockets of a sideband enforce their domain: without an answer no client is admitted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import zmq
from zmq.utils import z85

from mend.transport.security import CurveKeys
from mend.types import Peer

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"mend"

COUNTED_MAX = 1_000
"""Limit of the failed handshakes that are counted."""

ANSWERS_PER_TURN = 16
FLOOD_REST_S = 0.01
"""Pause after ANSWERS_PER_TURN answers in a row: a flood of handshakes costs the loop at most 1,600
answers a second, and libzmq's thread as many handshakes. Further ones wait in its queue."""

HANDSHAKE_FAILED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_VERSION = b"1.0"
_POLLIN, _DONTWAIT = int(zmq.POLLIN), int(zmq.DONTWAIT)


class Zap:
    """Answers for one context, on the event loop. `guests`: public key -> its owner. Create it
    before the socket that it protects, and close it after that."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], guests: Mapping[bytes, Peer]
    ) -> None:
        self._guests = guests
        self._resting: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self._watch()

    def _watch(self) -> None:
        self._resting = None
        self._loop.add_reader(self._socket.fileno(), self._answer)
        self._answer()  # the descriptor is edge-triggered

    def _answer(self) -> None:
        for _ in range(ANSWERS_PER_TURN):
            if not cast(int, self._socket.get(zmq.EVENTS)) & _POLLIN:
                return
            frames = self._socket.recv_multipart(_DONTWAIT)
            if len(frames) != 7:  # another mechanism, which has no key
                frames = [_VERSION, frames[1] if len(frames) > 1 else b"", b"", b"", b"", b"", b""]
            _, request, domain, _, _, mechanism, key = frames
            guest = None
            if (domain, mechanism, len(key)) == (DOMAIN, b"CURVE", 32):
                guest = self._guests.get(z85.encode(key))
            code, text, name = (b"400", b"not a key of this job", b"")
            if guest is not None:
                code, text, name = (b"200", b"OK", name_of(guest))
            self._socket.send_multipart([_VERSION, request, code, text, name, b""], _DONTWAIT)
        self._loop.remove_reader(self._socket.fileno())
        self._resting = self._loop.call_later(FLOOD_REST_S, self._watch)

    def close(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)


class Strangers:
    """Counts failed handshakes at a protected socket: clients with another key, or without one.
    Stops at COUNTED_MAX, because each takes some time of the loop."""

    def __init__(self, server: zmq.Socket[bytes]) -> None:
        self.count = 0
        self._server, self._loop = server, asyncio.get_running_loop()
        self._monitor: zmq.Socket[bytes] | None = server.get_monitor_socket(HANDSHAKE_FAILED)
        self._loop.add_reader(self._monitor.fileno(), self._take)
        self._take()

    def _take(self) -> None:
        while (monitor := self._monitor) and cast(int, monitor.get(zmq.EVENTS)) & _POLLIN:
            monitor.recv_multipart(_DONTWAIT)
            self.count += 1
            if self.count >= COUNTED_MAX:
                self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor.fileno())
            self._server.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None


def name_of(guest: Peer) -> bytes:
    """The `User-Id` that libzmq adds to each frame of this guest."""
    return b"%d.%d" % guest


def peer_of(name: str) -> Peer:
    """The guest of a `User-Id`."""
    rack, _, rank = name.partition(".")
    return Peer(int(rack), int(rank))


def protect(server: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Make a binding socket accept only the clients that `Zap` admits."""
    server.setsockopt(zmq.CURVE_SERVER, 1)
    server.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    server.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    server.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def pin(client: zmq.Socket[bytes], own: CurveKeys, server: CurveKeys) -> None:
    """Make a connecting socket verify the server's key and prove its own."""
    client.setsockopt(zmq.CURVE_SERVERKEY, server.public)
    client.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    client.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
