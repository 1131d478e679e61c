"""Doctors that meet over real sockets of the loopback interface, each in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from mend.config import MendConfig
from mend.errors import AddressInUse
from mend.tools.doctor.meeting import MeetingResult, _key, _shorten, _sizes, longest_s, meet
from mend.tools.doctor.meeting_state import Rules
from mend.types import KEY_BYTES, MS, SECOND
from tests.unit.tools.test_doctor_meeting_messages import ABOUT

Ports = Callable[[int], list[int]]


def config(ports: list[int], rack: int, **more: str) -> MendConfig:
    peers = tuple(f"tcp://127.0.0.1:{port}" for port in ports)
    return MendConfig(rack=rack, racks=len(ports), sideband_peers=peers, **more)  # type: ignore[arg-type]


def both(ports: list[int], pull_ms: int, **more: str) -> list[MeetingResult]:
    """`more`: settings of rack 1."""

    def one(rack: int) -> MeetingResult:
        rules = Rules("job", rack, 2, 60 * SECOND, pull_ms * MS)
        return meet(rules, config(ports, rack, **(more if rack else {})), ABOUT, lambda _: None)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def test_two_meet_and_leave_nothing_behind(free_ports: Ports) -> None:
    before, ports = threading.active_count(), free_ports(3)
    first, second = both(ports[:2], 50, witness_addr=f"tcp://127.0.0.1:{ports[2]}")
    for met in (first, second):
        assert met.state.turn is not None
        assert met.state.turn.last
        assert [(p.together, p.error, p.bytes > 0) for p in met.state.pulls] == [
            (False, "", True), (True, "", True),
        ]  # fmt: skip
    (other,) = first.state.others.values()
    assert other.here is not None
    assert other.here.about.lane == second.address
    assert other.trips(1).count >= 50
    assert second.knocks[None].answer == "refused"
    assert None not in second.ever_speaks
    assert threading.active_count() == before


def test_a_lane_that_cannot_be_reached_is_told_with_the_direction(free_ports: Ports) -> None:
    """Rack 1 says that its payloads are where nobody listens."""
    first, second = both(free_ports(2), 50, advertise_host="127.0.0.77")
    assert [pull.error != "" for pull in first.state.pulls] == [True, True]
    assert "127.0.0.77" in first.state.pulls[0].error
    assert "failed" not in first.state.pulls[0].error
    assert [pull.error for pull in second.state.pulls] == ["", ""]


def test_a_port_that_is_taken_ends_it_before_anything_is_sent(free_ports: Ports) -> None:
    ports, taken = free_ports(2), threading.Event()
    rules = Rules("job", 0, 2, SECOND // 2, 0)

    def say(_: str) -> None:
        taken.set()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, rules, config(ports, 0), ABOUT, say)
        assert taken.wait(30)
        with pytest.raises(AddressInUse, match="the port is taken"):
            meet(rules, config(ports, 0), ABOUT, say)
        met = first.result()
    assert met.knocks[1].answer == "refused"
    assert met.state.pulls == []


def test_the_limits() -> None:
    sizes = _sizes()
    assert sizes[0] == 256 << 10
    assert sizes[-1] == 64 << 20
    assert len({_key(size) for size in sizes}) == len(sizes)
    assert all(len(_key(size)) == KEY_BYTES for size in sizes)
    assert longest_s(Rules("job", 0, 2, 30 * SECOND, 2 * SECOND)) < 120
    assert longest_s(Rules("job", 0, 1, 30 * SECOND, 0)) < 45


def test_an_error_loses_its_key_and_its_advice() -> None:
    error = AddressInUse("key ab: 1 holder(s) failed: holder a:1: timed out. Check that it runs.")
    assert _shorten(error) == "holder a:1: timed out"
    assert _shorten(AddressInUse("plain")) == "plain"


def test_time_is_not_spent_where_nobody_is(free_ports: Ports) -> None:
    begun = time.monotonic()
    met = meet(Rules("job", 0, 1, 30 * SECOND, SECOND), config(free_ports(1), 0), ABOUT, print)
    assert met.state.turn is not None
    assert met.state.turn.last
    assert time.monotonic() - begun < 30, "a rack alone waits for nobody"
