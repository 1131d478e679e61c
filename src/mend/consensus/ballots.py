"""Ballots and attempts as single numbers, so that the newer one is the greater one."""

from __future__ import annotations

_RACK_BITS, _LIFE_BITS, _ATTEMPT_BITS = 16, 16, 8
ATTEMPT_LAST = 255
NUMBER_MAX = 1 << 20
"""Limit of the number of a ballot; a greater one from the network is malformed."""


def ballot_of(number: int, rack: int, incarnation: int = 0) -> int:
    """The ballot in which this life of `rack` (or of the witness) coordinates; 0 is before the
    first. The last bits of the incarnation keep two lives of a rack, of which one was only cut off
    and not dead, from winning one and the same ballot."""
    life = incarnation & (1 << _LIFE_BITS) - 1
    return (number << _RACK_BITS | rack) << _LIFE_BITS | life


def number_of(ballot: int) -> int:
    return ballot >> _RACK_BITS + _LIFE_BITS


def owner_of(ballot: int) -> int:
    """The rack that coordinates in this ballot."""
    return ballot >> _LIFE_BITS & (1 << _RACK_BITS) - 1


def attempt_of(ballot: int, count: int) -> int:
    """Attempt `count` (1..ATTEMPT_LAST) in a ballot: no two of a version are ever the same."""
    return ballot << _ATTEMPT_BITS | count


def count_of(attempt: int) -> int:
    return attempt & ATTEMPT_LAST
