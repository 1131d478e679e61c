"""What is said to a SOCKS5 proxy, and what it may answer."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from mend.transport.socks import connect_through
from mend.types import Address

GREETED = b"\x05\x00"
DONE = b"\x05\x00\x00\x01" + bytes(6)


@contextlib.contextmanager
def proxied(answer: bytes) -> Iterator[tuple[socket.socket, bytearray]]:
    """A client's socket, and what the proxy has heard when the block is over."""
    ours, theirs = socket.socketpair()
    heard = bytearray()

    def read() -> None:
        while data := theirs.recv(4096):
            heard.extend(data)

    reading = threading.Thread(target=read)
    reading.start()
    theirs.sendall(answer)
    theirs.shutdown(socket.SHUT_WR)
    try:
        yield ours, heard
    finally:
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_WR)
        reading.join(30)
        ours.close()
        theirs.close()


@pytest.mark.parametrize(
    ("host", "named"),
    [
        ("10.0.0.7", b"\x01\x0a\x00\x00\x07"),
        ("::1", b"\x04" + bytes(15) + b"\x01"),
        ("node-7.inside", b"\x03\x0dnode-7.inside"),
    ],
)
def test_destination_is_named_as_the_standard_says_and_names_are_left_to_the_proxy(
    host: str, named: bytes
) -> None:
    with proxied(GREETED + DONE + b"rest") as (client, heard):
        connect_through(client, Address(host, 22000))
        assert client.recv(4) == b"rest", "nothing of what follows is taken"
    assert bytes(heard) == b"\x05\x01\x00" + b"\x05\x01\x00" + named + b"\x55\xf0"


@pytest.mark.parametrize("bound", [b"\x04" + bytes(18), b"\x03\x04here\x00\x01"])
def test_address_of_the_proxy_may_be_of_any_kind(bound: bytes) -> None:
    with proxied(GREETED + b"\x05\x00\x00" + bound + b"rest") as (client, _):
        connect_through(client, Address("10.0.0.7", 1))
        assert client.recv(4) == b"rest"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"\x05\x02", "wants a password"),
        (b"HTTP/1.1 400", "is not a SOCKS5 proxy"),
        (GREETED + b"\x05\x05\x00\x01" + bytes(6), "the connection was refused there"),
        (GREETED + b"\x05\x09\x00\x01" + bytes(6), "reply 9"),
        (GREETED + b"\x04\x00\x00\x01" + bytes(6), "is not a SOCKS5 proxy"),
        (GREETED + DONE[:5], "closed the connection"),
        (b"", "closed the connection"),
    ],
)
def test_refusal_is_an_error_of_the_connection_with_its_reason(answer: bytes, reason: str) -> None:
    with proxied(answer) as (client, _), pytest.raises(ConnectionError, match=reason):
        connect_through(client, Address("10.0.0.7", 1))


LONGEST = ".".join(["a" * 63] * 4)


def test_longest_name_is_sent_whole() -> None:
    with proxied(GREETED + DONE) as (client, heard):
        connect_through(client, Address(LONGEST, 1))
    assert bytes(heard)[6:] == b"\x00\x03\xff"[1:] + LONGEST.encode() + b"\x00\x01"


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (f"{LONGEST}.", "256 bytes is too long"),
        ("b" * 64, "is not the name"),
        ("a..b", "is not the name"),
    ],
)
def test_name_that_cannot_be_is_an_error_of_the_connection(host: str, reason: str) -> None:
    """As a UnicodeError it ended the thread that connects, with a traceback."""
    with proxied(GREETED + DONE) as (client, _), pytest.raises(ConnectionError, match=reason):
        connect_through(client, Address(host, 1))
