"""The coordinator's soft state of one member; it comes again with the next report."""

from __future__ import annotations

from dataclasses import dataclass, field

from mend.coordination.flow import Flow
from mend.coordination.messages import Orders, Report
from mend.types import Member


@dataclass
class MemberView:
    """What the coordinator knows of one rack (or of the witness), from its newest messages."""

    member: Member
    heard_ns: int
    lively_ns: int = 0
    """When it was last found live; demotion and eviction count from here."""
    report: Report | None = None
    got: frozenset[tuple[int, int, int]] = frozenset()
    gone: bool = False
    sent: Orders | None = None
    """Without records."""
    sent_ns: int = 0
    serial: int = 0
    vote_ns: int = 0
    """From when on it may have a vote again, if it stays as it is."""
    flow: Flow = field(default_factory=Flow)

    def live(self, now_ns: int, detect_ns: int) -> bool:
        fresh = self.report is None or self.report.fresh
        return fresh and not self.gone and now_ns - self.heard_ns < detect_ns
