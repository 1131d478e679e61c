"""What this machine says of itself, asked of the real resolver and routing table."""

from __future__ import annotations

import socket
import threading

import pytest

from mend.transport.whereabouts import Whereabouts


def test_every_loopback_number_is_here_and_no_foreign_or_nameless_one() -> None:
    here = Whereabouts()
    assert all(here.is_here(number) for number in ("127.0.0.1", "127.0.0.2", "127.9.9.9"))
    foreign = ("192.0.2.1", "203.0.113.7", "0.0.0.0", "::", "no number", "")
    assert not any(here.is_here(number) for number in foreign)


def test_the_way_out_is_one_of_this_machines_own_addresses() -> None:
    here = Whereabouts()
    source = here.source_to("127.0.0.1")
    assert source is not None
    assert here.is_here(source)


def test_names_are_looked_up_together_and_remembered() -> None:
    here = Whereabouts()
    found = here.look_up(["localhost", "127.0.0.3", "no.such.name.invalid", "localhost"])
    assert list(found) == ["localhost", "127.0.0.3", "no.such.name.invalid"]
    assert found["127.0.0.3"] == ("127.0.0.3",)
    assert found["no.such.name.invalid"] == ()
    assert any(map(here.is_here, found["localhost"]))
    assert here.look_up(["127.0.0.3"]) == {"127.0.0.3": ("127.0.0.3",)}
    assert here.name() == socket.gethostname()


def test_a_resolver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server behind a cut answers nothing for half a minute, once per name."""
    goes_on, real = threading.Event(), socket.getaddrinfo

    def hanging(host: str, *rest: object, **more: object) -> object:
        if host == "hangs.example":
            goes_on.wait()
        return real(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    here = Whereabouts(limit_s=0.2)
    found = here.look_up(["hangs.example", "127.0.0.1"])
    assert found == {"hangs.example": (), "127.0.0.1": ("127.0.0.1",)}
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "mend-lookup":
            thread.join()
