"""Packs ballots and attempts into single integers, so that the newer one is the greater one."""

from __future__ import annotations

_RACK_BITS, _LIFE_BITS, _ATTEMPT_BITS = 16, 16, 8
ATTEMPT_LAST = 255
NUMBER_MAX = 1 << 20
"""Limit of the number of a ballot. A message with a greater one is malformed."""


def ballot_of(number: int, rack: int, incarnation: int = 0) -> int:
    """The ballot in which this incarnation of `rack` (or of the witness) coordinates; 0 precedes
    the first. The low bits of the incarnation keep two lives of a rack, one of which was only cut
    off and not dead, from winning the same ballot."""
    life = incarnation & (1 << _LIFE_BITS) - 1
    return (number << _RACK_BITS | rack) << _LIFE_BITS | life


def number_of(ballot: int) -> int:
    return ballot >> _RACK_BITS + _LIFE_BITS


def owner_of(ballot: int) -> int:
    """The rack that coordinates in this ballot."""
    return ballot >> _LIFE_BITS & (1 << _RACK_BITS) - 1


def attempt_of(ballot: int, count: int) -> int:
    """Attempt `count` (1..ATTEMPT_LAST) in a ballot. No two attempts at a version are equal."""
    return ballot << _ATTEMPT_BITS | count


def count_of(attempt: int) -> int:
    return attempt & ATTEMPT_LAST
