"""A local port whose connections go on through a SOCKS5 proxy.

For the sideband: libzmq's own SOCKS client hangs or aborts the process when a connection is refused
behind the proxy, and the context is closed then.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from mend.transport.bulk_wire import shut
from mend.transport.socks import connect_through
from mend.types import Address

CONNECT_S = 5.0
PIECE_BYTES = 64 << 10


class Tunnel:
    """From `address` (tcp://127.0.0.1:port) to `to`, for any number of connections."""

    def __init__(self, proxy: Address, to: Address) -> None:
        self._proxy, self._to = proxy, to
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        _start(self._accept)

    def close(self) -> None:
        """End all connections. Idempotent."""
        with self._lock:
            self._closed = True
            for sock in (self._listener, *self._open):
                shut(sock)

    def _accept(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                _start(self._carry, near)

    def _carry(self, near: socket.socket) -> None:
        with (
            near,
            contextlib.suppress(OSError, RuntimeError),
            socket.create_connection(self._proxy, CONNECT_S) as far,
        ):
            with self._lock:
                if self._closed:
                    return
                self._open |= {near, far}
            try:
                connect_through(far, self._to)
                far.settimeout(None)
                back = _start(_pump, far, near)
                _pump(near, far)
                back.join()
            finally:
                with self._lock:
                    self._open -= {near, far}


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Until one side ends; then both do."""
    with contextlib.suppress(OSError):
        while data := source.recv(PIECE_BYTES):
            sink.sendall(data)
    shut(source)
    shut(sink)


def _start(work: object, *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, name="mend-tunnel", daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread
