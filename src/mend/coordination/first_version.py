"""Detects that no remaining rack holds a version that the job began with.

The first record is decided by votes alone. Until other racks have copied its versions, only the
racks that began with these bits hold them, and a quorum may survive without those racks. Any later
version is held by a rack of every quorum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mend.consensus.log import LogState
from mend.coordination.messages import Reason, Report
from mend.types import Member, rack_name


@dataclass
class FirstVersion:
    """What a coordinator knows of the first versions. `lost_since_ns`: since when no remaining rack
    holds one of them; None: one does, or may."""

    lost_since_ns: int | None = None

    def lost(
        self,
        log: LogState,
        reports: Mapping[int, Report],
        live: Collection[int],
        dead: Collection[Member],
        now_ns: int,
        detect_ns: int,
    ) -> bool:
        """Whether a first version is lost: all racks that could hold it are attested dead, and all
        others have reported without it for `detect_ns`. The delay is needed because a report may be
        older than the last bytes of a copy."""
        left = [rack for rack, seat in log.seats.items() if seat.member not in dead]
        heard = all(rack in live and rack in reports for rack in left)
        gone = 0 < len(left) < len(log.seats) and heard and bool(unheld(log, reports, left))
        if not gone:
            self.lost_since_ns = None
        elif self.lost_since_ns is None:
            self.lost_since_ns = now_ns
        return self.lost_since_ns is not None and now_ns - self.lost_since_ns >= detect_ns


def unheld(log: LogState, reports: Mapping[int, Report], racks: Collection[int]) -> list[int]:
    """Fragments of which none of these racks reports a version."""
    versions = [reports[rack].versions for rack in racks if rack in reports]
    return [p for p in range(len(log.versions)) if all(held[p] < 0 for held in versions)]


def why_first_version_missing(
    log: LogState, reports: Mapping[int, Report], live: Collection[int]
) -> tuple[Reason, ...]:
    """Why racks wait for a first version that no live rack holds."""
    silent = [rack_name(rack) for rack in sorted(log.seats.keys() - set(live))]
    fragments = unheld(log, reports, log.seats.keys() & set(live)) if silent else []
    text = f"no rack that is heard holds its first version; start {', '.join(silent)} again"
    return tuple(Reason(text, fragment=p) for p in fragments[:1])
