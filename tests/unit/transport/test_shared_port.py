"""Several processes of a host behind one port."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from mend.errors import AddressInUse, PeerUnreachable
from mend.transport.bulk_client import BulkLane
from mend.transport.probe import GREETING
from mend.types import SECOND, Address, Member, offer_key

TOKENS = [b"token-of-rank-%02d" % rank for rank in range(3)]
JOB = TOKENS[0]


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


def test_rank_that_has_closed_takes_over_no_port() -> None:
    """Its thread may find, behind its end, that nobody listens any more."""
    port = free_port()
    with contextlib.closing(lane(0, port)), contextlib.closing(lane(1, port)) as second:
        pass
    second._holder._become_door()
    assert second._holder._listener is None


def test_rank_that_waits_for_connections_closes_at_once() -> None:
    port = free_port()
    with contextlib.closing(lane(0, port)), contextlib.closing(lane(1, port)) as second:
        second.close()
        assert not any(thread.is_alive() for thread in second._holder._accepting)


def test_port_of_another_job_is_in_use() -> None:
    port = free_port()
    with contextlib.closing(lane(0, port)):
        for rank, job in ((1, b"of-another-job.."), (1, b""), (0, JOB)):
            with pytest.raises(AddressInUse):
                lane(rank, port, job)


async def test_rank_of_another_host_is_reached_through_the_port_of_the_leader() -> None:
    """Every host of a rack had to be reachable from the other racks."""
    port = free_port()
    with contextlib.closing(lane(0, port)) as leader, contextlib.closing(lane(1, None)) as far:
        far.serve(key(1), memoryview(b"of 1"))
        with pytest.raises(PeerUnreachable):
            await pulled(1, port)
        leader.relay({TOKENS[1]: far.address})
        assert await pulled(1, port) == b"of 1"
        assert leader.bytes_relayed > 4
        with pytest.raises(PeerUnreachable):
            await pulled(2, port)
        assert leader.rejected == 2, "of two readers that asked for ranks that nobody knows"


@pytest.mark.parametrize("door", [0, 1])
def test_sideband_is_reached_through_the_port_whichever_rank_is_its_door(door: int) -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:
        lanes = {
            rank: stack.enter_context(contextlib.closing(lane(rank, port)))
            for rank in (door, 1 - door)
        }
        sideband = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        lanes[0].relay_sideband(sideband.getsockname()[1], 2)
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
        client.sendall(GREETING)
        sideband.settimeout(30)
        served = stack.enter_context(sideband.accept()[0])
        served.settimeout(30)
        assert served.recv(len(GREETING), socket.MSG_WAITALL) == GREETING
        served.sendall(b"answer")
        assert client.recv(6, socket.MSG_WAITALL) == b"answer"


def test_zeromq_at_a_port_that_is_no_sidebands_is_refused() -> None:
    port = free_port()
    with (
        contextlib.closing(lane(0, port)) as leader,
        socket.create_connection(("127.0.0.1", port), 30) as client,
    ):
        client.sendall(GREETING)
        client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            assert client.recv(1) == b""
        assert leader.bytes_relayed == 0
