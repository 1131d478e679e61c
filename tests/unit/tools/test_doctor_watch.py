"""Looks at ports from outside: who listens, and how far away."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing

from mend.tools.doctor.watch import TRIPS, Watch, round_trips
from tests.process.racks import until


def test_a_port_that_was_open_once_counts_as_open(free_ports: Callable[[int], list[int]]) -> None:
    there, absent = free_ports(2)
    doors = {1: f"tcp://127.0.0.1:{there}", 2: f"tcp://127.0.0.1:{absent}"}
    with closing(socket.create_server(("127.0.0.1", there))):
        watch = Watch(doors)
        until(lambda: len(watch.knocks) == 2, "both were knocked at")
    before = watch.looks
    try:
        until(lambda: watch.looks is not before, "it knocks again")
    finally:
        watch.stop()
    assert watch.knocks[1].answer == "open"
    assert not watch.knocks[1].speaks
    assert watch.knocks[2].answer == "refused"
    assert watch.looks.views == {}


def test_round_trips_are_connections(free_ports: Callable[[int], list[int]]) -> None:
    there, absent = free_ports(2)
    doors = {1: f"tcp://127.0.0.1:{there}", 2: f"tcp://127.0.0.1:{absent}"}
    with closing(socket.create_server(("127.0.0.1", there), backlog=TRIPS)):
        found = round_trips(doors)
    assert (found[1].tried, found[1].came) == (TRIPS, TRIPS)
    assert found[1].p50_ms is not None
    assert found[1].p99_ms is not None
    assert 0 < found[1].p50_ms <= found[1].p99_ms
    assert (found[2].came, found[2].p50_ms) == (0, None)
