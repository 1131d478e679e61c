"""Relays connections to other processes of the rack, so that it needs only one port of one host.

One thread relays all connections. It does not interpret the bytes: sealed bytes stay sealed. Per
direction it buffers at most one piece, and reads no more until the receiver has taken it. So a slow
receiver slows down only its own sender.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
from collections import Counter

from mend.transport.bulk_wire import shut, tune
from mend.types import Address

PIECE_BYTES = 256 << 10
"""Size of one read, and limit of the bytes that are buffered for a receiver."""

SYN_RETRIES = 2
"""With two retries, a connection attempt without an answer ends after about 7 s."""

CLOSE_S = 2.0

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class _End:
    """One end of a relayed connection. `held`: bytes that it has not taken yet. `ended`: it sends
    no more."""

    def __init__(self, sock: socket.socket, to: Address) -> None:
        self.sock, self.to = sock, to
        self.other: _End = self
        self.held = memoryview(b"")
        self.ended = False
        self.watched = 0


class Relay:
    """Relays any number of connections, each over a second one to its destination. `dead_ns`: a
    connection ends if the kernel of one end is silent for longer."""

    def __init__(self, name: str, dead_ns: int) -> None:
        self.bytes_carried = 0
        """Total of both directions."""
        self._name, self._dead_ns = name, dead_ns
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._new: list[tuple[_End, _End]] = []
        self._open: Counter[Address] = Counter()
        self._selector = selectors.DefaultSelector()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._piece = memoryview(bytearray())

    def carry(self, near: socket.socket, to: Address, most: int) -> bool:
        """Connect to `to`, a numeric address and a port, and relay `near`, which belongs to this
        object from now on. Returns False, and leaves `near` to the caller, if `most` connections to
        `to` are open, or this relay is closed or out of a resource."""
        with self._lock:
            if self._closed or self._open[to] >= most or not self._begun():
                return False
            try:
                far = self._connecting(to)
            except OSError:
                return False
            end = _End(socket.socket(fileno=near.detach()), to)
            end.other = _End(far, to)
            end.other.other = end
            self._open[to] += 1
            self._new.append((end, end.other))
            self._ring()
        return True

    def _begun(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # this process can have no more threads now
                return False
            self._thread = thread
        return True

    def _connecting(self, to: Address) -> socket.socket:
        family = socket.AF_INET6 if ":" in to.host else socket.AF_INET
        far = socket.socket(family, socket.SOCK_STREAM)
        try:
            tune(far, receive_ns=0, send_ns=0, dead_ns=self._dead_ns)
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, SYN_RETRIES)
            far.setblocking(False)
            wrong = far.connect_ex(to)
            if wrong not in (0, errno.EINPROGRESS):
                raise OSError(wrong, "cannot connect")
        except BaseException:
            far.close()
            raise
        return far

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # the buffer is full, so it rings already
            self._ringer.send(b"x")

    def close(self) -> None:
        """End all connections and the thread. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._ring()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_S)
        else:
            self._free()

    # -------------------------------------------------------------- its thread

    def _run(self) -> None:
        self._piece = memoryview(bytearray(PIECE_BYTES))
        self._selector.register(self._bell, _READ)
        try:
            while self._take_new():
                for key, events in self._selector.select():
                    if key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            self._bell.recv(PIECE_BYTES)
                    elif key.data.watched:  # else its connection has just ended
                        self._go_on(key.data, events)
        finally:
            with self._lock:
                self._closed = True
            self._free()

    def _take_new(self) -> bool:
        """Begin to relay new connections. Returns False if this relay is closed."""
        with self._lock:
            new, self._new = self._new, []
            closed = self._closed
        for near, far in new:
            try:
                near.sock.setblocking(False)
                self._watch(far, _WRITE)  # `near` is not read before `far` is connected
            except OSError:
                self._end(near)
        return not closed

    def _go_on(self, end: _End, events: int) -> None:
        try:
            if events & _WRITE and end.watched & _WRITE:
                self._give(end)
            if events & _READ and end.watched & _READ:
                self._read(end)
        except OSError:
            self._end(end)
            return
        if (end.ended and not end.other.held) or (end.other.ended and not end.held):
            self._end(end)
            return
        for each in (end, end.other):
            reads = not each.ended and not each.other.held
            self._watch(each, (_READ if reads else 0) | (_WRITE if each.held else 0))

    def _give(self, end: _End) -> None:
        """Handle an end that takes bytes again, or whose connection is established or failed."""
        if wrong := end.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(wrong, "the connection broke")
        if end.held:
            end.held = end.held[self._send(end, end.held) :]

    def _read(self, end: _End) -> None:
        try:
            got = end.sock.recv_into(self._piece)
        except BlockingIOError:
            return
        if not got:
            end.ended = True
            return
        taken = self._send(end.other, self._piece[:got])
        if taken < got:
            end.other.held = memoryview(bytes(self._piece[taken:got]))

    def _send(self, end: _End, what: memoryview) -> int:
        try:
            taken = end.sock.send(what)
        except BlockingIOError:
            return 0
        self.bytes_carried += taken
        return taken

    def _watch(self, end: _End, events: int) -> None:
        if events == end.watched:
            return
        if not end.watched:
            self._selector.register(end.sock, events, end)
        elif not events:
            self._selector.unregister(end.sock)
        else:
            self._selector.modify(end.sock, events, end)
        end.watched = events

    def _end(self, end: _End) -> None:
        for each in (end, end.other):
            if each.watched:
                self._selector.unregister(each.sock)
                each.watched = 0
            _close(each.sock)
        with self._lock:
            self._open[end.to] -= 1

    def _free(self) -> None:
        ends = [key.data for key in self._selector.get_map().values() if key.data is not None]
        for end in (*ends, *(near for near, _ in self._new)):
            _close(end.sock)
            _close(end.other.sock)
        self._selector.close()
        self._bell.close()
        self._ringer.close()


def _close(sock: socket.socket) -> None:
    shut(sock)  # a forked process may have a copy, which would keep the connection open
    sock.close()
