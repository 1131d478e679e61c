"""A local port whose connections are forwarded through a SOCKS5 proxy.

The sideband uses it, because libzmq's own SOCKS client may hang or abort the process if the context
is closed after a connection was refused behind the proxy.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from mend.errors import TransportError
from mend.transport.bulk_wire import shut
from mend.transport.socks import connect_through
from mend.types import Address

CONNECT_S = 5.0
RETRY_S = 0.1
PIECE_BYTES = 64 << 10


class Tunnel:
    """Forwards any number of connections from `address` (tcp://127.0.0.1:port) to `to`. Raises
    TransportError if this process can open no port or start no thread."""

    def __init__(self, proxy: Address, to: Address) -> None:
        self._proxy, self._to = proxy, to
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        try:
            self._listener = socket.create_server(("127.0.0.1", 0))
        except OSError as error:
            raise _no_port(proxy, error) from error
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        try:
            _start(self._accept)
        except RuntimeError as error:
            self._listener.close()
            raise _no_port(proxy, error) from error

    def close(self) -> None:
        """End all connections. Idempotent."""
        with self._lock:
            self._closed.set()
            for sock in (self._listener, *self._open):
                shut(sock)

    def _accept(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                try:
                    near, _ = self._listener.accept()
                except OSError:  # of that connection, or of a process that is out of files
                    self._closed.wait(RETRY_S)
                    continue
                try:
                    _start(self._carry, near)
                except RuntimeError:  # no more threads now; the peer connects again
                    near.close()

    def _carry(self, near: socket.socket) -> None:
        with (
            near,
            contextlib.suppress(OSError, RuntimeError),
            socket.create_connection(self._proxy, CONNECT_S) as far,
        ):
            with self._lock:
                if self._closed.is_set():
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


def _no_port(proxy: Address, error: Exception) -> TransportError:
    return TransportError(
        f"no local port for the SOCKS proxy at {proxy.host}:{proxy.port} ({error}). Raise the "
        "limits of open files (ulimit -n) and of processes (ulimit -u)."
    )


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Forward bytes until one side ends, then end both."""
    with contextlib.suppress(OSError):
        while data := source.recv(PIECE_BYTES):
            sink.sendall(data)
    shut(source)
    shut(sink)


def _start(work: object, *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, name="mend-tunnel", daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread
