"""A sideband with keys: who gets in, and what a connection without one can do."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import zmq

from mend.transport.security import PERSON, Secret, Secrets
from mend.transport.zap import ANSWERS_PER_TURN, ENDPOINT, FLOOD_REST_S, Zap, peer_of, pin
from mend.transport.zmq import ZmqSideband, readable
from mend.types import WITNESS, Peer

OURS, THEIRS = b"1" * 32, b"2" * 32
A, B = Peer(0, 0), Peer(1, 0)
SOON_S = 0.5
LIMIT_S = 20.0
MakeSideband = Callable[..., ZmqSideband]
MakeDealer = Callable[[], zmq.Socket[bytes]]


@pytest.fixture
async def sideband() -> AsyncIterator[MakeSideband]:
    made: list[ZmqSideband] = []

    def make(me: Peer, *secrets: bytes, bind: str = "tcp://127.0.0.1:0") -> ZmqSideband:
        made.append(ZmqSideband(bind, secrets=Secrets(secrets, me) if secrets else None, ranks=2))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def dealer() -> Iterator[MakeDealer]:
    context, made = zmq.Context(), list[zmq.Socket[bytes]]()

    def make() -> zmq.Socket[bytes]:
        made.append(context.socket(zmq.DEALER))
        return made[-1]

    yield make
    for each in made:
        each.close(linger=0)
    context.term()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - nothing tells what libzmq's thread has done
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("me", [B, Peer(0, 1), Peer(WITNESS, 0), PERSON])
async def test_a_frame_comes_with_the_process_whose_key_its_connection_has(
    sideband: MakeSideband, me: Peer
) -> None:
    there, here = sideband(A, OURS), sideband(me, OURS)
    here.connect(A, there.address)
    here.send(A, b"frame")
    found = await there.receive_from()
    assert (found.frame, found.sender) == (b"frame", me)
    assert there.is_connected(found.route)
    here.close()
    await until(lambda: not there.is_connected(found.route))


@pytest.mark.parametrize("theirs", [(), (THEIRS,)])
async def test_without_the_key_nobody_is_heard(
    sideband: MakeSideband, theirs: tuple[bytes, ...]
) -> None:
    there, stranger, friend = sideband(A, OURS), sideband(B, *theirs), sideband(B, OURS)
    for each, frame in ((stranger, b"forged"), (friend, b"right")):
        each.connect(A, there.address)
        each.send(A, frame)
    assert await there.receive() == b"right"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(there.receive(), SOON_S)


async def test_sender_with_a_key_sends_nothing_to_a_listener_without_it(
    sideband: MakeSideband,
) -> None:
    """Whoever takes a rack's address learns nothing: the server's key is pinned."""
    for fake in (sideband(A), sideband(A, THEIRS)):
        here = sideband(B, OURS)
        here.connect(A, fake.address)
        here.send(A, b"secret")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fake.receive(), SOON_S)


async def test_a_curve_client_with_any_key_of_its_own_is_refused(
    sideband: MakeSideband, dealer: MakeDealer
) -> None:
    """It may know the server's public key: CURVE alone would let it in."""
    there, client = sideband(A, OURS), dealer()
    public, secret = zmq.curve_keypair()
    client.setsockopt(zmq.CURVE_SERVERKEY, Secret(OURS).server().public)
    client.setsockopt(zmq.CURVE_PUBLICKEY, public)
    client.setsockopt(zmq.CURVE_SECRETKEY, secret)
    client.connect(there.address)
    client.send(b"forged")
    await until(lambda: there.strangers > 0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(there.receive(), SOON_S)


async def test_with_nobody_to_ask_nobody_gets_in(
    sideband: MakeSideband, dealer: MakeDealer
) -> None:
    """A dead authenticator must not open the door: libzmq asks nobody where no handler listens."""
    there, client = sideband(A, OURS), dealer()
    there._zap.close()
    pin(client, Secret(OURS).client(B), Secret(OURS).server())
    client.connect(there.address)
    client.send(b"frame")
    with pytest.raises(TimeoutError):  # not even a frame that names nobody, and so is not read
        await asyncio.wait_for(until(lambda: readable(there._inbox)), SOON_S)
    there._zap = None


async def test_a_rank_hears_its_own_leader_alone(sideband: MakeSideband) -> None:
    rank, stranger, leader = sideband(Peer(1, 1), OURS), sideband(A, OURS), sideband(B, OURS)
    for each, frame in ((stranger, b"other rack"), (leader, b"leader")):
        each.connect(Peer(1, 1), rank.address)
        each.send(Peer(1, 1), frame)
    assert (await rank.receive_from()).sender == B
    await until(lambda: rank.strangers > 0)


@pytest.mark.parametrize(
    ("server", "client"),
    [((OURS, THEIRS), (THEIRS, OURS)), ((OURS, THEIRS), (OURS,)), ((OURS,), (THEIRS, OURS))],
)
async def test_racks_whose_first_keys_differ_meet_while_both_accept_both(
    sideband: MakeSideband, server: tuple[bytes, ...], client: tuple[bytes, ...]
) -> None:
    there, here = sideband(A, *server), sideband(B, *client)
    here.connect(A, there.address)
    for number in range(3):
        frame = b"%d" % number
        here.send(A, frame)
        async with asyncio.timeout(LIMIT_S):
            while await there.receive() != frame:
                here.send(A, frame)


async def test_a_server_that_comes_back_with_the_new_key_first_is_found_again(
    sideband: MakeSideband,
) -> None:
    old, here = sideband(A, OURS, THEIRS), sideband(B, OURS, THEIRS)
    here.connect(A, old.address)
    here.send(A, b"before")
    assert await old.receive() == b"before"
    address = old.address
    old.close()
    new = sideband(A, THEIRS, OURS, bind=address)
    waiting = asyncio.create_task(new.receive())
    async with asyncio.timeout(LIMIT_S):
        while not waiting.done():
            here.send(A, b"after")
            await asyncio.sleep(0.05)
    assert waiting.result() == b"after"


async def test_bytes_that_are_no_handshake_hold_up_nobody(sideband: MakeSideband) -> None:
    there, here = sideband(A, OURS), sideband(B, OURS)
    port = int(there.address.rpartition(":")[2])
    half = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
    for number, each in enumerate(half):
        each.sendall(b"\xff\x00\x00\x00" if number % 2 else b"GET / HTTP/1.1\r\n\r\n")
    here.connect(A, there.address)
    here.send(A, b"served")
    assert await asyncio.wait_for(there.receive(), LIMIT_S) == b"served"
    for each in half:
        each.close()


def test_a_name_stands_for_its_process() -> None:
    assert peer_of("65535.0") == Peer(WITNESS, 0)


async def test_a_flood_of_handshakes_does_not_keep_the_loop() -> None:
    """Handshakes are libzmq's work, and its question is ours: it asks without end here."""
    asked, answered, loop = 1_000, 0, asyncio.get_running_loop()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    zap = Zap(context, {})
    asking = context.socket(zmq.DEALER)
    asking.connect(ENDPOINT)
    since_s = loop.time()
    for _ in range(asked):
        asking.send_multipart([b"", b"1.0", b"1", b"mend", b"", b"", b"CURVE", bytes(32)])
    while answered < asked:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.sleep(0)
        while asking.poll(0):
            assert asking.recv_multipart()[3] == b"400"
            answered += 1
        assert answered <= ((loop.time() - since_s) / FLOOD_REST_S + 2) * ANSWERS_PER_TURN
    zap.close()
    asking.close(linger=0)
    context.term()
