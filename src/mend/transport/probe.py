"""Probes the network: names, routes, network cards, and whether a port answers.

Sends no payload; `knock` opens a connection, reads a greeting and closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import socket
import struct
import time
from typing import Literal, NamedTuple

from mend.errors import ConfigError
from mend.transport.socks import connect_through
from mend.types import Address

Answer = Literal["open", "refused", "silent", "no route", "no such name"]
"""The result of a knock. silent: the port neither accepted nor refused in time."""

GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"
"""The first bytes of a ZeroMQ socket (ZMTP 2 and later); the eight in the middle may differ."""

GREETING_S = 0.5
_SIOCGIFADDR = 0x8915
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN)


class Knock(NamedTuple):
    """The answer of a port. `speaks`: it greeted as ZeroMQ, as a mend sideband does."""

    answer: Answer
    speaks: bool
    detail: str = ""


def host_and_port(address: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`. Raises ConfigError."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not colon or not port.isdecimal():
        rule, remedy = "must be tcp://host:port", "Write it like tcp://10.0.0.1:5555."
        raise ConfigError("address", address, rule, remedy)
    return host.strip("[]"), int(port)


def numbers_of(host: str) -> tuple[str, ...]:
    """The addresses that a name resolves to on this machine, in the order of the resolver; a
    numeric address resolves to itself. Empty: the name does not resolve."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(where[0]).partition("%")[0] for *_, where in addresses))


def source_to(number: str) -> str | None:
    """The address of this machine from which packets to `number` would leave. None: no route.

    Connecting a datagram socket consults the routing table and sends nothing.
    """
    family = socket.AF_INET6 if ":" in number else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((number, 9))
            return str(asking.getsockname()[0])
    except OSError:
        return None


def cards() -> dict[str, str | None]:
    """Network interface -> its first IPv4 address, or None."""
    addresses: dict[str, str | None] = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            addresses[name] = _number_of(asking, name)
    return addresses


def _number_of(asking: socket.socket, name: str) -> str | None:
    request = struct.pack("256s", name.encode()[:15])
    try:
        answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


async def knock(host: str, port: int, limit_s: float) -> Knock:
    """Try one TCP connection, to find out whether something listens. Never raises for errors of
    the network."""
    loop = asyncio.get_running_loop()
    try:
        looked = await asyncio.wait_for(
            loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), limit_s
        )
    except (OSError, UnicodeError, TimeoutError) as error:
        return Knock("no such name", False, str(error))
    number = str(looked[0][4][0])
    try:
        connecting = asyncio.open_connection(number, port)
        reader, writer = await asyncio.wait_for(connecting, limit_s)
    except TimeoutError:
        return Knock("silent", False, f"nothing in {limit_s:g} s")
    except ConnectionRefusedError as error:
        return Knock("refused", False, str(error))
    except OSError as error:
        answer: Answer = "no route" if error.errno in _NO_ROUTE else "silent"
        return Knock(answer, False, str(error))
    try:
        greeting = await asyncio.wait_for(reader.readexactly(len(GREETING)), GREETING_S)
    except (OSError, EOFError, TimeoutError):
        greeting = b""
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), GREETING_S)
    return Knock("open", _is_greeting(greeting))


def knock_through(proxy: Address, to: Address, limit_s: float) -> Knock:
    """`knock` through a SOCKS5 proxy. Blocks."""
    try:
        with socket.create_connection(proxy, timeout=limit_s) as made:
            try:
                connect_through(made, to)
            except ConnectionRefusedError as error:
                return Knock("refused", False, str(error))
            made.settimeout(min(limit_s, GREETING_S))
            return Knock("open", _is_greeting(_greeting_of(made)))
    except OSError as error:
        return Knock("silent", False, f"through the proxy at {proxy.host}:{proxy.port}: {error}")


def _greeting_of(made: socket.socket) -> bytes:
    greeting = b""
    with contextlib.suppress(OSError):
        while len(greeting) < len(GREETING) and (piece := made.recv(len(GREETING) - len(greeting))):
            greeting += piece
    return greeting


def _is_greeting(greeting: bytes) -> bool:
    """Whether the other end greets as ZeroMQ."""
    return len(greeting) == len(GREETING) and (greeting[0], greeting[-1]) == (
        GREETING[0],
        GREETING[-1],
    )


def trip_ns(to: Address, limit_s: float, proxy: Address | None = None) -> int | None:
    """The time that a TCP connection to `to` takes: one round trip. With a SOCKS5 proxy, the time
    from there: two round trips to the proxy and one beyond it. None: no connection within the
    limit."""
    begun_ns = time.perf_counter_ns()
    try:
        with socket.create_connection(proxy or to, timeout=limit_s) as made:
            if proxy is not None:
                begun_ns = time.perf_counter_ns()
                connect_through(made, to)
            return time.perf_counter_ns() - begun_ns
    except (OSError, UnicodeError):
        return None
