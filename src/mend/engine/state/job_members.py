"""Who takes part in the job, and how it began and ended, as the log says."""

from __future__ import annotations

from dataclasses import dataclass, field

from mend.consensus.records import Genesis, Lineage, Roster, Seat, Snapshot
from mend.types import WITNESS, Member


@dataclass
class JobMembers:
    """Written by the loop thread under the lock of the published state."""

    begun: bool = False
    over: bool = False
    """Whether the job has ended."""
    founders: frozenset[Member] = frozenset()
    """The members that began the job."""
    first: tuple[int, ...] = ()
    """The version of every fragment that they began with."""
    members: frozenset[Member] = frozenset()
    removed: dict[Member, str] = field(default_factory=dict)
    """Members that lost their seats or left -> why; empty: a snapshot does not say."""
    missing: tuple[int, ...] = ()
    """Racks that were not heard when the job ended."""

    @property
    def seats(self) -> tuple[int, ...]:
        """The racks of the members."""
        return tuple(sorted(member.rack for member in self.members))

    def begin(self, record: Genesis) -> None:
        self.begun, self.first = True, record.first()
        self._seat(record.roster)
        self.founders = self.members

    def take(self, record: Roster | Lineage) -> None:
        self._seat(record.members, record.reason)
        if isinstance(record, Roster):
            self._end(record.non_voters)

    def restore(self, snapshot: Snapshot) -> None:
        """Take a snapshot in place of the records before it."""
        self.begun = True
        self._seat(snapshot.members)
        self._end(snapshot.non_voters)

    def _seat(self, seats: tuple[Seat, ...], why: str = "") -> None:
        members = frozenset(seat.member for seat in seats)
        self.removed |= dict.fromkeys(self.members - members, why)
        self.members = members

    def _end(self, missing: tuple[int, ...]) -> None:
        """The job is over, without `missing`, if no member is left."""
        self.over = not self.members
        self.missing = () if self.members else tuple(r for r in missing if r != WITNESS)

    def why_out(self, member: Member) -> str:
        """Why a member that had a seat has none, in words."""
        if self.over:
            return "the job is over: every rack that was heard has left"
        why = self.removed.get(member) or "the other racks went on while it was silent"
        return f"rack {member.rack} has lost its seat: {why}"
