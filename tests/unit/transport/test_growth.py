"""A payload is served while it is being made: over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from mend.errors import PayloadGone, TransportError
from mend.transport import bulk_server
from mend.transport.bulk_client import BulkLane, checksum_of
from mend.transport.growth import Growth
from mend.types import SECOND, Member, Meter, growing_key, offer_key

KEY = growing_key(Member(0, 11), 0, 2, 5)
SIZE = 5 << 20
SENT = (bytes(range(251)) * (SIZE // 251 + 1))[:SIZE]
Lanes = tuple[BulkLane, BulkLane]


@pytest.fixture
async def lanes() -> AsyncIterator[Lanes]:
    """A holder and a reader."""
    token = b"growing-payloads"
    made = [
        BulkLane("127.0.0.1", None, token=token, chunk_bytes=1 << 20, stall_ns=30 * SECOND)
        for _ in range(2)
    ]
    yield made[0], made[1]
    for each in made:
        each.close()


def pull(lanes: Lanes, into: bytearray, meter: Meter) -> asyncio.Task[None]:
    holder, reader = lanes
    fetched = reader.fetch([holder.address], KEY, None, memoryview(into), meter=meter)
    return asyncio.ensure_future(fetched)


async def until(meter: Meter, verified: int) -> None:
    while meter.verified < verified:  # noqa: ASYNC110 - threads of the lane write it
        await asyncio.sleep(0.005)


async def test_request_waits_for_payload_and_for_its_bytes(lanes: Lanes) -> None:
    """It is asked for before it is there; what is not filled yet never leaves."""
    room, into, meter, growth = bytearray(SIZE), bytearray(SIZE), Meter(SIZE, 0), Growth()
    pulling = pull(lanes, into, meter)
    await asyncio.sleep(0.05)
    lanes[0].serve(KEY, memoryview(room), growth)
    for end in (3 << 20, SIZE):
        begin = growth.filled
        room[begin:end] = SENT[begin:end]
        growth.reach(end)
        if end < SIZE:
            await until(meter, 2 << 20)
            assert meter.verified <= end
    await pulling
    assert into == SENT
    assert meter.checksum == checksum_of(SENT)
    assert meter.first_ns


@pytest.mark.parametrize("fault", ["fails", "stays as it is", "never comes", "is dropped"])
async def test_reader_is_told_that_a_payload_is_gone(lanes: Lanes, fault: str) -> None:
    room, meter, growth = bytearray(SENT), Meter(SIZE, 0), Growth()
    if fault != "never comes":
        lanes[0].serve(KEY, memoryview(room), growth)
        growth.reach(2 << 20)
    pulling = pull(lanes, bytearray(SIZE), meter)
    if fault == "fails":
        await until(meter, 1 << 20)
        growth.fail()
    elif fault == "is dropped":
        await until(meter, 1 << 20)
        lanes[0].drop(KEY)
    with pytest.raises(PayloadGone):
        await pulling
    assert meter.verified <= growth.filled
    assert meter.checksum == ""


async def test_holder_that_dies_in_the_middle_ends_the_pull(lanes: Lanes) -> None:
    meter, growth = Meter(SIZE, 0), Growth()
    lanes[0].serve(KEY, memoryview(SENT), growth)
    growth.reach(2 << 20)
    pulling = pull(lanes, bytearray(SIZE), meter)
    await until(meter, 1 << 20)
    lanes[0].close()
    with pytest.raises(TransportError):
        await pulling
    assert meter.checksum == ""


async def test_only_keys_of_growing_payloads_are_waited_for(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to wait for the answer that an offer is gone."""

    def never(*_: object) -> bool:
        raise AssertionError("the server waits")

    monkeypatch.setattr(bulk_server.PayloadServer, "_may_wait", never)
    key, into = offer_key(Member(0, 11), 0, 2, 5), memoryview(bytearray(8))
    with pytest.raises(PayloadGone):
        await lanes[1].fetch([lanes[0].address], key, "", into)


def test_wait_ends_with_failure_or_time() -> None:
    growth = Growth()
    assert not growth.wait(1, 0.0)
    with contextlib.suppress(ValueError), growth:
        growth.reach(3)
        raise ValueError
    begun = time.monotonic()
    assert growth.wait(3, 60.0)
    assert not growth.wait(4, 60.0)
    assert time.monotonic() - begun < 30
