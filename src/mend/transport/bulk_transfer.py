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
"""Bytes of a connection's first request to a holder that has answered at once, to one that has
answered quickly, and to any other one; and the least size of a request. Requests grow while replies
come quickly, because each takes the interpreter's lock equally often, whatever its size."""
AHEAD = 3
"""Outstanding requests per connection, so that the holder always knows what to send next."""


class Incoming:
    """The bytes of one payload, or of an extent of it: the missing ranges, and the running checksum
    of the others. Ranges are offsets in `into`.

    Ranges are verified in any order, because several connections share the work. The thread that
    closes a gap hashes what is contiguous, in order of offsets, while the chunk is in cache and
    other threads receive. So the checksum of the whole needs no second pass at the end.
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
        """Total of the verified bytes. It never decreases, even if a wrong payload is discarded."""
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
        """Whether no range is left to request."""
        with self._lock:
            return not self._missing

    @property
    def complete(self) -> bool:
        """Whether every byte is verified (and, with a checksum, hashed)."""
        with self._lock:
            return self._left == 0 and not self._unhashed and not self._hashing

    def take(self, length: int) -> tuple[int, int] | None:
        """Take the lowest missing range [start, stop), at most `length` long. The caller must
        `accept` it or `give_back` it."""
        with self._lock:
            if not self._missing:
                return None
            start, stop = heapq.heappop(self._missing)
            if stop - start > length:
                heapq.heappush(self._missing, (start + length, stop))
                stop = start + length
            return start, stop

    def give_back(self, start: int, stop: int) -> None:
        """Return a range that was taken and not verified."""
        with self._lock:
            heapq.heappush(self._missing, (start, stop))

    def accept(self, start: int, stop: int, holder: Address) -> None:
        """Record that a range is verified, and hash what is contiguous now."""
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
                return  # the thread that hashes will find this range, too
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
        """Compare the checksum of the whole. On a mismatch, everything is missing again, and the
        first contributor is returned as the culprit.

        Blaming one holder at a time ends after as many rounds as there are holders, and excludes no
        good holder because a bad one has sent the first half.
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
            "announced. Every chunk arrived as it was sent, so the holder has other bytes than it "
            "announced."
        )


class TransferAttempt:
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
        """`first`: size of the first request to a holder that has answered quickly before; 0: it
        has not. Then the first connection requests little, and the others wait for its reply, since
        on a slow link four concurrent replies would all exceed the stall time-out."""
        self.incoming, self.holder, self.key = incoming, holder, key
        self._chunk_bytes, self._stall_s = chunk_bytes, stall_s
        self._clock_s, self._count = clock_s, count
        self._length = min(first or LENGTH_FIRST, chunk_bytes)
        self.widens = threading.Event()
        """Set when further connections may begin, or the attempt has ended."""
        self.quick: bool | None = None
        """Whether the newest replies were quick; None: they were neither quick nor slow."""
        self.swift: bool | None = None
        """Whether any whole chunk arrived at once. Others may have waited for bytes that are still
        being made. None: no whole chunk has arrived."""
        if first:
            self.widens.set()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self.stopped = False
        self.error: TransportError | None = None
        """Why `stop` was called; None: it was not, or the holder is not to blame."""
        self.broken: Exception | None = None
        """The last error of a connection. The other connections may still do all the work."""

    def adopt(self, sock: socket.socket) -> bool:
        """Let `stop` wake this socket's thread. Returns False if the attempt has ended already."""
        with self._lock:
            if not self.stopped:
                self._sockets.add(sock)
            return not self.stopped

    def release(self, sock: socket.socket) -> bool:
        """Exempt the socket from `stop`. Returns False if it has been shut down already."""
        with self._lock:
            self._sockets.discard(sock)
            return not self.stopped

    def stop(self, error: TransportError | None) -> None:
        """End all connections of the attempt. The first error given is kept."""
        with self._lock:
            self.error = self.error or error
            self.stopped = True
            self.widens.set()
            for sock in self._sockets:
                shut(sock)

    def pull(self, link: ReaderEnd) -> None:
        """Request missing ranges and verify them until none is left. Runs in a thread of its own.

        Raises PayloadGone or ChecksumMismatch for the holder's answers, OSError or EOFError for a
        broken connection.
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
        """Receive one reply directly into its place, and verify its bytes."""
        offset, expected = self.incoming.extent
        status, total, length, digest = link.header(self.key, offset + start)
        where = f"{self.holder.host}:{self.holder.port}"
        if status not in (OK, GONE, BAD):
            raise EOFError("answered with something that is not a reply")
        if status == GONE:
            raise PayloadGone(
                f"holder {where}: does not serve key {self.key.hex()}. Request a newer one."
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
                "They are requested again; if it persists, check network card, cable and memory."
            )
        self._count(REPLY.size + length)

    def _next_length(self, got: int, length: int, took_s: float) -> int:
        """The length of the next request: it grows while replies take a small part of the stall
        time-out, and shrinks before they take most of it.

        With a fixed 4 MiB, no byte would ever be verified on a link that needs longer than the
        time-out for that. Growing 4-fold from under 1/16 stays under 1/4, including everything that
        is outstanding.
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
