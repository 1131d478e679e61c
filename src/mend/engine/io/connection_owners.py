"""Decides which connection speaks for which process in a job without keys. Pure.

A process sends over one connection at a time. While that one stands and is heard, any other
connection that gives the same name is ignored: neither a process with a copied name nor an attacker
who has read the name off the network can come between a process and its peers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from mend.types import SECOND, Member

SPEAKERS_MAX = 2_048
SILENT_NS = SECOND
"""A connection that has been silent for longer may be half dead: the next one takes its place."""


class ConnectionOwners:
    """Maps each process to its connection. `stands(route)`: whether a connection is still there."""

    def __init__(self, stands: Callable[[bytes], bool]) -> None:
        self._stands = stands
        self._routes: OrderedDict[tuple[Member, int], tuple[bytes, int]] = OrderedDict()
        """(member, rank) -> (its connection, when it was heard in ns); the longest silent first."""

    def admits(self, member: Member, rank: int, route: bytes, now_ns: int) -> bool:
        """Whether to accept a message that came over `route` in this name."""
        who = member, rank
        known, heard_ns = self._routes.get(who, (route, now_ns))
        if route != known and now_ns - heard_ns < SILENT_NS and self._stands(known):
            return False
        self._routes[who] = route, now_ns
        self._routes.move_to_end(who)
        if len(self._routes) > SPEAKERS_MAX:
            self._routes.popitem(last=False)
        return True
