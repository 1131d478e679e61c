"""Decides when a process may stop after its job has ended.

The coordinator repeats the last decision until every member has confirmed it. A witness stays
longer where racks were missing: without it a rack that is started again too late would not learn
that the job is over, and would wait until its start times out.
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
"""How long a witness tells racks that were not there at the end that the job is over."""


@dataclass
class Ending:
    """The end of one process. `since_ns`: when it first knew that the job is over."""

    rack: int
    since_ns: int | None = None
    due_ns: int | None = None
    """When it stops at the latest; None once it may, as a time that has passed would wake its
    process for ever."""

    def may_go(self, log: LogState, now_ns: int, confirmed: bool, serves: bool = False) -> bool:
        """Whether it may stop. `log`: the decided log, with its end. `confirmed`: every member has
        heard of the end, or has stopped. `serves`: one that is heard still copies what it missed:
        from then on the time begins anew."""
        if self.since_ns is None or serves:
            self.since_ns = now_ns
        stays = self.rack == WITNESS and bool(missing(log))
        due_ns = self.since_ns + (END_REPEATED_NS if stays else FAREWELL_NS)
        may = now_ns >= due_ns or (confirmed and not stays)
        self.due_ns = None if may else due_ns
        return may


def late_members(log: LogState, views: Mapping[int, MemberView]) -> frozenset[Member]:
    """Members that have missed the end, and do not hold all that was decided before it."""
    return frozenset(
        view.member
        for rack, view in views.items()
        if rack in missing(log)
        and not view.gone
        and view.report is not None
        and list(view.report.versions) != log.versions
    )


def missing(log: LogState) -> frozenset[int]:
    """Racks that were not there when the job ended, as its last roster says."""
    return log.non_voters - {WITNESS} if log.over else frozenset()
