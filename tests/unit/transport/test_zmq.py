"""ZmqSideband: what the real sockets add to the common promises."""

from __future__ import annotations

import asyncio
import itertools
import select
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import zmq

from mend.errors import AddressInUse, ConfigError
from mend.transport.zmq import (
    BYTES_PER_TURN,
    EARLY_BYTES_MAX,
    EARLY_FRAMES_MAX,
    FLOOD_REST_S,
    FRAMES_PER_TURN,
    INBOX_FRAMES_MAX,
    OUTBOX_FRAMES_MAX,
    REPLIES_MAX,
    Received,
    ZmqSideband,
    readable,
)
from mend.types import Peer

B = Peer(1, 0)
QUEUED_BYTES_MAX = (INBOX_FRAMES_MAX + OUTBOX_FRAMES_MAX) << 20
"""Of frames of a MiB."""
KERNEL_BYTES_MAX = sum(
    int(Path("/proc/sys/net/ipv4", limit).read_text().split()[2])
    for limit in ("tcp_rmem", "tcp_wmem")
)
"""In the buffers of both ends of a connection, which the kernel lets grow under load."""

MakeSideband = Callable[..., ZmqSideband]
MakeDealer = Callable[..., zmq.Socket[bytes]]


@pytest.fixture
async def sideband() -> AsyncIterator[MakeSideband]:
    made: list[ZmqSideband] = []

    def make(bind: str = "tcp://127.0.0.1:0", **settings: int) -> ZmqSideband:
        made.append(ZmqSideband(bind, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def dealer() -> Iterator[MakeDealer]:
    """Connected to an address, if one is given."""
    context, made = zmq.Context(), list[zmq.Socket[bytes]]()

    def make(address: str = "") -> zmq.Socket[bytes]:
        made.append(context.socket(zmq.DEALER))
        if address:
            made[-1].connect(address)
        return made[-1]

    yield make
    for each in made:
        each.close(linger=0)
    context.term()


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def connected(sideband: MakeSideband) -> tuple[ZmqSideband, ZmqSideband]:
    """Who sends, and whom it has reached as `B`."""
    here, there = sideband(), sideband()
    here.connect(B, there.address)
    here.send(B, b"connected")
    assert await there.receive() == b"connected"
    return here, there


@pytest.mark.parametrize(
    ("bind", "start"),
    [
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:"),
        ("tcp://localhost:0", "tcp://127.0.0.1:"),
        ("tcp://[::1]:0", "tcp://[::1]:"),
        ("tcp://*:0", "tcp://0.0.0.0:"),
    ],
)
async def test_the_address_is_the_real_one(sideband: MakeSideband, bind: str, start: str) -> None:
    there, here = sideband(bind), sideband()
    assert there.address.startswith(start)
    assert int(there.address.rpartition(":")[2]) > 0
    here.connect(B, there.address.replace("0.0.0.0", "localhost"))
    here.send(B, b"found")
    assert await there.receive() == b"found"


@pytest.mark.parametrize(
    "bind",
    ["127.0.0.1:0", "tcp://127.0.0.1", "udp://127.0.0.1:1", "tcp://192.0.2.1:0", "tcp://a b:1"],
)
async def test_a_bind_that_cannot_work_is_refused(bind: str) -> None:
    with pytest.raises(ConfigError, match="tcp://"):
        ZmqSideband(bind)


async def test_a_connect_that_cannot_work_is_refused(sideband: MakeSideband) -> None:
    here, there = sideband(), sideband()
    here.connect(B, there.address)
    with pytest.raises(ConfigError):
        here.connect(B, "nonsense")
    here.send(B, b"the old way still works")
    assert await there.receive() == b"the old way still works"


async def test_a_port_that_another_program_holds_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        address = f"tcp://127.0.0.1:{owner.getsockname()[1]}"
        with pytest.raises(AddressInUse, match=address):
            ZmqSideband(address)


async def test_the_newest_frames_wait_for_the_first_connection(
    sideband: MakeSideband, free_port: int
) -> None:
    here, address = sideband(), f"tcp://127.0.0.1:{free_port}"
    here.connect(B, address)
    for n in range(EARLY_FRAMES_MAX + 10):
        assert here.send(B, n.to_bytes(2, "big"))
    assert not here.send(B, bytes(EARLY_BYTES_MAX + 1))
    there = sideband(address)
    got = [int.from_bytes(await there.receive(), "big") for _ in range(EARLY_FRAMES_MAX)]
    assert got == list(range(10, EARLY_FRAMES_MAX + 10))


async def test_waiting_frames_are_bounded_in_bytes(sideband: MakeSideband, free_port: int) -> None:
    here, address = sideband(), f"tcp://127.0.0.1:{free_port}"
    here.connect(B, address)
    for n in range(10):
        here.send(B, bytes([n]) * (EARLY_BYTES_MAX // 4))
    there = sideband(address)
    assert [(await there.receive())[0] for _ in range(4)] == [6, 7, 8, 9]


async def test_a_restarted_peer_hears_nothing_of_the_time_it_was_dead(
    sideband: MakeSideband,
) -> None:
    here, there = await connected(sideband)
    there.close()
    while here.send(B, b"stale"):  # noqa: ASYNC110 - nothing tells that TCP has noticed
        await asyncio.sleep(0.01)
    second = sideband(there.address)
    hearing = asyncio.create_task(second.receive())
    while not hearing.done():
        here.send(B, b"fresh")
        await asyncio.wait([hearing], timeout=0.02)
    assert hearing.result() == b"fresh"


async def test_a_stuck_peer_fills_a_bounded_queue_and_blocks_nobody(sideband: MakeSideband) -> None:
    here, _ = await connected(sideband)
    sent = 0
    while here.send(B, bytes(1 << 14)):  # `B` reads nothing from here on
        sent += 1
        assert sent < 100_000, "unbounded"


async def test_a_peer_that_reads_nothing_costs_a_bounded_number_of_bytes(
    sideband: MakeSideband,
) -> None:
    """A rack that joined under load grew from 323 to 1,157 MB: 5,000 states of up to 8 MiB could
    wait for it, most of them out of date. What waits in the kernel is bounded there."""
    assert QUEUED_BYTES_MAX <= 96 << 20
    here, there = await connected(sideband)
    frame, refused, sent = bytes(1 << 20), 0, 0
    while refused < 100:  # what is queued goes on to the other side meanwhile
        if here.send(B, frame):
            refused, sent = 0, sent + len(frame)
            assert sent <= QUEUED_BYTES_MAX + KERNEL_BYTES_MAX
        else:
            refused += 1
        await asyncio.sleep(0.005)
    heard = 0
    while heard * len(frame) < sent:
        assert len(await there.receive()) == len(frame), "none of what was taken is lost"
        heard += 1


async def test_garbage_is_dropped_counted_and_survived(
    sideband: MakeSideband, dealer: MakeDealer
) -> None:
    here, there = sideband(), sideband(frame_bytes_max=1000)
    host, port = there.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    vandal = dealer(there.address)
    vandal.send_multipart([b"two", b"parts"])
    vandal.send(b"one part")
    assert await there.receive() == b"one part"
    assert there.dropped == 1
    vandal.send(bytes(1001))  # too large: libzmq cuts the connection
    here.connect(B, there.address)
    here.send(B, b"unharmed")
    assert await there.receive() == b"unharmed"


async def test_a_flood_leaves_room_for_other_tasks(sideband: MakeSideband) -> None:
    here, there = await connected(sideband)
    ticks, heard = 0, 0

    async def tick() -> None:
        nonlocal ticks
        while heard < 5000:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    sent = 0
    while heard < 5000:
        while sent < heard + 500 and here.send(B, b"flood"):
            sent += 1
        while heard < sent:
            await there.receive()
            heard += 1
    await ticking
    assert ticks >= 5000 // 64


async def test_close_leaves_no_thread_and_no_port(free_port: int) -> None:
    before = threading.active_count()
    here = ZmqSideband("tcp://127.0.0.1:0")
    here.connect(B, f"tcp://127.0.0.1:{free_port}")
    here.send(B, b"never heard")
    here.close()
    assert threading.active_count() == before
    port = int(here.address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        pass
    assert not here.send(B, b"after close")


# -------------------------------------------------------------- strangers that only ask


async def heard_by(asker: zmq.Socket[bytes]) -> bytes:
    """Without blocking the loop that is to answer."""
    while not asker.poll(0):  # noqa: ASYNC110 - the asker is no part of the loop
        await asyncio.sleep(0.001)
    return asker.recv()


async def test_diverted_frame_is_answered_on_its_own_connection(
    sideband: MakeSideband, dealer: MakeDealer
) -> None:
    here = sideband()
    here.divert(b"ask", lambda route, frame: replied.append(here.reply(route, b"to " + frame)))
    replied: list[bool] = []
    receiving = asyncio.create_task(here.receive())
    askers = [dealer(here.address) for _ in range(3)]
    for number, asker in enumerate(askers):
        asker.send(b"ask %d" % number)
    for number, asker in enumerate(askers):
        assert await heard_by(asker) == b"to ask %d" % number
    assert not receiving.done(), "a diverted frame is not received"
    askers[0].send(b"a message")
    assert await receiving == b"a message"
    assert replied == [True] * 3
    assert not here.reply(b"nobody", b"frame")


async def test_more_diverted_frames_than_a_turn_reads_hide_nothing(
    sideband: MakeSideband, dealer: MakeDealer
) -> None:
    """A turn of the loop reads 64 frames. When none of them was for `receive`, what was queued
    behind them was seen only when something else arrived: frames of several parts, which anybody
    may send, could so silence the sideband."""
    here = sideband()
    seen: list[bytes] = []
    here.divert(b"ask", lambda route, frame: seen.append(frame))
    asker = dealer(here.address)
    for waits_first in (True, False):
        receiving = asyncio.create_task(here.receive()) if waits_first else None
        await asyncio.sleep(0)
        for _ in range(500):
            asker.send(b"ask")
            asker.send_multipart([b"of", b"parts"])
        asker.send(b"behind them")
        receiving = receiving or asyncio.create_task(here.receive())
        assert await asyncio.wait_for(receiving, 20) == b"behind them"
    assert len(seen) == 1000
    assert here.dropped == 1000


@pytest.mark.parametrize("stands", [True, False])
async def test_a_question_about_a_connection_loses_no_wake_up(
    sideband: MakeSideband, stands: bool
) -> None:
    """Asking about one uses up the signal of frames that came meanwhile. Asked about one that was
    gone, or read nothing, a sideband heard nothing any more: seen when a job was flooded."""
    there, here = sideband(), sideband()
    here.connect(B, there.address)
    here.send(B, b"first")
    found = await there.receive_from()
    receiving = asyncio.create_task(there.receive())
    await asyncio.sleep(0)  # it waits now
    here.send(B, b"second")
    select.select([there._descriptor], [], [], 20)  # the loop stands still: it would read it
    assert there.is_connected(found.route if stands else b"nobody") == stands
    assert await asyncio.wait_for(receiving, 20) == b"second"


async def test_listener_gets_waiting_frames_and_each_frame_once_in_order(
    sideband: MakeSideband,
) -> None:
    """Also where each is answered by a question about its connection, which uses up signals."""
    there, here, heard = sideband(), sideband(), list[bytes]()
    here.connect(B, there.address)
    frames = [b"%d" % number for number in range(500)]
    for frame in frames[:20]:
        here.send(B, frame)

    def take(found: Received) -> None:
        heard.append(found.frame)
        assert found.host() == "127.0.0.1"
        assert there.is_connected(found.route)

    await until(lambda: readable(there._inbox))
    there.hear(take)
    await until(lambda: len(heard) >= 20)
    for frame in frames[20:]:
        await until(lambda frame=frame: here.send(B, frame))
        await asyncio.sleep(0)
    await until(lambda: len(heard) >= len(frames))
    assert heard == frames


async def test_client_that_does_not_read_gets_no_more_answers(
    sideband: MakeSideband, dealer: MakeDealer
) -> None:
    """Only a few answers wait for him, and nobody else notices."""
    here = sideband()
    told: list[bool] = []
    answer = bytes(1 << 18)
    answers_max = REPLIES_MAX + (32 << 20) // len(answer)  # and what the kernel holds
    here.divert(b"ask", lambda route, _: told.append(here.reply(route, answer)))
    receiving = asyncio.create_task(here.receive())
    greedy, modest = dealer(), dealer(here.address)
    greedy.setsockopt(zmq.RCVHWM, 1)
    greedy.setsockopt(zmq.RCVBUF, 1 << 14)
    greedy.connect(here.address)
    while True not in told or told[-1]:
        greedy.send(b"ask")
        await asyncio.sleep(0)
        assert told.count(True) <= answers_max, "unbounded"
    modest.send(b"ask")
    assert await heard_by(modest) == answer
    receiving.cancel()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - nothing tells what has been heard
            await asyncio.sleep(0.001)


FLOOD = 3_000
"""Frames; a loop that reads without a rest takes some 20 ms for them."""


@pytest.mark.parametrize(("prefix", "hears"), [(b"", False), (b"look", False), (b"", True)])
async def test_a_flood_is_read_no_faster_than_its_limit_and_a_friend_in_its_turn(
    sideband: MakeSideband, dealer: MakeDealer, prefix: bytes, hears: bool
) -> None:
    """`prefix`: the flood is of frames that are diverted, and never reach `receive`. `hears`: they
    are handed to a function. Slowness can only make it read less: the count is held against the
    time that there was."""
    friend, there = await connected(sideband)
    heard: list[bytes] = []
    there.divert(b"look", lambda _, frame: heard.append(frame))
    loop = asyncio.get_running_loop()

    async def listen() -> None:
        while True:
            heard.append(await there.receive())

    flooder = dealer()
    flooder.setsockopt(zmq.SNDHWM, 0)
    flooder.connect(there.address)
    since_s = loop.time()
    for number in range(FLOOD):
        flooder.send(prefix + b"%d" % number)
    friend.send(B, b"friend")
    if hears:
        there.hear(lambda found: heard.append(found.frame))
    listening = asyncio.create_task(asyncio.Event().wait() if hears else listen())
    await until(lambda: b"friend" in heard)
    assert len(heard) < FLOOD, "it does not stand behind the flood"
    await until(lambda: len(heard) >= FLOOD / 2)
    turns = (loop.time() - since_s) / FLOOD_REST_S + 2
    assert len(heard) <= turns * FRAMES_PER_TURN
    listening.cancel()


async def test_a_turn_reads_a_bounded_number_of_bytes(
    sideband: MakeSideband, dealer: MakeDealer
) -> None:
    there = sideband()
    frame, turns = bytes(BYTES_PER_TURN // 4), []
    read = there._read
    there._read = lambda take: (read(take), turns.append(there.bytes_received))[0]
    flooder = dealer(there.address)
    for _ in range(40):
        flooder.send(frame)
    for _ in range(40):
        assert len(await asyncio.wait_for(there.receive(), 60)) == len(frame)
    steps = [after - before for before, after in itertools.pairwise([0, *turns])]
    assert max(steps) <= BYTES_PER_TURN
