"""The wire format of the bulk lane: structs, limits, socket options. No threads.

A connection opens with HELLO and then carries requests one way and replies the other, in order
(what seals change of it is in bulk_link):

    HELLO    magic, wire version, token (16 bytes: which job) REQUEST  magic, key, offset, length
    REPLY    magic, status, total bytes of the payload, length, xxh3_128 of what follows; then
    `length` bytes

Every length is fixed or limited before anything is read, so garbage cannot make either side
allocate.
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
"""OK: bytes follow. GONE: not (or no longer) served. BAD: not inside the payload; closes."""

LENGTH_MAX = 64 << 20
"""Most bytes one request may ask for."""

_TIMEVAL = struct.Struct("@ll")


def checksum_of(view: memoryview | bytes | bytearray) -> str:
    """xxh3_128 of all bytes as 32 hex digits: the `checksum` that `BulkLane.fetch` compares."""
    return xxhash.xxh3_128_hexdigest(view)


def hello_bytes(token: bytes) -> bytes:
    """The first bytes of a connection."""
    if len(token) != TOKEN_BYTES:
        remedy = "Take the first 16 bytes of a digest of the job id."
        raise ConfigError("token", token, f"must be {TOKEN_BYTES} bytes", remedy)
    return HELLO.pack(HELLO_MAGIC, WIRE_VERSION, token)


def lane_token(job: str, rank: int) -> bytes:
    """In the first bytes of a lane connection, between the same ranks of two racks. It keeps jobs
    apart, and ranks that share a port; it is no protection."""
    of_rank = b" rank %d" % rank if rank else b""
    return hashlib.sha256(b"mend lane " + job.encode() + of_rank).digest()[:TOKEN_BYTES]


def tune(sock: socket.socket, *, receive_ns: int, send_ns: int, dead_ns: int) -> None:
    """Small packets at once; blocking calls that give up; silent peers given up after `dead_ns`.

    The socket must be blocking: kernel time-outs (SO_RCVTIMEO) leave MSG_WAITALL usable, python's
    do not.
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
    """`ns` as a struct timeval; 0 waits for ever."""
    return _TIMEVAL.pack(ns // 1_000_000_000, ns % 1_000_000_000 // 1000)


def read_exactly(sock: socket.socket, into: memoryview) -> None:
    """Fill `into`. EOFError when the other side ends first, OSError as the kernel says.

    MSG_WAITALL leaves the loop to the kernel: one call per chunk, and the GIL is free for all of
    it.
    """
    filled = 0
    while filled < len(into):
        got = sock.recv_into(into[filled:], flags=socket.MSG_WAITALL)
        if got == 0:
            raise EOFError(f"closed after {filled} of {len(into)} bytes")
        filled += got


def read_within(sock: socket.socket, into: memoryview, until_ns: int) -> None:
    """As `read_exactly`, for a socket with a short receive time-out, until a monotonic time: a
    sender of single bytes cannot stretch it. Raises TimeoutError after it."""
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


def shut(sock: socket.socket) -> None:
    """Wake every thread that waits in a call on `sock` (close alone would not)."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # never connected, or closed already: no thread waits
