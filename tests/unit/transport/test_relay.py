"""Connections that are carried on to another process."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from mend.transport.relay import PIECE_BYTES, Relay
from mend.types import SECOND, Address
from tests.process.racks import until

LIMIT_S = 60.0


class World:
    """A relay, a listener behind it, and connections through it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.relay = Relay("test-relay", 10 * SECOND)
        stack.callback(self.relay.close)
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.listener.settimeout(LIMIT_S)
        self.to = Address(*self.listener.getsockname())

    def pair(self) -> tuple[socket.socket, socket.socket]:
        """The two ends of a TCP connection."""
        with socket.create_server(("127.0.0.1", 0)) as door:
            ours = self._stack.enter_context(socket.create_connection(door.getsockname()))
            theirs, _ = door.accept()
        ours.settimeout(LIMIT_S)
        return ours, theirs

    def through(self) -> tuple[socket.socket, socket.socket]:
        """A client's end, and the end at which the listener serves it."""
        client, near = self.pair()
        assert self.relay.carry(near, self.to, 8)
        served = self._stack.enter_context(self.listener.accept()[0])
        served.settimeout(LIMIT_S)
        return client, served


@pytest.fixture
def world() -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        yield World(stack)


def read(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (piece := sock.recv(1 << 16)):
        data += piece
    return bytes(data)


def sender(sock: socket.socket, data: bytes) -> threading.Thread:
    thread = threading.Thread(target=sock.sendall, args=(data,))
    thread.start()
    return thread


def test_bytes_of_both_directions_arrive_as_they_were_sent(world: World) -> None:
    client, served = world.through()
    up, down = os.urandom(3 * PIECE_BYTES + 17), os.urandom(5 * PIECE_BYTES + 3)
    threads = [sender(client, up), sender(served, down)]
    assert read(client, len(down)) == down
    assert read(served, len(up)) == up
    for thread in threads:
        thread.join(LIMIT_S)
    carried = len(up) + len(down)
    until(lambda: world.relay.bytes_carried >= carried, "they are counted, once they have left")
    assert world.relay.bytes_carried == carried


@pytest.mark.parametrize("ends", [0, 1])
def test_end_of_either_side_arrives_after_its_last_bytes(world: World, ends: int) -> None:
    sides = world.through()
    data = os.urandom(2 * PIECE_BYTES)
    thread = sender(sides[ends], data)
    other = sides[1 - ends]
    assert read(other, len(data)) == data
    thread.join(LIMIT_S)
    sides[ends].close()
    assert other.recv(1) == b""


def test_connection_that_nobody_accepts_ends(world: World) -> None:
    world.listener.close()
    client, near = world.pair()
    assert world.relay.carry(near, world.to, 8)
    assert client.recv(1) == b""


def blocked(sock: socket.socket) -> int:
    """Send until nothing more is taken; returns how much was."""
    sock.setblocking(False)
    sent, until_s = 0, time.monotonic() + 0.3
    while time.monotonic() < until_s:
        try:
            sent += sock.send(bytes(PIECE_BYTES))
            until_s = time.monotonic() + 0.3
        except BlockingIOError:
            time.sleep(0.01)
    return sent


@pytest.mark.parametrize("reads", [0, 1])
def test_receiver_that_does_not_read_stops_its_sender_and_nobody_else(
    world: World, reads: int
) -> None:
    """Or a slow rack would have the leader's memory grow, or stall the rack's other ranks."""
    slow, quick = world.through(), world.through()
    sent = blocked(slow[1 - reads])
    held = sent - world.relay.bytes_carried
    assert 0 < held < 64 << 20, "the kernel's buffers and one piece"
    data = os.urandom(4 * PIECE_BYTES)
    thread = sender(quick[1], data)
    assert read(quick[0], len(data)) == data
    thread.join(LIMIT_S)
    assert len(read(slow[reads], sent)) == sent, "nothing is lost when it reads again"


def test_connections_beyond_the_most_are_refused_until_one_ends(world: World) -> None:
    ends = [world.through() for _ in range(8)]
    client, near = world.pair()
    assert not world.relay.carry(near, world.to, 8)
    with near:
        ends[0][0].close()
        assert ends[0][1].recv(1) == b""
        until(lambda: world.relay.carry(near, world.to, 8), "there is room again")
    _, one_more = world.pair()
    with one_more:
        assert not world.relay.carry(one_more, world.to, 8)
    client.sendall(b"x")
    with world.listener.accept()[0] as served:
        assert served.recv(1) == b"x"


def test_close_ends_connections_and_the_thread(world: World) -> None:
    client, _ = world.through()
    blocked(client)
    world.relay.close()
    assert "test-relay" not in {thread.name for thread in threading.enumerate()}
    client.setblocking(True)
    client.settimeout(LIMIT_S)
    with contextlib.suppress(ConnectionError):
        assert client.recv(1) == b""
    _, near = world.pair()
    with near:
        assert not world.relay.carry(near, world.to, 8)
    world.relay.close()


def test_relay_that_carries_nothing_has_no_thread(world: World) -> None:
    assert "test-relay" not in {thread.name for thread in threading.enumerate()}
