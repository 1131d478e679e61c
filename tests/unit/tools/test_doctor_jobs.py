"""A job that runs where doctors are to meet is found by looking, and not disturbed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mend.config import MendConfig
from mend.errors import AddressInUse
from mend.status.follow_messages import decode_asked
from mend.status.messages import HEAD, encode_view
from mend.tools.doctor.jobs import STOP_IT, Looks, jobs_at, look_around, of_jobs, of_taken
from mend.transport.zmq import ZmqSideband
from mend.types import SECOND, WITNESS
from tests.unit.status.seen import view

Ports = Callable[[int], list[int]]
TAKEN = AddressInUse("sideband address='tcp://127.0.0.1:1': the port is taken.")


@asynccontextmanager
async def sideband(port: int, answer: bytes = b"") -> AsyncIterator[None]:
    """What a process of a job has; without an answer it does not let itself be looked at."""
    made = ZmqSideband(f"tcp://127.0.0.1:{port}")

    def take(route: bytes, frame: bytes) -> None:
        decode_asked(frame)
        made.reply(route, answer)

    if answer:
        made.divert(HEAD, take)
    hearing = asyncio.create_task(made.receive())
    try:
        yield
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        made.close()


def config(ports: list[int], **more: Any) -> MendConfig:
    peers = tuple(f"tcp://127.0.0.1:{port}" for port in ports)
    return MendConfig(rack=0, racks=len(ports), job_id="mine", sideband_peers=peers, **more)


async def test_a_rack_that_trains_answers_a_look(free_ports: Ports) -> None:
    ports = free_ports(2)
    running = encode_view(view(job="theirs", rack=1))
    async with sideband(ports[1], running):
        (found,) = await asyncio.to_thread(look_around, config(ports))
    assert found.severity == "problem"
    assert f"A job is running: rack 1 of job 'theirs' at tcp://127.0.0.1:{ports[1]}" in found.found
    assert found.change == STOP_IT


async def test_a_witness_may_wait_for_the_job_but_for_another(free_ports: Ports) -> None:
    ports = free_ports(3)
    place = config(ports[:2], witness_addr=f"tcp://127.0.0.1:{ports[2]}")
    async with sideband(ports[2], encode_view(view(job="mine", rack=WITNESS))):
        assert await asyncio.to_thread(look_around, place) == []
    async with sideband(ports[2], encode_view(view(job="theirs", rack=WITNESS))):
        (found,) = await asyncio.to_thread(look_around, place)
    assert "is of job 'theirs'; this rack has 'mine'" in found.found
    assert found.change != STOP_IT, "the racks may meet all the same"


async def test_a_meeting_that_waits_is_no_job_and_its_clock_is_read(free_ports: Ports) -> None:
    ports = free_ports(2)
    there = view(job="theirs-doctor", rack=1, wall_ns=time.time_ns() + 3600 * SECOND)
    async with sideband(ports[1], encode_view(there)):
        assert await asyncio.to_thread(look_around, config(ports)) == []
        address = f"tcp://127.0.0.1:{ports[1]}"
        found = await asyncio.to_thread(jobs_at, [address])
    assert found.views == {address: there}
    assert found.clocks_ns[address] > 3500 * SECOND


def test_the_newest_look_counts_and_none_is_forgotten() -> None:
    first = Looks({"a": view(rack=0)}, {"a": 1}, frozenset({"a"}))
    second = Looks({"b": view(rack=1)}, {"a": 2}, frozenset({"b"}), frozenset({"c"}))
    both = first.then(second)
    assert list(both.views) == ["a", "b"]
    assert both.clocks_ns == {"a": 2}
    assert (both.speaking, both.locked) == ({"a", "b"}, {"c"})


async def test_nonsense_is_no_job(free_ports: Ports) -> None:
    (port,) = free_ports(1)
    address = f"tcp://127.0.0.1:{port}"
    async with sideband(port, HEAD + b"garbage"):
        found = await asyncio.to_thread(jobs_at, [address])
    assert found == Looks(speaking=frozenset({address}))


def test_address_without_a_job_is_nobody(free_ports: Ports) -> None:
    assert look_around(config(free_ports(2))) == []
    assert list(of_jobs({}, "mine")) == []
    assert jobs_at(["tcp://127.0.0.1:x"], 0.1) == Looks()


@pytest.mark.parametrize("text", ["lane host='a' ports=(1, 2): every port is taken."])
def test_data_ports_that_are_taken(text: str) -> None:
    found = of_taken(AddressInUse(text, lane=True))
    assert found.found == text
    assert "MEND_DATA_PORTS" in found.change
