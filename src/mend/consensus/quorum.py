"""The three predicates of a decision, kept apart: worthwhile, quorum, hold.

Offers are statistics, votes are safety, bytes are durability.

| predicate  | counts | question                                                  |
|------------|--------|-----------------------------------------------------------|
| worthwhile | offers | are there enough contributions for a merge to be worth it |
| quorum     | votes  | may this be decided                                       |
| hold       | bytes  | does every quorum contain a member that has the bytes     |
"""

from __future__ import annotations

from collections.abc import Set
from typing import TypeVar

from mend.types import Member

Acceptor = TypeVar("Acceptor", int, Member)
"""Racks if all belong to one roster; otherwise members, because a restarted rack has no vote."""


def worthwhile(offers: int, merge_min_racks: int) -> bool:
    """K: a merge needs this many contributions. This is never a safety condition."""
    return offers >= merge_min_racks


def quorum(votes: Set[Acceptor], voters: Set[Acceptor]) -> bool:
    """A majority of the voters, or exactly half of them with the lowest one among it.

    Two quorums of the same voters always share a voter: of two halves only one contains the lowest.
    The witness sorts after every rack.
    """
    counted = votes & voters
    twice, whole = 2 * len(counted), len(voters)
    if twice != whole:
        return twice > whole
    return bool(voters) and min(voters) in counted


def hold(holders: Set[Acceptor], voters: Set[Acceptor]) -> bool:
    """Whether the holders intersect every quorum. If so, what they hold survives any decision that
    is made without them."""
    return not quorum(voters - holders, voters)
