"""Every Lane keeps the same promises. One suite, over TCP (plain, with keys, with a delay), and on
the simulated network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial

import numpy as np
import pytest

from mend.errors import ChecksumMismatch, PayloadGone, PeerUnreachable, TransportError
from mend.transport.bulk_client import BulkLane, checksum_of
from mend.transport.delayed import Delay, DelayedLane
from mend.transport.security import Secrets
from mend.types import Address, Extent, Member, offer_key, state_key
from tests.conformance.simulated import SimulatedLane, Site

KEY = offer_key(Member(0, 11), 0, 2, 5)
OTHER = state_key(0, 2, 6, "ab" * 32)
NOBODY = Address("127.0.0.1", 1)

Lane = BulkLane | SimulatedLane
MakeLane = Callable[[], Lane]


def payload(size: int, seed: int = 1) -> bytes:
    """Bytes that differ from offset to offset, so that a misplaced chunk shows."""
    numbers = np.arange(size // 8 + 1, dtype=">u8") * 2654435761 + seed
    return numbers.astype(">u8").tobytes()[:size]


@pytest.fixture(params=["pull", "sealed", "authenticated", "delayed", "simulated"])
async def lane(request: pytest.FixtureRequest) -> AsyncIterator[MakeLane]:
    """Makes lanes; all are closed at the end."""
    made, site = list[Lane](), Site()

    def make() -> Lane:
        if request.param == "simulated":
            made.append(SimulatedLane(site))
            return made[-1]
        keys = None
        if request.param in ("sealed", "authenticated"):
            conceal = request.param == "sealed"
            keys = Secrets([b"conformance" * 2 + bytes(10)], conceal=conceal)
        token, chunk = b"conformance-job!", 320 << 10  # no multiple of what is sealed at once
        late = partial(DelayedLane, Delay(1000, "long_tail", 3))
        kind = late if request.param == "delayed" else BulkLane
        new = kind("127.0.0.1", None, token=token, chunk_bytes=chunk, secrets=keys)
        made.append(new)
        return new

    yield make
    for each in made:
        each.close()


async def pulled(
    lane: Lane, holders: list[Address], key: bytes, size: int, checksum: str = ""
) -> bytes:
    into = bytearray(size)
    await lane.fetch(holders, key, checksum, memoryview(into))
    return bytes(into)


@pytest.mark.parametrize("size", [1, 65_537, (3 << 20) + 5])
@pytest.mark.parametrize("checked", [True, False])
async def test_served_payload_arrives_unchanged(lane: MakeLane, size: int, checked: bool) -> None:
    holder, reader, sent = lane(), lane(), payload(size)
    holder.serve(KEY, memoryview(sent))
    checksum = checksum_of(sent) if checked else ""
    assert await pulled(reader, [holder.address], KEY, size, checksum) == sent
    if isinstance(holder, BulkLane) and isinstance(reader, BulkLane):
        assert holder.bytes_sent >= size
        assert reader.bytes_received >= size
        assert holder.bytes_received == reader.bytes_sent == 0


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (7, 70_001), (1 << 20, (3 << 20) + 5)])
async def test_an_extent_of_what_is_served_arrives(lane: MakeLane, start: int, stop: int) -> None:
    holder, reader, sent = lane(), lane(), payload((3 << 20) + 5)
    holder.serve(KEY, memoryview(sent))
    into, checksum = bytearray(stop - start), checksum_of(sent[start:stop])
    view = memoryview(into)
    await reader.fetch([holder.address], KEY, checksum, view, Extent(start, len(sent)))
    assert into == sent[start:stop]
    assert not isinstance(reader, BulkLane) or reader.bytes_received < len(into) + 4096
    with pytest.raises(ChecksumMismatch, match="expected"):
        await reader.fetch([holder.address], KEY, "", view, Extent(start, len(sent) + 1))


async def test_keys_do_not_mix(lane: MakeLane) -> None:
    holder, reader = lane(), lane()
    holder.serve(KEY, memoryview(b"offer"))
    holder.serve(OTHER, memoryview(b"state"))
    assert await pulled(reader, [holder.address], OTHER, 5) == b"state"
    assert await pulled(reader, [holder.address], KEY, 5) == b"offer"


async def test_many_fetches_at_once_do_not_mix(lane: MakeLane) -> None:
    holders, reader = [lane(), lane()], lane()
    keys = [offer_key(Member(1, 4), 0, fragment, 1) for fragment in range(20)]
    for number, key in enumerate(keys):
        holders[number % 2].serve(key, memoryview(payload(200_003, seed=number)))
    both = [holder.address for holder in holders]
    got = await asyncio.gather(*(pulled(reader, both, key, 200_003) for key in keys))
    assert got == [payload(200_003, seed=number) for number in range(20)]


async def test_a_lane_may_ask_itself(lane: MakeLane) -> None:
    alone = lane()
    alone.serve(KEY, memoryview(b"mine"))
    assert await pulled(alone, [alone.address], KEY, 4) == b"mine"


async def test_typed_views_are_bytes(lane: MakeLane) -> None:
    holder, reader, sent = lane(), lane(), bytearray(payload(80))
    holder.serve(KEY, memoryview(sent).cast("f"))
    into = bytearray(80)
    await reader.fetch([holder.address], KEY, checksum_of(sent), memoryview(into).cast("d"))
    assert into == sent


async def test_the_next_holder_helps_out(lane: MakeLane) -> None:
    empty, full, reader = lane(), lane(), lane()
    full.serve(KEY, memoryview(b"here"))
    holders = [NOBODY, empty.address, full.address]
    assert await pulled(reader, holders, KEY, 4, checksum_of(b"here")) == b"here"


async def test_gone_is_said_only_when_all_say_so(lane: MakeLane) -> None:
    one, two, reader = lane(), lane(), lane()
    one.serve(KEY, memoryview(b"here"))
    one.drop(KEY)
    one.drop(KEY)  # unknown keys are ignored
    with pytest.raises(PayloadGone):
        await pulled(reader, [one.address, two.address], KEY, 4)
    with pytest.raises(PeerUnreachable):
        await pulled(reader, [one.address, NOBODY], KEY, 4)


async def test_without_a_holder_nobody_can_be_reached(lane: MakeLane) -> None:
    with pytest.raises(PeerUnreachable):
        await pulled(lane(), [], KEY, 4)


async def test_a_wrong_payload_is_refused_and_replaced(lane: MakeLane) -> None:
    wrong, right, reader = lane(), lane(), lane()
    sent = payload(700_001)
    wrong.serve(KEY, memoryview(payload(700_001, seed=2)))
    right.serve(KEY, memoryview(sent))
    with pytest.raises(ChecksumMismatch):
        await pulled(reader, [wrong.address], KEY, len(sent), checksum_of(sent))
    holders = [wrong.address, right.address]
    assert await pulled(reader, holders, KEY, len(sent), checksum_of(sent)) == sent


@pytest.mark.parametrize("size", [3, 5])
async def test_a_payload_of_another_size_is_refused(lane: MakeLane, size: int) -> None:
    holder, reader = lane(), lane()
    holder.serve(KEY, memoryview(b"four"))
    with pytest.raises(ChecksumMismatch):
        await pulled(reader, [holder.address], KEY, size)


async def test_a_key_may_be_served_again_with_other_bytes(lane: MakeLane) -> None:
    holder, reader = lane(), lane()
    for sent in (b"first", b"second"):
        holder.serve(KEY, memoryview(sent))
        assert await pulled(reader, [holder.address], KEY, len(sent)) == sent
        holder.drop(KEY)


async def test_a_dropped_payload_is_released(lane: MakeLane) -> None:
    holder, sent = lane(), bytearray(b"pool")
    holder.serve(KEY, memoryview(sent))
    holder.drop(KEY)
    sent.extend(b"!")  # BufferError if anybody still held a view of it


async def test_a_cancelled_fetch_leaves_the_destination_alone(lane: MakeLane) -> None:
    holder, reader, sent = lane(), lane(), payload(8 << 20)
    if isinstance(reader, SimulatedLane):
        pytest.skip("a host's fetch cannot be cancelled")
    holder.serve(KEY, memoryview(sent))
    into = bytearray(len(sent))
    fetching = asyncio.create_task(reader.fetch([holder.address], KEY, "", memoryview(into)))
    await asyncio.sleep(0)  # it has begun, and has had no turn to end
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    into[:] = bytes(len(into))
    # Another transfer over the same connections and threads: late writers would have their time.
    assert await pulled(reader, [holder.address], KEY, len(sent)) == sent
    assert not any(into)


async def test_after_close_nobody_answers(lane: MakeLane) -> None:
    holder, reader = lane(), lane()
    holder.serve(KEY, memoryview(b"here"))
    assert await pulled(reader, [holder.address], KEY, 4) == b"here"
    holder.close()
    holder.close()  # idempotent
    with pytest.raises(PeerUnreachable):
        await pulled(reader, [holder.address], KEY, 4)


async def test_closing_the_reader_ends_its_fetch(lane: MakeLane) -> None:
    holder, reader, sent = lane(), lane(), payload(8 << 20)
    holder.serve(KEY, memoryview(sent))
    into = memoryview(bytearray(len(sent)))
    fetching = asyncio.create_task(reader.fetch([holder.address], KEY, "", into))
    await asyncio.sleep(0)
    reader.close()
    with contextlib.suppress(TransportError):  # threads may have moved all of it meanwhile
        await fetching
    assert fetching.done()
