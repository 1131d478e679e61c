"""Progress of the racks' pulls. Others may wait for them and watch the progress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mend.consensus.log import LogState
from mend.coordination.messages import Pulled, Report


def of_ranks(pulls: Iterable[tuple[Pulled, ...]]) -> tuple[Pulled, ...]:
    """The pulls of all ranks of a rack, summed by source."""
    sums: dict[int, tuple[int, int]] = {}
    for pulled in (each for rank in pulls for each in rank):
        moved, left = sums.get(pulled.rack, (0, 0))
        sums[pulled.rack] = moved + pulled.moved, left + pulled.left
    return tuple(Pulled(rack, *sums[rack]) for rack in sorted(sums))


def moving_racks(log: LogState, reports: Mapping[int, Report]) -> tuple[Pulled, ...]:
    """What each rack that copies the initial versions, joins or leaves has pulled. Racks that train
    are left out, because nothing waits for their pulls."""
    newcomers = log.non_voters - log.demoted
    return tuple(
        Pulled(rack, sum(p.moved for p in report.pulls), sum(p.left for p in report.pulls))
        for rack in sorted(log.seats)
        if (report := reports.get(rack)) is not None and report.pulls
        if report.leaving or rack in newcomers or min(report.versions, default=0) < 0
    )


def taken_of(reports: Mapping[int, Report]) -> dict[int, int]:
    """Bytes of each rack's offers that the others have pulled."""
    taken: dict[int, int] = {}
    for rack, report in reports.items():
        for pulled in report.pulls:
            if pulled.rack != rack:
                taken[pulled.rack] = taken.get(pulled.rack, 0) + pulled.moved
    return taken
