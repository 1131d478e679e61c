"""MemoryNetwork: what a test may rely on beyond the common promises."""

from __future__ import annotations

import asyncio

import pytest

from mend.errors import AddressInUse, ChecksumMismatch, PayloadGone
from mend.transport.memory import CHUNK_BYTES, INBOX_FRAMES_MAX, MemoryNetwork
from mend.types import Address, Member, Peer, offer_key

KEY = offer_key(Member(0, 1), 0, 0, 1)
HERE, THERE = Address("here", 1), Address("there", 1)


async def test_two_networks_do_not_meet() -> None:
    one, two = MemoryNetwork(), MemoryNetwork()
    here = one.sideband("a")
    two.sideband("b")
    here.connect(Peer(1, 0), "b")
    assert not here.send(Peer(1, 0), b"hello?")


async def test_an_inbox_is_bounded() -> None:
    network = MemoryNetwork()
    here = network.sideband("here")
    here.connect(Peer(0, 0), "here")
    assert all(here.send(Peer(0, 0), b"x") for _ in range(INBOX_FRAMES_MAX))
    assert not here.send(Peer(0, 0), b"x")
    await here.receive()
    assert here.send(Peer(0, 0), b"x")


async def test_a_lane_address_has_one_owner_until_it_closes() -> None:
    network = MemoryNetwork()
    first = network.lane(HERE)
    with pytest.raises(AddressInUse):
        network.lane(HERE)
    first.close()
    network.lane(HERE)


async def test_a_drop_between_two_chunks_ends_the_reader() -> None:
    network = MemoryNetwork()
    holder, reader = network.lane(HERE), network.lane(THERE)
    holder.serve(KEY, memoryview(bytes(3 * CHUNK_BYTES)))
    into = memoryview(bytearray(3 * CHUNK_BYTES))
    fetching = asyncio.create_task(reader.fetch([HERE], KEY, "", into))
    for _ in range(2):  # one turn to begin, one for the first chunk
        await asyncio.sleep(0)
    assert reader.bytes_received == CHUNK_BYTES
    holder.drop(KEY)
    with pytest.raises(PayloadGone):
        await fetching


async def test_a_transfer_goes_on_where_the_holder_before_ended() -> None:
    network = MemoryNetwork()
    one, two, reader = (network.lane(Address(name, 1)) for name in "abc")
    for holder in (one, two):
        holder.serve(KEY, memoryview(bytes(3 * CHUNK_BYTES)))
    into = memoryview(bytearray(b"x") * (3 * CHUNK_BYTES))
    fetching = asyncio.create_task(reader.fetch([one.address, two.address], KEY, "", into))
    for _ in range(2):  # one turn to begin, one for the first chunk
        await asyncio.sleep(0)
    assert reader.bytes_received == CHUNK_BYTES
    one.close()
    await fetching
    assert not any(into)
    assert (one.bytes_sent, two.bytes_sent) == (CHUNK_BYTES, 2 * CHUNK_BYTES)


async def test_damage_is_more_telling_than_absence() -> None:
    network = MemoryNetwork()
    holder, reader = network.lane(HERE), network.lane(THERE)
    holder.serve(KEY, memoryview(b"four"))
    with pytest.raises(ChecksumMismatch):
        await reader.fetch([HERE, THERE], KEY, "00" * 16, memoryview(bytearray(4)))
