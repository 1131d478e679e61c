"""StatusClient: who asks from outside, with real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from mend.errors import ConfigError
from mend.transport.status_client import StatusClient, Way
from mend.transport.tunnel import _pump
from mend.transport.zmq import ZmqSideband


@dataclass
class Served:
    """A sideband in a thread of its own. `answer`: to whatever is diverted; None: silence."""

    answer: bytes | None
    address: str = ""


@contextmanager
def serving(
    answer: bytes | None, bind: str = "tcp://127.0.0.1:0", prefix: bytes = b""
) -> Iterator[Served]:
    loop, served, ready = asyncio.new_event_loop(), Served(answer), threading.Event()

    async def serve() -> None:
        sideband = ZmqSideband(bind)

        def take(route: bytes, _: bytes) -> None:
            if served.answer is not None:
                sideband.reply(route, served.answer)

        sideband.divert(prefix, take)
        served.address = sideband.address
        ready.set()
        try:
            while True:
                await sideband.receive()
        finally:
            sideband.close()

    task = loop.create_task(serve())

    def run() -> None:
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(20)
    try:
        yield served
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


@contextmanager
def answering(answer: bytes | None, bind: str = "tcp://127.0.0.1:0") -> Iterator[str]:
    """The address of one that answers `ask`, or does not."""
    with serving(answer, bind, b"ask") as served:
        yield served.address


@contextmanager
def proxy_to(address: str) -> Iterator[tuple[str, list[bytes]]]:
    """A SOCKS5 proxy for which every destination is `address`, and the destinations asked for."""
    asked: list[bytes] = []

    class Client(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            near: socket.socket = self.request
            near.recv(3, socket.MSG_WAITALL)
            near.sendall(b"\x05\x00")
            asked.append(near.recv(256))
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            try:
                far = socket.create_connection((host, int(port)))
            except OSError:
                near.sendall(b"\x05\x05\x00\x01" + bytes(6))
                return
            near.sendall(b"\x05\x00\x00\x01" + bytes(6))
            with far:
                back = threading.Thread(target=_pump, args=(far, near))
                back.start()
                _pump(near, far)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Client) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def onlooker() -> Iterator[StatusClient]:
    made = StatusClient(1000)
    yield made
    made.close()


def answers_of(onlooker: StatusClient, count: int) -> set[tuple[str, bytes]]:
    found: set[tuple[str, bytes]] = set()
    for _ in range(100):
        found |= set(onlooker.collect(0.2))
        if len(found) >= count:
            break
    return found


def test_everybody_is_asked_and_answers(onlooker: StatusClient) -> None:
    with answering(b"one") as one, answering(b"two") as two:
        for address in (one, two):
            onlooker.watch(address)
            onlooker.ask(address, b"ask")
        assert answers_of(onlooker, 2) == {(one, b"one"), (two, b"two")}
        assert onlooker.way(one) is Way.SPEAKS


def test_way_to_an_address_is_closed_open_or_speaking(
    onlooker: StatusClient, free_port: int
) -> None:
    nowhere = f"tcp://127.0.0.1:{free_port}"
    with answering(None) as mute, socket.create_server(("127.0.0.1", 0)) as listener:
        plain = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        for address in (nowhere, mute, plain):
            onlooker.watch(address)
            onlooker.ask(address, b"ask")
        for _ in range(100):
            assert onlooker.collect(0.05) == []
            if onlooker.way(mute) is Way.SPEAKS and onlooker.way(plain) is Way.OPEN:
                break
        ways = [onlooker.way(address) for address in (nowhere, mute, plain)]
        assert ways == [Way.CLOSED, Way.SPEAKS, Way.OPEN]


def test_one_that_hangs_up_is_told_from_one_that_is_not_there() -> None:
    """A sideband with another key does; `mend top` said that no process listens there."""
    with contextlib.closing(StatusClient(1000, (bytes(32),))) as onlooker:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            onlooker.watch(address)
            for _ in range(3):
                listener.accept()[0].close()
                onlooker.collect(0.1)
        for _ in range(100):
            if onlooker.way(address) is Way.HUNG_UP:
                break
            onlooker.collect(0.05)
        assert onlooker.way(address) is Way.HUNG_UP


def test_a_process_that_comes_back_is_heard_again(onlooker: StatusClient) -> None:
    with answering(b"first life") as address:
        onlooker.watch(address)
        onlooker.watch(address)  # once is enough
        onlooker.ask(address, b"ask")
        assert answers_of(onlooker, 1) == {(address, b"first life")}
    for _ in range(5):
        onlooker.ask(address, b"ask")  # dropped, but for the one that waits for a connection
    with answering(b"second life", address):
        assert answers_of(onlooker, 1) == {(address, b"second life")}


def test_an_answer_beyond_the_limit_is_not_taken(onlooker: StatusClient) -> None:
    with answering(bytes(1001)) as address:
        onlooker.watch(address)
        onlooker.ask(address, b"ask")
        assert onlooker.collect(0.3) == []


def test_invalid_address_is_refused(onlooker: StatusClient) -> None:
    for wrong in ("rack7:21900", "tcp://rack7", "http://rack7:1", ""):
        with pytest.raises(ConfigError, match="address"):
            onlooker.watch(wrong)


def test_addresses_that_are_not_kept_are_closed_and_may_be_watched_again(
    onlooker: StatusClient,
) -> None:
    """A follower of a job whose racks move would otherwise connect to their former addresses until
    it ends."""
    with answering(b"one") as one, socket.create_server(("127.0.0.1", 0)) as server:
        former = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        for address in (one, former):
            onlooker.watch(address)
        near, _ = server.accept()
        onlooker.keep([one])
        with near:
            near.settimeout(30)
            while near.recv(100):
                pass
        onlooker.ask(one, b"ask")
        assert answers_of(onlooker, 1) == {(one, b"one")}
        onlooker.watch(former)
        server.settimeout(30)
        server.accept()[0].close()


def test_closing_leaves_no_thread() -> None:
    before = threading.active_count()
    made = StatusClient(1000)
    made.watch("tcp://127.0.0.1:1")
    made.close()
    made.close()
    assert threading.active_count() == before


def test_address_that_only_the_proxy_knows_answers_through_it() -> None:
    """`mend top` had to run in the cluster of the process that it asks."""
    far, near = "tcp://node-b1.inside:21900", "tcp://127.0.0.1:9"
    with answering(b"view") as address, proxy_to(address) as (proxy, asked):
        client = StatusClient(1000, socks_proxy=proxy)
        with contextlib.closing(client):
            client.watch(far)
            client.watch(near)
            client.ask(far, b"ask")
            assert answers_of(client, 1) == {(far, b"view")}
            assert client.way(far) is Way.SPEAKS
            assert client.way(near) is Way.CLOSED
    name = b"node-b1.inside"
    assert set(asked) == {b"\x05\x01\x00\x03" + bytes([len(name)]) + name + b"\x55\x8c"}


def test_address_behind_a_proxy_that_cannot_reach_it_is_closed() -> None:
    """The near end of the tunnel accepts every connection."""
    with (
        proxy_to("tcp://127.0.0.1:9") as (proxy, asked),
        contextlib.closing(StatusClient(1000, socks_proxy=proxy)) as client,
    ):
        client.watch("tcp://node-b1.inside:21900")
        while len(asked) < 2:
            client.collect(0.1)
            assert client.way("tcp://node-b1.inside:21900") is Way.CLOSED


@pytest.mark.parametrize("port", ["0", "65536", "99999999"])
def test_a_port_that_cannot_be_is_refused(onlooker: StatusClient, port: str) -> None:
    with pytest.raises(ConfigError, match=r"port must be 1\.\.65535"):
        onlooker.watch(f"tcp://127.0.0.1:{port}")
