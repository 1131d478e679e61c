"""A SOCKS5 client (RFC 1928) without a password. Connections through the proxy are encrypted and
authenticated with the key of the job."""

from __future__ import annotations

import ipaddress
import socket
import struct

from mend.types import Address

VERSION, NO_AUTHENTICATION, CONNECT = 5, 0, 1
IPV4, NAME, IPV6 = 1, 3, 4
NAME_BYTES_MAX = 255

REFUSED = 5
REASONS = {
    1: "it failed",
    2: "its rules forbid it",
    3: "it has no route to that network",
    4: "it cannot reach that host",
    5: "the connection was refused there",
    6: "the connection timed out there",
    7: "it does not connect for clients",
    8: "it does not know this kind of address",
}


def connect_through(proxy: socket.socket, to: Address) -> None:
    """Make the proxy at the other end of the socket connect to `to`. Afterwards the socket is that
    connection. The proxy resolves names. Raises ConnectionError (ConnectionRefusedError if the
    connection was refused behind the proxy), and other errors of the socket."""
    proxy.sendall(bytes((VERSION, 1, NO_AUTHENTICATION)))
    if _read(proxy, 2) != bytes((VERSION, NO_AUTHENTICATION)):
        raise ConnectionError("the proxy is not a SOCKS5 proxy, or wants a password")
    proxy.sendall(bytes((VERSION, CONNECT, 0)) + _name(to.host) + struct.pack("!H", to.port))
    version, reply, _, kind = _read(proxy, 4)
    if version != VERSION:
        raise ConnectionError("the proxy is not a SOCKS5 proxy")
    if reply != 0:
        reason = f"the SOCKS proxy did not connect: {REASONS.get(reply, f'reply {reply}')}"
        raise ConnectionRefusedError(reason) if reply == REFUSED else ConnectionError(reason)
    size = {IPV4: 4, IPV6: 16}.get(kind) or _read(proxy, 1)[0]
    _read(proxy, size + 2)  # the proxy's own address and port there


def _name(host: str) -> bytes:
    try:
        number = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        name = _encoded(host)
        if len(name) > NAME_BYTES_MAX:
            raise ConnectionError(f"a name of {len(name)} bytes is too long for SOCKS") from None
        return bytes((NAME, len(name))) + name
    return bytes((IPV4 if number.version == 4 else IPV6,)) + number.packed


def _encoded(host: str) -> bytes:
    try:
        return host.encode("idna")
    except UnicodeError as error:  # a part is empty or too long
        raise ConnectionError(f"{host!r} is not the name of a host: {error}") from None


def _read(sock: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes, and none of what follows."""
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("the proxy closed the connection")
        data += piece
    return data
