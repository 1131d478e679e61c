"""The wire format of the bulk lane: structs, limits, socket options. No threads.

A connection opens with HELLO. Then requests go one way and replies the other, in the same order
(bulk_link describes sealed connections):

    HELLO    magic, wire version, token (16 bytes that identify the job)
    REQUEST  magic, key, offset, length
    REPLY    magic, status, total bytes of the payload, length, xxh3_128 of the bytes; the bytes

Every length is fixed, or checked before anything is read, so malformed data cannot make either end
allocate memory.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import time

import xxhash

from mend.errors import ConfigError
from mend.types import KEY_BYTES

HELLO_MAGIC, REQUEST_MAGIC, REPLY_MAGIC = b"mndH", b"mndQ", b"mndA"
WIRE_VERSION = 2
TOKEN_BYTES = 16

HELLO = struct.Struct(f"!4sB{TOKEN_BYTES}s")
REQUEST = struct.Struct(f"!4s{KEY_BYTES}sQI")
REPLY = struct.Struct("!4sBQI16s")

OK, GONE, BAD = 0, 1, 2
"""OK: bytes follow. GONE: not served (any more). BAD: the range is not in the payload; the
connection is closed."""

LENGTH_MAX = 64 << 20
"""Limit of the bytes of one request."""

_TIMEVAL = struct.Struct("@ll")


def checksum_of(view: memoryview | bytes | bytearray) -> str:
    """xxh3_128 of all bytes as 32 hex digits: the `checksum` of `BulkLane.fetch`."""
    return xxhash.xxh3_128_hexdigest(view)


def hello_bytes(token: bytes) -> bytes:
    """The first bytes of a connection."""
    if len(token) != TOKEN_BYTES:
        remedy = "Take the first 16 bytes of a digest of the job id."
        raise ConfigError("token", token, f"must be {TOKEN_BYTES} bytes", remedy)
    return HELLO.pack(HELLO_MAGIC, WIRE_VERSION, token)


def lane_token(job: str, rank: int) -> bytes:
    """The token in the HELLO of connections to this rank of any rack. It distinguishes jobs, and
    ranks that share a port. It is not secret."""
    of_rank = b" rank %d" % rank if rank else b""
    return hashlib.sha256(b"mend lane " + job.encode() + of_rank).digest()[:TOKEN_BYTES]


def tune(sock: socket.socket, *, receive_ns: int, send_ns: int, dead_ns: int) -> None:
    """Set socket options: small packets are sent at once, blocking calls have time-outs, and a
    connection ends if its peer is silent for `dead_ns`.

    The socket must be blocking: MSG_WAITALL works with time-outs of the kernel (SO_RCVTIMEO), but
    not with those of Python.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, dead_ns // 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(receive_ns))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_ns))


def _timeval(ns: int) -> bytes:
    """`ns` as a struct timeval; 0 means no time-out."""
    return _TIMEVAL.pack(ns // 1_000_000_000, ns % 1_000_000_000 // 1000)


def read_exactly(sock: socket.socket, into: memoryview) -> None:
    """Fill `into`. Raises EOFError if the other end closes first, OSError for errors of the socket.

    With MSG_WAITALL the kernel loops: one call per chunk, and the GIL is released for all of it.
    """
    filled = 0
    while filled < len(into):
        got = sock.recv_into(into[filled:], flags=socket.MSG_WAITALL)
        if got == 0:
            raise EOFError(f"closed after {filled} of {len(into)} bytes")
        filled += got


def read_within(sock: socket.socket, into: memoryview, until_ns: int) -> None:
    """As `read_exactly`, for a socket with a short receive time-out. Raises TimeoutError after the
    monotonic time `until_ns`, which a sender of single bytes cannot extend."""
    filled = 0
    while filled < len(into):
        if time.monotonic_ns() >= until_ns:
            raise TimeoutError(f"{filled} of {len(into)} bytes within the time")
        try:
            got = sock.recv_into(into[filled:])
        except BlockingIOError:
            continue
        if got == 0:
            raise EOFError(f"closed after {filled} of {len(into)} bytes")
        filled += got


def is_quiet(sock: socket.socket) -> bool:
    """Whether an idle connection is open, as far as this side knows. False if the peer has closed
    it, or has sent bytes that were not requested."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def shut(sock: socket.socket) -> None:
    """Wake every thread that is blocked in a call on `sock`, which `close` does not do."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # never connected, or closed already: no thread waits
