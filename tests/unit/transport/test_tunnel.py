"""A local port in front of a SOCKS proxy outlasts errors of one connection."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from mend.errors import TransportError
from mend.transport.tunnel import Tunnel
from mend.types import Address

GREETED = b"\x05\x00"
DONE = b"\x05\x00\x00\x01" + bytes(6)


@pytest.fixture
def proxy() -> Iterator[socket.socket]:
    """Accepts one connection as a proxy does, and sends back what comes over it."""

    def answer() -> None:
        near, _ = listener.accept()
        with near:
            near.recv(3)
            near.sendall(GREETED)
            near.recv(10)
            near.sendall(DONE)
            near.sendall(near.recv(4))

    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        yield listener
        answering.join(30)


@pytest.mark.parametrize("error", [errno.ECONNABORTED, errno.EMFILE])
def test_error_of_accept_does_not_end_the_tunnel(
    monkeypatch: pytest.MonkeyPatch, proxy: socket.socket, error: int
) -> None:
    """The peer behind it was unreachable for the rest of the job."""
    accept, told = socket.socket.accept, threading.Event()

    def failing(listener: socket.socket) -> tuple[socket.socket, object]:
        if listener is not proxy and not told.is_set():
            told.set()
            raise OSError(error, os.strerror(error))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    tunnel = Tunnel(Address(*proxy.getsockname()), Address("10.0.0.7", 1))
    with contextlib.closing(tunnel):
        port = int(tunnel.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 30) as client:
            client.sendall(b"four")
            assert client.recv(4) == b"four"
    assert told.is_set()


def test_connection_without_a_thread_does_not_end_the_tunnel(
    monkeypatch: pytest.MonkeyPatch, proxy: socket.socket
) -> None:
    tunnel = Tunnel(Address(*proxy.getsockname()), Address("10.0.0.7", 1))
    start, told = threading.Thread.start, threading.Event()

    def refusing(thread: threading.Thread) -> None:
        if thread.name == "mend-tunnel" and not told.is_set():
            told.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    with contextlib.closing(tunnel):
        port = int(tunnel.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 30) as client:
            assert client.recv(4) == b"", "closed, so that the peer connects again"
        with socket.create_connection(("127.0.0.1", port), 30) as client:
            client.sendall(b"four")
            assert client.recv(4) == b"four"


def test_tunnel_without_a_port_or_a_thread_is_a_transport_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop of a rank notes these and goes on; any other error stops the rank."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    def no_file(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    proxy = Address("127.0.0.1", 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TransportError, match="ulimit -u"):
            Tunnel(proxy, proxy)
    monkeypatch.setattr(socket, "create_server", no_file)
    with pytest.raises(TransportError, match="ulimit -n"):
        Tunnel(proxy, proxy)
