"""Ports for the racks: distinct, free, and a taken one is named with a way out."""

from __future__ import annotations

import socket

import pytest

from mend.errors import AddressInUse, ConfigError
from mend.tools.ports import LOOPBACK, free_ports


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


def test_launchers_of_one_machine_can_be_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEND_LAUNCH_PORTS", "29100-29119")
    assert set(free_ports(3)) <= set(range(29_100, 29_120))


@pytest.mark.parametrize("text", ["29100", "9-1", "0-10", "a-b", "1-70000", "29100-29101"])
def test_range_that_is_none_or_without_room_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    said = "needs 3 ports or more" if text == "29100-29101" else ".*20000-29999"
    monkeypatch.setenv("MEND_LAUNCH_PORTS", text)
    with pytest.raises(ConfigError, match=f"MEND_LAUNCH_PORTS='?{text}.*{said}"):
        free_ports(3)
