"""Several processes of a host behind one port."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from mend.errors import AddressInUse, PeerUnreachable
from mend.transport.bulk_client import BulkLane
from mend.types import SECOND, Address, Member, offer_key

JOB = b"job-of-this-test"
TOKENS = [b"token-of-rank-%02d" % rank for rank in range(3)]


def key(rank: int) -> bytes:
    return offer_key(Member(0, 1), rank, 0, 1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def lane(rank: int, port: int | None, job: bytes = JOB) -> BulkLane:
    ports = (port, port) if port else None
    return BulkLane("127.0.0.1", ports, token=TOKENS[rank], job=job, stall_ns=SECOND)


async def pulled(rank: int, port: int) -> bytes:
    into = bytearray(4)
    with contextlib.closing(lane(rank, None)) as reader:
        await reader.fetch([Address("127.0.0.1", port)], key(rank), "", memoryview(into))
    return bytes(into)


async def test_ranks_behind_one_port_serve_their_own_readers() -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:
        for rank in range(3):
            made = stack.enter_context(contextlib.closing(lane(rank, port)))
            assert made.address == Address("127.0.0.1", port)
            made.serve(key(rank), memoryview(b"of %d" % rank))
        for rank in (2, 0, 1, 2):
            assert await pulled(rank, port) == b"of %d" % rank


async def test_port_whose_process_has_ended_is_taken_over_by_another_rank() -> None:
    port = free_port()
    first, second = lane(0, port), lane(1, port)
    second.serve(key(1), memoryview(b"of 1"))
    first.close()
    with contextlib.closing(second):
        async with asyncio.timeout(60):  # a hundred refusals may be faster than the other thread
            while True:
                with contextlib.suppress(PeerUnreachable):
                    assert await pulled(1, port) == b"of 1"
                    break
                await asyncio.sleep(0.01)
        with pytest.raises(PeerUnreachable):
            await pulled(0, port)


def test_port_of_another_job_is_in_use() -> None:
    port = free_port()
    with contextlib.closing(lane(0, port)):
        for rank, job in ((1, b"of-another-job.."), (1, b""), (0, JOB)):
            with pytest.raises(AddressInUse):
                lane(rank, port, job)
