"""The three predicates of a decision (worthwhile, quorum, hold), kept apart.

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
"""By rack where all are of one roster; else by member, as a restarted rack has no vote."""


def worthwhile(offers: int, merge_min_racks: int) -> bool:
    """K: a merge needs this many contributions. Never a matter of safety."""
    return offers >= merge_min_racks


def quorum(votes: Set[Acceptor], voters: Set[Acceptor]) -> bool:
    """A majority of the voters, or exactly half of them with the lowest one among it.

    Two quorums of the same voters always share a voter: of two halves only one holds the lowest.
    The witness sorts after every rack.
    """
    counted = votes & voters
    twice, whole = 2 * len(counted), len(voters)
    if twice != whole:
        return twice > whole
    return bool(voters) and min(voters) in counted


def hold(holders: Set[Acceptor], voters: Set[Acceptor]) -> bool:
    """Whether the holders meet every quorum: what they hold survives any decision without them."""
    return not quorum(voters - holders, voters)
