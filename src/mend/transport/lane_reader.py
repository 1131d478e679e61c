"""Reads payloads from the lanes of racks, for followers, which have no lane of their own. Calls
block. Any number of threads may read concurrently, each over a connection of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from mend.errors import ChecksumMismatch, PayloadGone, PeerUnreachable, TransportError
from mend.transport.bulk_link import ReaderEnd
from mend.transport.bulk_wire import GONE, OK, is_quiet, lane_token, shut, tune
from mend.transport.probe import host_and_port
from mend.transport.security import Secret, lane_secret_of
from mend.transport.socks import connect_through
from mend.types import Address

T = TypeVar("T")

CONNECT_S = 5.0
AHEAD = 2
"""Outstanding requests per connection, so that the holder always knows what to send next."""


class LaneReader:
    """Reads the payloads of one job. `secrets`: keys of the job or of its readers; empty if the job
    has none. `stall_ns`: a read fails if the holder sends nothing for longer. It must be closed;
    that ends the calls of other threads with TransportError."""

    def __init__(
        self, job: str, secrets: tuple[bytes, ...], socks_proxy: str, stall_ns: int
    ) -> None:
        self._job, self._stall_ns = job, stall_ns
        self._proxy = Address(*host_and_port(socks_proxy)) if socks_proxy else None
        both = [(key, conceal) for key in secrets for conceal in (True, False)]
        self._secrets = [lane_secret_of(key, conceal=conceal) for key, conceal in both]
        self._lock = threading.Lock()
        self._idle: dict[tuple[Address, int], list[ReaderEnd]] = {}
        self._open: set[socket.socket] = set()
        self._closed = False
        self.bytes_received = 0

    def size(self, holder: Address, rank: int, key: bytes) -> int:
        """Size of a payload in bytes. Raises the same errors as `read`."""
        return self._with(holder, rank, lambda link: _sized(link, key))

    def read(
        self,
        holder: Address,
        rank: int,
        key: bytes,
        ranges: Sequence[tuple[int, memoryview]],
        verify: Callable[[memoryview], None] = lambda _: None,
    ) -> None:
        """Fill all (offset in the payload, buffer) of `ranges`, in order. `verify` gets each buffer
        once it is filled, and may raise. Raises PayloadGone, ChecksumMismatch,
        PeerUnreachable."""

        def work(link: ReaderEnd) -> None:
            for number in range(min(AHEAD, len(ranges))):
                link.ask(key, ranges[number][0], len(ranges[number][1]))
            for number, (offset, into) in enumerate(ranges):
                reply = link.header(key, offset)
                if reply.status == GONE:
                    raise PayloadGone(f"holder {_named(holder)}: no longer, or not yet, there")
                if reply.status != OK or reply.length != len(into):
                    raise ChecksumMismatch(f"holder {_named(holder)}: another payload than asked")
                if not link.body(key, offset, reply.digest, into):
                    raise ChecksumMismatch(f"holder {_named(holder)}: damaged on the way")
                with self._lock:
                    self.bytes_received += len(into)
                verify(into)
                if number + AHEAD < len(ranges):
                    offset, into = ranges[number + AHEAD]
                    link.ask(key, offset, len(into))

        self._with(holder, rank, work)

    def _with(self, holder: Address, rank: int, work: Callable[[ReaderEnd], T]) -> T:
        """Do the work over an idle connection, or over a new one if that has died unnoticed."""
        while True:
            with self._lock:
                idle = self._idle.get((holder, rank))
                link, fresh = (idle.pop(), False) if idle else (None, True)
            if link is None:
                self._close_dead()
                link = self._connect(holder, rank)
            try:
                done = work(link)
            except PayloadGone:
                self._forget(link.sock)  # replies to other requests are in flight
                raise
            except (OSError, EOFError) as error:
                self._forget(link.sock)
                if fresh:
                    raise _unreachable(holder, error) from error
                continue
            except BaseException:
                self._forget(link.sock)
                raise
            with self._lock:
                self._idle.setdefault((holder, rank), []).append(link)
            return done

    def _connect(self, holder: Address, rank: int) -> ReaderEnd:
        token = lane_token(self._job, rank)
        error: Exception = EOFError("closed")
        secrets: list[Secret | None] = [*self._secrets] or [None]
        for secret in secrets:
            try:
                sock = socket.create_connection(self._proxy or holder, timeout=CONNECT_S)
            except (OSError, UnicodeError) as refused:
                raise _unreachable(holder, refused) from refused
            with self._lock:
                if self._closed:
                    sock.close()
                    raise TransportError("the follower is closed")
                self._open.add(sock)
            try:
                if self._proxy is not None:
                    connect_through(sock, holder)
                sock.settimeout(None)
                stall_ns = self._stall_ns
                tune(sock, receive_ns=stall_ns, send_ns=stall_ns, dead_ns=stall_ns)
                return ReaderEnd(sock, token, secret)
            except (OSError, EOFError) as refused:  # perhaps it accepts the next secret
                self._forget(sock)
                error = refused
        raise _unreachable(holder, error)

    def _close_dead(self) -> None:
        """Close dead idle connections: to a rack that has moved to another address none is ever
        used again."""
        with self._lock:
            links = [link for idle in self._idle.values() for link in idle]
            dead = [link for link in links if not is_quiet(link.sock)]
            self._idle = {
                where: left
                for where, idle in self._idle.items()
                if (left := [link for link in idle if link not in dead])
            }
        for link in dead:
            self._forget(link.sock)

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.discard(sock)
        sock.close()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        with self._lock:
            self._closed = True
            left, self._open = self._open, set()
        for sock in left:
            shut(sock)
            sock.close()


def _sized(link: ReaderEnd, key: bytes) -> int:
    link.ask(key, 0, 1)
    reply, first = link.header(key, 0), bytearray(1)
    if reply.status != OK:
        raise PayloadGone("no longer, or not yet, there")
    if not link.body(key, 0, reply.digest, memoryview(first)):
        raise ChecksumMismatch("damaged on the way")
    return reply.total


def _named(holder: Address) -> str:
    return f"{holder.host}:{holder.port}"


def _unreachable(holder: Address, error: Exception) -> PeerUnreachable:
    return PeerUnreachable(
        f"holder {_named(holder)}: {error}. Check that its port can be reached from here, and that "
        "the key is of this job"
    )
