"""Asks the sidebands of a job for their status, without a thread.

There is one DEALER per address and accepted key. Queues stay short: a question is dropped while the
one before it has not left, and only ANSWERS_KEPT unread answers are kept.

With a SOCKS proxy there is a second DEALER that connects through it: a client may run in the
cluster of any rack, or in none, so it does not know which racks are behind the proxy.
"""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

import zmq
from zmq.utils.monitor import recv_monitor_message

from mend.errors import ConfigError
from mend.transport.probe import host_and_port
from mend.transport.security import CurveKeys, ways_of
from mend.transport.tunnel import Tunnel
from mend.transport.zap import HANDSHAKE_FAILED, pin
from mend.transport.zmq import (
    CONNECT_MS_MAX,
    RECONNECT_MS_MAX,
    RECONNECT_MS_MIN,
    UNACKED_MS_MAX,
    readable,
)
from mend.types import Address

PORT_MAX = 65_535
ANSWERS_KEPT = 8

_CONNECTED = int(zmq.EVENT_CONNECTED)
_SPEAKS = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_GONE = int(zmq.EVENT_DISCONNECTED)


class Way(Enum):
    """The state of the connection to an address.

    CLOSED: no connection. HUNG_UP: something listens there and closes connections at once. It is a
    sideband with another key, or no sideband. OPEN: something listens there. LOCKED: a sideband
    that needs a key where this client has none, or the other way round. SPEAKS: a sideband, or
    another ZeroMQ socket.
    """

    CLOSED = "closed"
    HUNG_UP = "hung-up"
    OPEN = "open"
    LOCKED = "locked"
    SPEAKS = "speaks"


@dataclass(slots=True)
class _Watched:
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    tunnelled: bool = False
    """Whether it connects to the near end of a tunnel, which says nothing about the far end."""
    way: Way = Way.CLOSED

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


class StatusClient:
    """Sends questions to any number of addresses and receives the answers. It must be closed.
    `secrets`: keys of the job or of its readers. `socks_proxy`: `tcp://host:port`, or empty. Raises
    ConfigError if it is malformed."""

    def __init__(
        self, answer_bytes_max: int, secrets: tuple[bytes, ...] = (), socks_proxy: str = ""
    ) -> None:
        self._proxy = Address(*host_and_port(socks_proxy)) if socks_proxy else None
        self._tunnels: dict[str, Tunnel] = {}
        self._keys: list[tuple[CurveKeys, CurveKeys] | None] = [None]
        if secrets:
            self._keys = [*ways_of(secrets)]
        self._answer_bytes_max = answer_bytes_max
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._watched: dict[str, list[_Watched]] = {}

    def watch(self, address: str) -> None:
        """Connect to `tcp://host:port`, unless that was done before. Raises ConfigError if it is
        not an address, TransportError if this process can open no tunnel to it."""
        if address in self._watched:
            return
        port = address.rpartition(":")[2]
        if port.isdecimal() and not 0 < int(port) <= PORT_MAX:  # ZeroMQ takes it modulo 65,536
            rule = f"the port must be 1..{PORT_MAX}"
            raise ConfigError("address", address, rule, "Give tcp://host:port.")
        opened: list[_Watched] = []
        try:
            opened.extend(self._open(address, keys) for keys in self._keys)
            if self._proxy is not None and not _is_loopback(address):
                tunnel = Tunnel(self._proxy, Address(*host_and_port(address)))
                self._tunnels[address] = tunnel
                near = tunnel.address
                opened.extend(self._open(near, keys, tunnelled=True) for keys in self._keys)
        except BaseException:
            for watched in opened:
                watched.close()
            if (made := self._tunnels.pop(address, None)) is not None:
                made.close()
            raise
        for watched in opened:
            self._poller.register(watched.socket, zmq.POLLIN)
            self._poller.register(watched.monitor, zmq.POLLIN)
        self._watched[address] = opened

    def _open(
        self, address: str, keys: tuple[CurveKeys, CurveKeys] | None, *, tunnelled: bool = False
    ) -> _Watched:
        socket = self._context.socket(zmq.DEALER)
        if keys is not None:
            pin(socket, *keys)
        options = {
            zmq.LINGER: 0,
            zmq.SNDHWM: 1,
            zmq.RCVHWM: ANSWERS_KEPT,
            zmq.MAXMSGSIZE: self._answer_bytes_max,
            zmq.IPV6: int("[" in address),
            zmq.CONNECT_TIMEOUT: CONNECT_MS_MAX,
            zmq.TCP_MAXRT: UNACKED_MS_MAX,
            zmq.RECONNECT_IVL: RECONNECT_MS_MIN,
            zmq.RECONNECT_IVL_MAX: RECONNECT_MS_MAX,
        }
        for name, value in options.items():
            socket.setsockopt(name, value)
        monitor = socket.get_monitor_socket(_CONNECTED | _SPEAKS | _GONE | HANDSHAKE_FAILED)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            _Watched(socket, monitor).close()
            raise ConfigError(
                "address", address, "is not an address", "Give tcp://host:port."
            ) from error
        return _Watched(socket, monitor, tunnelled)

    def keep(self, addresses: Collection[str]) -> None:
        """Close the connections to all other addresses."""
        for address in self._watched.keys() - set(addresses):
            for watched in self._watched.pop(address):
                self._poller.unregister(watched.socket)
                self._poller.unregister(watched.monitor)
                watched.close()
            if (tunnel := self._tunnels.pop(address, None)) is not None:
                tunnel.close()

    def way(self, address: str) -> Way:
        """The state at the end of the last `collect`."""
        order = list(Way)
        return max((each.way for each in self._watched[address]), key=order.index)

    def ask(self, address: str, frame: bytes) -> None:
        """Send a question. Never blocks; drops the question while the one before it has not
        left."""
        for each in self._watched[address]:
            with contextlib.suppress(zmq.Again):
                each.socket.send(frame, zmq.DONTWAIT)

    def collect(self, limit_s: float) -> list[tuple[str, bytes]]:
        """(address, frame) of the answers that have arrived, in order per address. Waits up to
        `limit_s` for the first."""
        end = time.monotonic() + limit_s
        answers: list[tuple[str, bytes]] = []
        while not answers:
            left_ms = max(0, int(1000 * (end - time.monotonic())))
            if not self._poller.poll(left_ms):
                return answers
            for address, watched in self._each():
                self._follow(watched)
                while readable(watched.socket):
                    frames = watched.socket.recv_multipart(zmq.DONTWAIT)
                    if len(frames) == 1:
                        answers.append((address, frames[0]))
        return answers

    def _each(self) -> list[tuple[str, _Watched]]:
        return [(address, each) for address, ways in self._watched.items() for each in ways]

    @staticmethod
    def _follow(watched: _Watched) -> None:
        while readable(watched.monitor):
            event = int(recv_monitor_message(watched.monitor, zmq.DONTWAIT)["event"])
            if event in (_GONE, _CONNECTED) and watched.way in (Way.LOCKED, Way.HUNG_UP):
                continue  # the refusal stands, although ZeroMQ connects again
            if event == _GONE and watched.way is Way.OPEN:
                watched.way = Way.HUNG_UP  # closed without a handshake
                continue
            connected = Way.CLOSED if watched.tunnelled else Way.OPEN
            ways = {_CONNECTED: connected, _SPEAKS: Way.SPEAKS}
            watched.way = Way.LOCKED if event & HANDSHAKE_FAILED else ways.get(event, Way.CLOSED)

    def close(self) -> None:
        """Idempotent."""
        for _, watched in self._each():
            watched.close()
        self._watched = {}
        self._context.destroy(linger=0)
        for tunnel in self._tunnels.values():
            tunnel.close()


def _is_loopback(address: str) -> bool:
    host, _ = host_and_port(address)
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
