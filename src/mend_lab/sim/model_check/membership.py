"""The changes of the roster that a coordinator may make: coordination.membership's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from itertools import product
from typing import Any

from msgspec import Struct

from mend.consensus.log import LogState
from mend.consensus.records import Policy, Roster, Seat
from mend.coordination import membership
from mend.coordination.member_view import MemberView
from mend.coordination.membership import MembershipContext, next_roster
from mend.coordination.messages import Hello, Report
from mend.types import WITNESS, Member
from mend_lab.sim.model_check.parts import Parts

REMOVE, JOIN, VOTE, DEMOTE = "remove", "join", "vote", "demote"
NEVER = -1
"""The number of a record that may not be appended."""


def seat(member: Member) -> Seat:
    return Seat(member, f"tcp://rack{member.rack}:1", ())


def policy(racks: int, fragments: int = 1) -> Policy:
    """Nothing else of it is read where no clock runs."""
    return Policy(**nothing(Policy) | {"racks": racks, "ranks": 1, "fragments": fragments})


def nothing(kind: type[Struct]) -> dict[str, Any]:
    """All fields of a message, as if it said nothing."""
    return dict.fromkeys(kind.__struct_fields__, 0)


Change = tuple[tuple[str, Member], ...]
"""What one record does, member by member."""


class Rosters:
    """`held[node]`: the newest version its rack ever reported; what a dead one said stays said."""

    def __init__(self, parts: Parts, members: tuple[Member, ...]) -> None:
        self.parts, self.members = parts, members
        self.record: Callable[[int, Change, tuple[int, ...]], int] = cache(self._record)
        self.proposed: Callable[..., tuple[int, ...]] = cache(self._proposed)

    def _proposed(
        self, log: int, leader: int, held: tuple[int, ...], ready: frozenset[Member]
    ) -> tuple[int, ...]:
        """Numbers of the records that the rule proposes after `log`, which is decided."""
        replica = self.parts.log(log)
        if replica.last != replica.decided:
            return ()
        lives = {member.rack: member for member in self.members}
        known = {m: (version,) for m, version in zip(self.members, held, strict=True)}
        rosters = proposals(replica.appended, leader, lives, known, ready)
        return tuple(self.parts.records.number(roster) for roster in rosters)

    def _record(self, log: int, change: Change, held: tuple[int, ...]) -> int:
        """Number of the record that makes this change after `log`; NEVER if bytes might be lost
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
            rack: MemberView(each.member, 0, report=report((reported[each.member],)))
            for rack, each in folded.seats.items()
        }
        return MembershipContext(
            log=folded,
            views=views,
            live=frozenset(views),
            offers=(),
            joining={},
            seat_timeout_ns=1,
            now_ns=0,
            detect_ns=1,
        )


LONG_AGO_NS, NOW_NS, DETECT_NS = 0, 100, 1


def proposals(
    log: LogState,
    leader: int,
    lives: Mapping[int, Member],
    held: Mapping[Member, tuple[int, ...]],
    ready: Collection[Member],
) -> list[Roster]:
    """What the leader (a rack, or the witness) would append after `log`, by who else is silent,
    and for how long. `lives`: the newest life of each rack and of the witness; where that is not
    the one with the seat, it says hello. `held`: newest versions as far as they were reported."""
    seats = {rack: each.member for rack, each in log.seats.items()}
    seats |= {WITNESS: log.witness} if log.witness is not None else {}
    others = [rack for rack in sorted(lives) if rack != leader]
    rosters: list[Roster] = []
    for states in product(("live", "silent", "long"), repeat=len(others)):
        seen = dict(zip(others, states, strict=True)) | {leader: "live"}
        lively = {rack for rack in lives if seen[rack] == "live"}
        live = frozenset(r for r in seats if r in lively and lives[r] == seats[r])
        back = {rack: lives[rack] for rack in lively - live if lives[rack] not in log.former}
        views = {}
        for rack, member in seats.items():
            long = rack not in live and seen.get(rack) == "long"
            none = (-1,) * len(log.versions)
            reported = report(held.get(member, none)) if rack != WITNESS else None
            views[rack] = MemberView(member, 0, LONG_AGO_NS if long else NOW_NS, reported)
        context = MembershipContext(
            log=log,
            views=views,
            live=live,
            offers=(),
            joining={rack: hello(member) for rack, member in back.items() if rack != WITNESS},
            seat_timeout_ns=0,
            now_ns=NOW_NS,
            detect_ns=DETECT_NS,
            ready=ready,
            returned=back.get(WITNESS),
        )
        roster = next_roster(context)
        if roster is not None and roster.members and roster not in rosters:
            rosters.append(roster)
    return rosters


def hello(member: Member) -> Hello:
    return Hello(**nothing(Hello) | {"seat": seat(member)})


def report(held: tuple[int, ...]) -> Report:
    """Of a rack whose newest versions are `held`."""
    return Report(**nothing(Report) | {"versions": held})
