"""protocol: epochs and attempts, each one number, so that what is newer is simply greater."""

from __future__ import annotations

_RACK_BITS, _ATTEMPT_BITS = 16, 8
ATTEMPT_LAST = 255
NUMBER_MAX = 1 << 30
"""Of an epoch; a number from the network that is greater is nonsense."""


def epoch_of(number: int, rack: int) -> int:
    """The epoch in which `rack` (or the witness) coordinates; 0 is before the first."""
    return number << _RACK_BITS | rack


def number_of(epoch: int) -> int:
    return epoch >> _RACK_BITS


def owner_of(epoch: int) -> int:
    """The rack that coordinates in this epoch."""
    return epoch & (1 << _RACK_BITS) - 1


def attempt_of(epoch: int, count: int) -> int:
    """Attempt `count` (1..ATTEMPT_LAST) in an epoch: no two of a version are ever the same."""
    return epoch << _ATTEMPT_BITS | count


def count_of(attempt: int) -> int:
    return attempt & ATTEMPT_LAST
