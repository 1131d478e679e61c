"""StatusClient: who asks from outside, with real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mend.errors import ConfigError
from mend.transport.status_client import StatusClient, Way
from mend.transport.zmq import ZmqSideband


class Served:
    """A sideband in a thread of its own. `answer`: to whatever is diverted; None: silence."""

    def __init__(self, prefix: bytes, answer: bytes | None) -> None:
        self.prefix, self.answer = prefix, answer
        self.address = ""


@contextmanager
def serving(
    answer: bytes | None, bind: str = "tcp://127.0.0.1:0", prefix: bytes = b""
) -> Iterator[Served]:
    loop, served, ready = asyncio.new_event_loop(), Served(prefix, answer), threading.Event()

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


def test_it_says_how_far_one_comes(onlooker: StatusClient, free_port: int) -> None:
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


def test_what_is_no_address_is_refused(onlooker: StatusClient) -> None:
    for wrong in ("rack7:21900", "tcp://rack7", "http://rack7:1", ""):
        with pytest.raises(ConfigError, match="address"):
            onlooker.watch(wrong)


def test_closing_leaves_no_thread() -> None:
    before = threading.active_count()
    made = StatusClient(1000)
    made.watch("tcp://127.0.0.1:1")
    made.close()
    made.close()
    assert threading.active_count() == before
