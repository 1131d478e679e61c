"""Ports for the racks: distinct, free, and a taken one is named with a way out."""

from __future__ import annotations

import socket

import pytest

from mend.cli.ports import LOOPBACK, free_ports
from mend.errors import AddressInUse


def test_ports_are_distinct_and_can_be_bound_afterwards() -> None:
    ports = free_ports(8)
    assert len(set(ports)) == 8
    for port in ports:
        with socket.socket() as taker:
            taker.bind((LOOPBACK, port))


def test_a_base_gives_ports_in_a_row(free_port: int) -> None:
    assert free_ports(1, free_port) == [free_port]


def test_a_taken_port_is_named_with_a_way_out() -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"port {port} .* is taken.*0 to have free ones"):
            free_ports(1, port)
