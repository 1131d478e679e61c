"""A witness that is told to end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from mend.engine import witness


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def killed_by(number: signal.Signals) -> list[str]:
    """The lines of a witness that gets the signal as soon as it listens."""
    lines: list[str] = []

    def told(line: str) -> None:
        lines.append(line)
        os.kill(os.getpid(), number)

    witness.run("tcp://127.0.0.1:0", 2, "signals", on_progress=told)
    return lines


def test_witness_interrupted_before_the_job_is_over_ends_as_interrupted() -> None:
    """Ctrl-C had exit status 0, which says that the job is over."""
    before = threading.enumerate()  # those that other tests of this process have left
    with pytest.raises(KeyboardInterrupt):
        killed_by(signal.SIGINT)
    left = [each for each in threading.enumerate() if each not in before]
    assert not [each for each in left if each.name.startswith("mend")]


def test_witness_terminated_ends_in_order() -> None:
    assert killed_by(signal.SIGTERM)
