"""What every Sideband promises: over ZeroMQ, without keys and with them, and on the simulated
network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from mend.errors import AddressInUse, TransportError
from mend.transport.security import Secrets
from mend.transport.zmq import ZmqSideband
from mend.types import Peer
from tests.conformance.simulated import SimulatedSideband, Site

A, B = Peer(0, 0), Peer(1, 0)
FRAME_BYTES_MAX = 1 << 16

Sideband = ZmqSideband | SimulatedSideband
MakeSideband = Callable[..., Sideband]


@pytest.fixture(params=["zmq", "curve", "simulated"])
async def sideband(request: pytest.FixtureRequest) -> AsyncIterator[MakeSideband]:
    """Makes sidebands, anywhere or at a given address; all are closed at the end."""
    made, site = list[Sideband](), Site()

    def make(address: str = "") -> Sideband:
        if request.param == "simulated":
            made.append(SimulatedSideband(site, address))
            return made[-1]
        bind, keys = address or "tcp://127.0.0.1:0", None
        if request.param == "curve":
            keys = Secrets([bytes(32)], Peer(0, 0))
        new = ZmqSideband(bind, frame_bytes_max=FRAME_BYTES_MAX, secrets=keys)
        made.append(new)
        return new

    yield make
    for each in made:
        each.close()


def connected(sideband: MakeSideband) -> tuple[Sideband, Sideband]:
    """One, and another that it knows as B."""
    here, there = sideband(), sideband()
    here.connect(B, there.address)
    return here, there


async def until_heard(sender: Sideband, peer: Peer, receiver: Sideband) -> bytes:
    """Say it again until it is heard, as the protocol does. Ends with the first frame heard."""
    hearing = asyncio.create_task(receiver.receive())
    while not hearing.done():
        sender.send(peer, b"again")
        await asyncio.wait([hearing], timeout=0.02)
    return hearing.result()


async def test_frames_arrive_whole_and_in_order(sideband: MakeSideband) -> None:
    here, there = connected(sideband)
    frames = [bytes([n]) * (n * 200) for n in range(50)]
    assert all(here.send(B, frame) for frame in frames)
    assert [await there.receive() for _ in frames] == frames
    if isinstance(here, ZmqSideband) and isinstance(there, ZmqSideband):
        assert here.bytes_sent == there.bytes_received == sum(map(len, frames))


async def test_both_ways_and_to_oneself(sideband: MakeSideband) -> None:
    here, there = connected(sideband)
    there.connect(A, here.address)
    here.connect(A, here.address)
    here.send(B, b"to there")
    assert await there.receive() == b"to there"
    there.send(A, b"to here")
    assert await here.receive() == b"to here"
    here.send(A, b"to myself")
    assert await here.receive() == b"to myself"


async def test_a_waiting_receiver_wakes_up(sideband: MakeSideband) -> None:
    here, there = connected(sideband)
    waiting = asyncio.create_task(there.receive())
    await asyncio.sleep(0)
    assert not waiting.done()
    here.send(B, b"wake")
    assert await waiting == b"wake"


async def test_a_cancelled_receive_loses_nothing(sideband: MakeSideband) -> None:
    here, there = connected(sideband)
    for _ in range(3):
        waiting = asyncio.create_task(there.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    here.send(B, b"kept")
    assert await there.receive() == b"kept"


async def test_sending_to_a_stranger_is_false(sideband: MakeSideband) -> None:
    assert not sideband().send(B, b"hello?")


async def test_a_frame_too_large_is_not_sent(sideband: MakeSideband) -> None:
    here, there = sideband(), sideband()
    if isinstance(here, SimulatedSideband):
        pytest.skip("it carries messages, whose limit is that of wire.encode")
    here.connect(B, there.address)
    assert not here.send(B, bytes(FRAME_BYTES_MAX + 1))
    assert here.send(B, bytes(FRAME_BYTES_MAX))
    assert len(await there.receive()) == FRAME_BYTES_MAX


async def test_connecting_again_keeps_the_connection(sideband: MakeSideband) -> None:
    here, there = sideband(), sideband()
    for n in range(5):
        here.connect(B, there.address)
        here.send(B, bytes([n]))
    assert [await there.receive() for _ in range(5)] == [bytes([n]) for n in range(5)]


async def test_a_peer_that_moved_is_followed(sideband: MakeSideband) -> None:
    here, old, new = sideband(), sideband(), sideband()
    here.connect(B, old.address)
    here.send(B, b"old home")
    assert await old.receive() == b"old home"
    here.connect(B, new.address)
    here.send(B, b"new home")
    assert await new.receive() == b"new home"


async def test_a_peer_that_restarts_is_heard_again(sideband: MakeSideband) -> None:
    here, there = connected(sideband)
    here.send(B, b"first life")
    assert await there.receive() == b"first life"
    there.close()
    second = sideband(there.address)
    assert await until_heard(here, B, second) == b"again"


async def test_a_peer_that_is_not_there_does_not_block(sideband: MakeSideband) -> None:
    here, there = sideband(), sideband()
    there.close()
    here.connect(B, there.address)
    for _ in range(5000):
        here.send(B, bytes(1000))  # true or false, but at once


async def test_an_address_has_one_owner(sideband: MakeSideband) -> None:
    first = sideband()
    with pytest.raises(AddressInUse, match=first.address):
        sideband(first.address)


async def test_close_ends_a_waiting_receiver(sideband: MakeSideband) -> None:
    alone = sideband()
    waiting = asyncio.create_task(alone.receive())
    await asyncio.sleep(0)
    alone.close()
    alone.close()  # idempotent
    with pytest.raises(TransportError):
        await waiting


async def test_the_last_frame_before_close_gets_out(sideband: MakeSideband) -> None:
    here, there = connected(sideband)
    here.send(B, b"hello")
    assert await there.receive() == b"hello"
    here.send(B, b"farewell")
    here.close()
    assert await there.receive() == b"farewell"
