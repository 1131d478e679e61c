"""The state of one payload that is being received, and the receiving loop."""

from __future__ import annotations

import heapq
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import xxhash

from mend.errors import ChecksumMismatch, PayloadGone, TransportError, ensure, require
from mend.transport.bulk_link import ReaderEnd
from mend.transport.bulk_wire import BAD, GONE, OK, REPLY, shut
from mend.types import Address, Extent, Meter

LENGTH_SWIFT, LENGTH_MIN, LENGTH_FIRST, LENGTH_LEAST = 1 << 20, 64 << 10, 16 << 10, 8 << 10
"""Bytes of a connection's first request: to a holder that has answered at once, to one that has
answered quickly, to another one, and over a thin link. A request grows while replies come quickly.
Small ones take the interpreter's lock as often as large ones."""
AHEAD = 3
"""Requests outstanding per connection: the holder always knows what to send next."""


class Incoming:
    """The bytes of one payload, or of an extent of it: the missing ranges, and the running checksum
    of the others. Ranges count from the beginning of `into`.

    Ranges are verified in any order (several connections share the work) and hashed in offset order
    right after, by whichever thread closes the gap, while the chunk is still in cache and while
    other threads receive. So the checksum of the whole costs no second pass at the end.
    """

    def __init__(
        self,
        into: memoryview,
        checksum: str | None,
        extent: Extent | None = None,
        meter: Meter | None = None,
    ) -> None:
        """`checksum`, `meter`: see `BulkLane.fetch`."""
        self.into, self._meter = into, meter
        self.extent = extent or Extent(0, len(into))
        self.checksum = checksum
        self.verified = 0
        """Bytes verified in all; only grows, also when a wrong payload is thrown away."""
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self._missing: list[tuple[int, int]] = [(0, len(self.into))] if len(self.into) else []
        self._left = len(self.into)
        self._contributors: list[Address] = []
        self._hash = xxhash.xxh3_128()
        self._hashed = 0
        self._unhashed: dict[int, int] = {}
        self._hashing = False

    @property
    def all_taken(self) -> bool:
        """No range is left to ask for."""
        with self._lock:
            return not self._missing

    @property
    def complete(self) -> bool:
        """Every byte is verified (and, with a checksum, hashed)."""
        with self._lock:
            return self._left == 0 and not self._unhashed and not self._hashing

    def take(self, length: int) -> tuple[int, int] | None:
        """The lowest missing range [start, stop), at most `length` long; the caller owes it."""
        with self._lock:
            if not self._missing:
                return None
            start, stop = heapq.heappop(self._missing)
            if stop - start > length:
                heapq.heappush(self._missing, (start + length, stop))
                stop = start + length
            return start, stop

    def give_back(self, start: int, stop: int) -> None:
        """A range taken and not verified is missing again."""
        with self._lock:
            heapq.heappush(self._missing, (start, stop))

    def accept(self, start: int, stop: int, holder: Address) -> None:
        """A range has been verified; hash whatever is now contiguous."""
        with self._lock:
            self.verified += stop - start
            self._left -= stop - start
            if self._meter is not None:
                self._meter.first_ns = self._meter.first_ns or time.monotonic_ns()
                self._meter.verified = len(self.into) - self._left
            if holder not in self._contributors:
                self._contributors.append(holder)
            if self.checksum == "":
                return
            self._unhashed[start] = stop
            if self._hashing:
                return  # that thread will find this range too
            self._hashing = True
        while True:
            with self._lock:
                first = self._hashed
                last = self._unhashed.pop(first, None)
                if last is None:
                    self._hashing = False
                    return
            self._hash.update(self.into[first:last])
            self._hashed = last

    def settle(self) -> tuple[Address, ChecksumMismatch] | None:
        """Compare the whole. On a mismatch all is missing again and the first contributor blamed.

        Blaming one holder at a time ends after as many rounds as there are holders, and never
        leaves out a good one because a bad one sent the first half.
        """
        ensure(self.complete, "bytes are missing", left=self._left)
        if self.checksum == "" or self._hash.hexdigest() == self.checksum:
            return None
        if self.checksum is None:
            require(self._meter, "nobody asks for the checksum").checksum = self._hash.hexdigest()
            return None
        got, blamed = self._hash.hexdigest(), self._contributors[0]
        self._restart()
        return blamed, ChecksumMismatch(
            f"holder {blamed.host}:{blamed.port}: payload checksum={got}, {self.checksum} was "
            "announced. Every chunk arrived as it was sent, so it holds other bytes than announced."
        )


class Attempt:
    """One payload from one holder: the connections that work on it, and why it ended."""

    def __init__(
        self,
        incoming: Incoming,
        holder: Address,
        key: bytes,
        *,
        chunk_bytes: int,
        stall_s: float,
        clock_s: Callable[[], float],
        count: Callable[[int], None],
        first: int = 0,
    ) -> None:
        """`first`: what the holder is asked for first; it has answered quickly before. 0: it has
        not. Then the first connection asks for a little, and the others wait for its reply: four of
        them would get nothing whole in time over a thin link."""
        self.incoming, self.holder, self.key = incoming, holder, key
        self._chunk_bytes, self._stall_s = chunk_bytes, stall_s
        self._clock_s, self._count = clock_s, count
        self._length = min(first or LENGTH_FIRST, chunk_bytes)
        self.widens = threading.Event()
        """Set when further connections may begin, or the attempt ends."""
        self.quick: bool | None = None
        """Whether the newest replies came quickly; None: neither quickly nor slowly."""
        self.swift: bool | None = None
        """Whether a whole chunk came at once, others may have waited for bytes that are still being
        made; None: there was none."""
        if first:
            self.widens.set()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self.stopped = False
        self.error: TransportError | None = None
        """Why `stop` was called; None while it goes on, or for no fault of the holder."""
        self.broken: Exception | None = None
        """The last fault of a connection; the others may still have done all the work."""

    def adopt(self, sock: socket.socket) -> bool:
        """Let `stop` wake this socket's thread. False: stopped already, do not use it."""
        with self._lock:
            if not self.stopped:
                self._sockets.add(sock)
            return not self.stopped

    def release(self, sock: socket.socket) -> bool:
        """`stop` will not touch the socket any more. False: it has been shut down."""
        with self._lock:
            self._sockets.discard(sock)
            return not self.stopped

    def stop(self, error: TransportError | None) -> None:
        """End every connection of the attempt now; the first error given is the one that counts."""
        with self._lock:
            self.error = self.error or error
            self.stopped = True
            self.widens.set()
            for sock in self._sockets:
                shut(sock)

    def pull(self, link: ReaderEnd) -> None:
        """Ask for missing ranges and verify them until none is left. Runs in a thread of its own.

        Raises PayloadGone or ChecksumMismatch as the holder answers, OSError or EOFError as the
        link does.
        """
        owed: deque[tuple[int, int, float]] = deque()
        length = self._length
        try:
            while not self.stopped:
                while len(owed) < AHEAD and (part := self.incoming.take(length)):
                    start, stop = part
                    owed.append((start, stop, self._clock_s()))
                    link.ask(self.key, self.incoming.extent.offset + start, stop - start)
                if not owed:
                    return
                start, stop, asked_s = owed[0]
                self._receive(link, start, stop)
                owed.popleft()
                self.incoming.accept(start, stop, self.holder)
                length = self._next_length(stop - start, length, self._clock_s() - asked_s)
        finally:
            for start, stop, _ in owed:
                self.incoming.give_back(start, stop)

    def _receive(self, link: ReaderEnd, start: int, stop: int) -> None:
        """One reply, straight into its place; returns when its bytes are verified."""
        offset, expected = self.incoming.extent
        status, total, length, digest = link.header(self.key, offset + start)
        where = f"{self.holder.host}:{self.holder.port}"
        if status not in (OK, GONE, BAD):
            raise EOFError("answered with something that is no reply")
        if status == GONE:
            raise PayloadGone(
                f"holder {where}: does not serve key {self.key.hex()}. Ask for a newer one."
            )
        if total != expected:
            raise ChecksumMismatch(
                f"holder {where}: its payload has {total} bytes, {expected} are "
                "expected. Both sides must use the same plan and codec."
            )
        if status != OK or length != stop - start:
            raise EOFError(f"answered with {length} bytes to a request for {stop - start}")
        if not link.body(self.key, offset + start, digest, self.incoming.into[start:stop]):
            raise ChecksumMismatch(
                f"holder {where}: bytes [{start}, {stop}) did not arrive as they were sent. "
                "Asked for again; if it stays, check the network card, the cable and the memory."
            )
        self._count(REPLY.size + length)

    def _next_length(self, got: int, length: int, took_s: float) -> int:
        """Grow while a reply takes little of the stall time-out, shrink before it takes most of it.

        A fixed 4 MiB would never verify a byte on a link that needs longer than the time-out for
        it. Growing 4-fold from under 1/16 stays under 1/4, with everything that is outstanding
        counted in.
        """
        if got == self._chunk_bytes:
            self.swift = self.swift or took_s < self._stall_s / 64
        if took_s > self._stall_s / 4:
            self.quick = False
            return max(LENGTH_LEAST, got // 4)
        if took_s < self._stall_s / 16:
            self.quick = True
            if not self.widens.is_set():  # setting it again would take its lock
                self.widens.set()
        if took_s < self._stall_s / 16 and got >= length:
            return min(self._chunk_bytes, length * 4)
        return length
