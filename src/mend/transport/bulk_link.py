"""The two ends of one lane connection, plain or sealed with the keys of the job.

A sealed connection opens with

    reader -> holder   HELLO (with a magic of its own), name of the secret, 32 random bytes
    holder -> reader   ANSWER: magic, 32 random bytes, a seal

From these both ends derive two keys for this connection only. Every request is then sealed as a
whole. The header of a reply has a seal instead of the checksum, and the bytes are sealed in pieces.
A seal covers the payload's key, the place in the payload and, through its count, the place in the
connection.

If payloads are not concealed, only the pieces differ: each is sent as plain bytes, followed by a
seal over them. The sealed header says which bytes they are, and their seals continue its count, so
no piece can be left out, moved or repeated.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import NamedTuple

import xxhash

from mend.transport.bulk_wire import (
    HELLO,
    HELLO_MAGIC,
    OK,
    REPLY,
    REPLY_MAGIC,
    REQUEST,
    REQUEST_MAGIC,
    WIRE_VERSION,
    read_exactly,
    read_within,
)
from mend.transport.security import (
    NAME_BYTES,
    RANDOM_BYTES,
    TAG_BYTES,
    BadSeal,
    Channel,
    Secret,
    Secrets,
)
from mend.types import SECOND

SEALED_MAGIC, OPEN_MAGIC = b"mndK", b"mndO"
"""Magics of connections with keys, whose payloads are concealed, or only authenticated. Both ends
must use the same one, so an attacker on the path cannot make one of them send plain bytes."""

PIECE_BYTES = 1 << 20
"""Size of a sealed piece. It stays in a core's cache between the seal and the socket. Both ends
take the interpreter's lock a few times per piece, for which a training thread that launches kernels
may have to wait."""

BATCH_PIECES = 2
"""Number of sealed pieces that are sent or read at once. Every connection keeps memory for them."""

_ROOM_BYTES = BATCH_PIECES * (PIECE_BYTES + TAG_BYTES)

REQUEST_NS_MAX = 5 * SECOND
"""Limit for receiving a greeting, or the rest of a request that has begun."""

_ANSWER = struct.Struct(f"!4s{RANDOM_BYTES}s{TAG_BYTES}s")
_PLACE = struct.Struct("!Q")
_TAGGED = REPLY.size - TAG_BYTES


class Reply(NamedTuple):
    """The header of a reply. `digest`: xxh3_128 of the bytes, or the seal of the header."""

    status: int
    total: int
    length: int
    digest: bytes


class ReaderEnd:
    """The reader's end of a connection. Raises EOFError if the other end closes it or is not a
    holder of this job, and OSError for errors of the socket."""

    def __init__(self, sock: socket.socket, token: bytes, secret: Secret | None) -> None:
        self.sock = sock
        self._channels: tuple[Channel, Channel] | None = None
        self._conceal = True
        if secret is None:
            sock.sendall(HELLO.pack(HELLO_MAGIC, WIRE_VERSION, token))
            return
        self._room = memoryview(bytearray(_ROOM_BYTES))
        self._conceal, magic = secret.conceal, _magic(secret.conceal)
        random = os.urandom(RANDOM_BYTES)
        sock.sendall(HELLO.pack(magic, WIRE_VERSION, token) + secret.name + random)
        answer = bytearray(_ANSWER.size)
        read_exactly(sock, memoryview(answer))
        answered, theirs, tag = _ANSWER.unpack(answer)
        self._channels = secret.lane(token, random, theirs)
        if answered != magic or not _opens(self._channels[1], tag, magic):
            raise EOFError("does not have the key of this job")

    def ask(self, key: bytes, offset: int, length: int) -> None:
        request = REQUEST.pack(REQUEST_MAGIC, key, offset, length)
        if self._channels is not None:
            sealed = bytearray(len(request) + TAG_BYTES)
            self._channels[0].seal(request, b"", memoryview(sealed))
            self.sock.sendall(sealed)
        else:
            self.sock.sendall(request)

    def header(self, key: bytes, offset: int) -> Reply:
        """Read the header of the reply to the request for these bytes."""
        header = bytearray(REPLY.size)
        read_exactly(self.sock, memoryview(header))
        magic, *rest = REPLY.unpack(header)
        reply = Reply(*rest)
        if magic != REPLY_MAGIC:
            raise EOFError("answered with something that is not a reply")
        if self._channels is not None:
            about = bytes(header[:_TAGGED]) + key + _PLACE.pack(offset)
            if not _opens(self._channels[1], reply.digest, about):
                raise EOFError("answered with something that no member of this job has sealed")
        return reply

    def body(self, key: bytes, offset: int, digest: bytes, into: memoryview) -> bool:
        """Fill `into`. Returns False if the bytes differ from those that were sent: close the
        connection."""
        if self._channels is None:
            read_exactly(self.sock, into)
            return bool(xxhash.xxh3_128_digest(into) == digest)
        channel = self._channels[1]
        if not self._conceal:
            return all(self._checked(channel, part) for _, part in _cut(into, PIECE_BYTES))
        for first, batch in _cut(into, BATCH_PIECES * PIECE_BYTES):
            pieces = _cut(batch, PIECE_BYTES)
            sealed = self._room[: len(batch) + len(pieces) * TAG_BYTES]
            read_exactly(self.sock, sealed)
            try:
                for start, part in pieces:
                    piece, sealed = sealed[: len(part) + TAG_BYTES], sealed[len(part) + TAG_BYTES :]
                    channel.open(piece, key + _PLACE.pack(offset + first + start), part)
            except BadSeal:
                return False
        return True

    def _checked(self, channel: Channel, part: memoryview) -> bool:
        tag = bytearray(TAG_BYTES)
        read_exactly(self.sock, part)
        read_exactly(self.sock, memoryview(tag))
        return _opens(channel, tag, part)


class HolderEnd:
    """The holder's end of a connection. `greeted`: the reader has proven that it belongs to this
    job."""

    def __init__(self, sock: socket.socket, token: bytes, secrets: Secrets | None) -> None:
        self.sock = sock
        self.greeted = False
        self.reads_only = False
        """Whether the other end has a reader's key, which allows to pull the merged model only."""
        self._token, self._secrets = token, secrets
        self._channels: tuple[Channel, Channel] | None = None
        self._conceal = True
        self.request_bytes = REQUEST.size + (TAG_BYTES if secrets else 0)
        self._room = memoryview(bytearray())

    def greet(self) -> bool:
        """Read the greeting of the connection. Returns False if it is not of this job."""
        until_ns = time.monotonic_ns() + REQUEST_NS_MAX
        hello = bytearray(HELLO.size)
        read_within(self.sock, memoryview(hello), until_ns)
        if self._secrets is None:
            self.greeted = hello == HELLO.pack(HELLO_MAGIC, WIRE_VERSION, self._token)
            return self.greeted
        magic = _magic(self._secrets.own.conceal)
        if hello != HELLO.pack(magic, WIRE_VERSION, self._token):
            return False
        rest = bytearray(NAME_BYTES + RANDOM_BYTES)
        read_within(self.sock, memoryview(rest), until_ns)
        name = bytes(rest[:NAME_BYTES])
        secret = self._secrets.named(name) or self._secrets.reading(name)
        if secret is None:
            return False
        self.reads_only = self._secrets.named(name) is None
        random = os.urandom(RANDOM_BYTES)
        self._channels = secret.lane(self._token, bytes(rest[NAME_BYTES:]), random)
        self._conceal = secret.conceal
        self.sock.sendall(_ANSWER.pack(magic, random, _seal(self._channels[1], magic)))
        return True

    def request(self, begun: bytes) -> tuple[bytes, int, int] | None:
        """Read the rest of the request that begins with `begun`. Returns (key, offset, length);
        None if it is invalid."""
        plain = bytearray(begun.ljust(self.request_bytes))
        rest = memoryview(plain)[len(begun) :]
        read_within(self.sock, rest, time.monotonic_ns() + REQUEST_NS_MAX)
        if self._channels is not None:
            sealed, plain = plain, bytearray(REQUEST.size)
            try:
                self._channels[0].open(memoryview(sealed), b"", memoryview(plain))
            except BadSeal:
                return None
            self.greeted = True  # the first proof that it has the key: worth a buffer
            self._room = self._room or memoryview(bytearray(REPLY.size + _ROOM_BYTES))
        magic, key, offset, length = REQUEST.unpack(plain)
        return (key, offset, length) if magic == REQUEST_MAGIC else None

    def refuse(self, status: int, total: int, key: bytes, offset: int) -> None:
        """Send a reply without bytes."""
        self.sock.sendall(self._header(status, total, key, offset, 0, b""))

    def give(self, total: int, key: bytes, offset: int, part: memoryview) -> None:
        """Send a reply with bytes."""
        if self._channels is None:
            digest = xxhash.xxh3_128_digest(part)
            self._send(self._header(OK, total, key, offset, len(part), digest), part)
            return
        header, channel = self._header(OK, total, key, offset, len(part), b""), self._channels[1]
        if not self._conceal:
            self.sock.sendall(header)
            for _, plain in _cut(part, PIECE_BYTES):
                self._send(plain, _seal(channel, plain))
            return
        self._room[: (filled := len(header))] = header
        for first, batch in _cut(part, BATCH_PIECES * PIECE_BYTES):
            for start, plain in _cut(batch, PIECE_BYTES):
                sealed = self._room[filled : (filled := filled + len(plain) + TAG_BYTES)]
                channel.seal(plain, key + _PLACE.pack(offset + first + start), sealed)
            self.sock.sendall(self._room[:filled])
            filled = 0

    def _send(self, first: bytes | memoryview, second: bytes | memoryview) -> None:
        """Send both without copying them into one buffer."""
        sent = self.sock.sendmsg([first, second])
        if sent < len(first):
            self.sock.sendall(memoryview(first)[sent:])
        self.sock.sendall(memoryview(second)[max(0, sent - len(first)) :])

    def _header(
        self, status: int, total: int, key: bytes, offset: int, length: int, digest: bytes
    ) -> bytes:
        header = REPLY.pack(REPLY_MAGIC, status, total, length, digest)
        if self._channels is None:
            return header
        about = header[:_TAGGED] + key + _PLACE.pack(offset)
        return header[:_TAGGED] + _seal(self._channels[1], about)


def _cut(view: memoryview, size: int) -> list[tuple[int, memoryview]]:
    """(offset, part) of the parts of a view, in order; the last one may be shorter."""
    return [(start, view[start : start + size]) for start in range(0, len(view), size)]


def _magic(conceal: bool) -> bytes:
    return SEALED_MAGIC if conceal else OPEN_MAGIC


def _seal(channel: Channel, about: bytes | memoryview) -> bytes:
    """A seal over `about` alone."""
    tag = bytearray(TAG_BYTES)
    channel.seal(b"", about, memoryview(tag))
    return bytes(tag)


def _opens(channel: Channel, tag: bytes | bytearray, about: bytes | memoryview) -> bool:
    try:
        channel.open(memoryview(tag), about, memoryview(bytearray()))
    except BadSeal:
        return False
    return True
