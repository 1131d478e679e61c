"""Whose address somebody may name who has no key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from mend.transport import origins
from mend.transport.origins import NAMES_MAX, Origins

ADDRESS = "tcp://10.0.0.7:21900"
LIMIT_S = 20.0


def until(condition: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit_s
        threading.Event().wait(0.001)


@pytest.mark.parametrize(
    ("address", "number", "fits"),
    [
        (ADDRESS, "10.0.0.7", True), (ADDRESS, "::ffff:10.0.0.7", True),
        (ADDRESS, "10.0.0.8", False), (ADDRESS, "127.0.0.1", False),
        ("tcp://[fd00::7]:21900", "fd00::7", True), ("tcp://[fe80::7]:21900", "fe80::7%eth0", True),
        ("tcp://[fd00::8]:21900", "fd00::7", False), ("tcp://127.0.0.1:1", "127.0.0.1", True),
        ("tcp://127.0.0.2:1", "127.0.0.1", True), ("tcp://127.0.0.1:1", "10.0.0.7", False),
        ("tcp://0.0.0.0:21900", "127.0.0.1", False), ("tcp://10.0.0.7", "10.0.0.7", False),
        ("tcp://*:21900", "10.0.0.7", False),
        ("tcp://10.0.0.7:\N{SUPERSCRIPT TWO}", "10.0.0.7", False),
    ],
)  # fmt: skip
def test_an_address_is_of_the_machine_that_names_it(address: str, number: str, fits: bool) -> None:
    """Any of this machine's is as good as another for whoever is on it: a rack may reach a witness
    beside it over loopback, and be reached at the address of a card."""
    assert Origins(()).fits(address, number) == fits


def test_address_in_the_settings_is_accepted_from_any_host() -> None:
    known = Origins(("tcp://hostB:21900", "", ADDRESS))
    assert known.fits("tcp://hostB:5", "10.0.0.8")
    assert known.fits(ADDRESS, "10.0.0.8")
    assert not known.fits("tcp://hostC.invalid:21900", "10.0.0.8")


def test_a_name_is_looked_up_beside_and_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that hangs holds up nobody, and a flood of names is no flood of questions."""
    asked, answer = list[str](), threading.Event()

    def numbers_of(host: str) -> tuple[str, ...]:
        asked.append(host)
        answer.wait(LIMIT_S)
        return ("10.0.0.7",)

    monkeypatch.setattr(origins, "numbers_of", numbers_of)
    known = Origins(())
    for number in range(100):
        assert not known.fits(f"tcp://host{number}:1", "10.0.0.7")
    assert len(asked) <= 1
    looking = [each for each in threading.enumerate() if each.name == "mend-lookup"]
    assert all(each.daemon for each in looking), "nor the end of the process"
    answer.set()
    until(lambda: known.fits("tcp://host0:1", "10.0.0.7"))
    assert not known.fits("tcp://host0:1", "10.0.0.8")
    for number in range(NAMES_MAX + 50):
        until(lambda number=number: known.fits(f"tcp://host{number}:1", "10.0.0.7"))
    assert len(known._names) == NAMES_MAX
