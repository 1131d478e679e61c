"""Decides when a process may stop after its job has ended.

The coordinator repeats the last decision until every member has confirmed it. A witness stays
longer if racks were missing: otherwise a rack that is restarted too late would not learn that the
job is over, and would wait until its start times out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mend.consensus.log import LogState
from mend.coordination.member_view import MemberView
from mend.types import SECOND, WITNESS, Member

FAREWELL_NS = 3 * SECOND
"""How long the end of the log is repeated to racks that have not confirmed it."""

END_REPEATED_NS = 60 * SECOND
"""How long a witness reports the end of the job to racks that were missing at its end."""


@dataclass
class Ending:
    """The end of one process. `since_ns`: when it first knew that the job is over."""

    rack: int
    since_ns: int | None = None
    due_ns: int | None = None
    """Latest time at which it stops; None once it may stop, because a deadline in the past would
    wake its process again and again."""

    def may_go(self, log: LogState, now_ns: int, confirmed: bool, serves: bool = False) -> bool:
        """Whether it may stop. `log`: the decided log, with its end. `confirmed`: every member has
        confirmed the end, or has stopped. `serves`: a live member still copies versions that it
        missed, which restarts the wait."""
        if self.since_ns is None or serves:
            self.since_ns = now_ns
        stays = self.rack == WITNESS and bool(missing(log))
        due_ns = self.since_ns + (END_REPEATED_NS if stays else FAREWELL_NS)
        may = now_ns >= due_ns or (confirmed and not stays)
        self.due_ns = None if may else due_ns
        return may


def late_members(log: LogState, views: Mapping[int, MemberView]) -> frozenset[Member]:
    """Members that have missed the end and do not hold everything that was decided before it."""
    return frozenset(
        view.member
        for rack, view in views.items()
        if rack in missing(log)
        and not view.gone
        and view.report is not None
        and list(view.report.versions) != log.versions
    )


def missing(log: LogState) -> frozenset[int]:
    """Racks that were missing when the job ended, according to its last roster."""
    return log.non_voters - {WITNESS} if log.over else frozenset()
