"""Decides when a checkpoint is due. Racks ask for it; one record says where in the log it lies,
another that all of them have written it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mend.consensus.log import LogState
from mend.consensus.records import Mark
from mend.coordination.donors import waiting_for_state
from mend.coordination.messages import Cut, RankReport, Report
from mend.errors import require


def cut_of_rack(ranks: Sequence[RankReport]) -> Cut | None:
    """The checkpoint that all ranks wait in, or have written. As long as some of them write, the
    rack does: no checkpoint at all would say that it has given up."""
    cuts = [rank.cut for rank in ranks if rank.cut is not None]
    if len(cuts) < len(ranks) or len({(cut.number, cut.name) for cut in cuts}) > 1:
        return None
    return min(cuts, key=lambda cut: cut.written)


def next_mark(
    log: LogState, lineage: str, reports: Mapping[int, Report | None], live: frozenset[int]
) -> Mark | None:
    """The record that is due, if there is one. `log`: the appended log."""
    policy = require(log.policy, "racks report after the first record")
    if log.mark is None and not any(report and report.cut for report in reports.values()):
        return None
    heard = {rack for rack in log.seats if policy.lockstep or rack in live}
    newest = {rack: reports.get(rack) for rack in sorted(heard)}
    # They copy what is decided, or wait for a donor's state, and train later.
    newcomers = log.non_voters - log.demoted | waiting_for_state(reports)
    if log.mark is not None and not log.mark.written:
        # One that was started again meanwhile is a newcomer, and will not write.
        writers = {rack: each for rack, each in newest.items() if rack not in newcomers}
        if written := _written(log.mark, writers):
            return Mark(log.mark.number, log.mark.name, lineage, written, written=True)
    asked = {
        rack: report.cut if report is not None else None
        for rack, report in newest.items()
        if not (report is not None and report.cut is None and (report.leaving or rack in newcomers))
    }
    cuts = set(asked.values())
    cut = cuts.pop() if len(cuts) == 1 else None
    if cut is None or cut.written or cut.number != log.marks + 1:
        return None
    return Mark(cut.number, cut.name, lineage, tuple(asked))


def waits(log: LogState, reports: Mapping[int, Report | None]) -> str:
    """Why a checkpoint that a rack asks for is not made yet, or empty."""
    asking = {
        rack: report.cut
        for rack in sorted(log.seats)
        if (report := reports.get(rack)) is not None and report.cut is not None
    }
    if not asking:
        return ""
    missing = [rack for rack in sorted(log.seats) if rack not in asking]
    waiting = ", ".join(f"rack {rack} in {cut.name!r}" for rack, cut in asking.items())
    without = f"; racks {','.join(map(str, missing))} are in none" if missing else ""
    return f"checkpoint: {waiting}{without}"


def _written(mark: Mark, newest: Mapping[int, Report | None]) -> tuple[int, ...]:
    """Racks of the checkpoint that have written it, once no other rack still may; else none. A rack
    that waits in no checkpoint any more, or in another one, has given up."""
    writing, done = (Cut(mark.number, mark.name, written) for written in (False, True))
    reports = {rack: newest[rack] for rack in mark.racks if rack in newest}
    if any(report is None or report.cut == writing for report in reports.values()):
        return ()
    return tuple(rack for rack, report in reports.items() if report and report.cut == done)
