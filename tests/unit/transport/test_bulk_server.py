"""Who makes room for one more connection to a lane."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from mend.transport.bulk_server import _Connection, _least_wanted

TOKEN = bytes(16)


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    with contextlib.closing(socket.socket()) as made:
        yield made


def connections(sock: socket.socket, hosts: str) -> list[_Connection]:
    """One per letter, the oldest first: its host; small: it has shown nothing, large: it has
    greeted and waits."""
    made = []
    for letter in hosts:
        connection = _Connection(sock, letter.lower(), TOKEN, None)
        connection.greeted = connection.idle = letter.isupper()
        made.append(connection)
    return made


@pytest.mark.parametrize(
    ("hosts", "place"),
    [
        ("abb", 1),  # of the host that has most, however old the others' are
        ("abab", 0),
        ("abB", 0),  # who has greeted does not count where somebody has not
        ("AAb", 2),
        ("ABB", 1),
    ],
)
def test_the_oldest_of_the_host_that_has_most_of_them_makes_room(
    sock: socket.socket, hosts: str, place: int
) -> None:
    """One machine that opens them without end takes no other machine's place."""
    made = connections(sock, hosts)
    assert _least_wanted(made) is made[place]


def test_connection_in_service_is_not_closed_for_another(sock: socket.socket) -> None:
    made = connections(sock, "AB")
    for connection in made:
        connection.idle = False
    assert _least_wanted(made) is None
