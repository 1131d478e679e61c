"""Epochs and attempts as single numbers, so that the newer one is the greater one."""

from __future__ import annotations

_RACK_BITS, _LIFE_BITS, _ATTEMPT_BITS = 16, 16, 8
ATTEMPT_LAST = 255
NUMBER_MAX = 1 << 20
"""Limit of the number of an epoch; a greater one from the network is malformed."""


def epoch_of(number: int, rack: int, incarnation: int = 0) -> int:
    """The epoch in which this life of `rack` (or of the witness) coordinates; 0 is before the
    first. The last bits of the incarnation keep two lives of a rack, of which one was only cut off
    and not dead, from winning one and the same epoch."""
    life = incarnation & (1 << _LIFE_BITS) - 1
    return (number << _RACK_BITS | rack) << _LIFE_BITS | life


def number_of(epoch: int) -> int:
    return epoch >> _RACK_BITS + _LIFE_BITS


def owner_of(epoch: int) -> int:
    """The rack that coordinates in this epoch."""
    return epoch >> _LIFE_BITS & (1 << _RACK_BITS) - 1


def attempt_of(epoch: int, count: int) -> int:
    """Attempt `count` (1..ATTEMPT_LAST) in an epoch: no two of a version are ever the same."""
    return epoch << _ATTEMPT_BITS | count


def count_of(attempt: int) -> int:
    return attempt & ATTEMPT_LAST
