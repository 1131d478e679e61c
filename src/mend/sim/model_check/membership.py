"""The changes of the roster that a coordinator may make: coordination.membership's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from msgspec import Struct

from mend.consensus.log import LogState
from mend.consensus.records import Policy, Roster, Seat
from mend.coordination import membership
from mend.coordination.member_view import MemberView
from mend.coordination.membership import MembershipContext
from mend.coordination.messages import Report
from mend.sim.model_check.parts import Parts
from mend.types import Member

REMOVE, JOIN, VOTE, DEMOTE = "remove", "join", "vote", "demote"
NEVER = -1
"""The number of a record that may not be appended."""


def seat(member: Member) -> Seat:
    return Seat(member, f"tcp://rack{member.rack}:1", ())


def policy(racks: int) -> Policy:
    """Of one fragment; nothing else of it is read where no clock runs."""
    return Policy(**_nothing(Policy) | {"racks": racks, "ranks": 1, "fragments": 1})


def _nothing(kind: type[Struct]) -> dict[str, Any]:
    """All fields of a message, as if it said nothing."""
    return dict.fromkeys(kind.__struct_fields__, 0)


Change = tuple[tuple[str, Member], ...]
"""What one record does, member by member."""


class Rosters:
    """`held[node]`: the newest version its rack ever reported; what a dead one said stays said."""

    def __init__(self, parts: Parts, members: tuple[Member, ...]) -> None:
        self.parts, self.members = parts, members
        self.record: Callable[[int, Change, tuple[int, ...]], int] = cache(self._record)

    def _record(self, log: int, change: Change, held: tuple[int, ...]) -> int:
        """Number of the record that makes this change behind `log`; NEVER if bytes might be lost
        by it."""
        folded = self.parts.log(log).appended
        roster = self._proposal(folded, change)
        if not membership._keeps_bytes(self._hall(folded, held), roster):
            return NEVER
        return self.parts.records.number(roster)

    def _proposal(self, folded: LogState, change: Change) -> Roster:
        seats, non_voters = dict(folded.seats), set(folded.non_voters)
        for kind, member in change:
            rack = member.rack
            non_voters.discard(rack)
            if kind == REMOVE:
                del seats[rack]
            elif kind == JOIN:
                seats[rack] = seat(member)
            if kind in (JOIN, DEMOTE):
                non_voters.add(rack)
        return membership._changed(folded, seats, non_voters, "")

    def _hall(self, folded: LogState, held: tuple[int, ...]) -> MembershipContext:
        reported = dict(zip(self.members, held, strict=True))
        views = {
            rack: MemberView(each.member, 0, report=_report(reported[each.member]))
            for rack, each in folded.seats.items()
        }
        return MembershipContext(
            log=folded,
            views=views,
            live=frozenset(views),
            offers=(),
            joining={},
            evict_ns=1,
            now_ns=0,
            detect_ns=1,
        )


def _report(held: int) -> Report:
    """Of a rack whose newest version is `held`."""
    return Report(**_nothing(Report) | {"versions": (held,)})
