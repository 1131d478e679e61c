"""Decides when a checkpoint is due. Racks ask for it; one record says where in the log it lies,
another that all of them have written it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mend.consensus.log import LogState
from mend.consensus.records import CheckpointRecord
from mend.coordination.donors import waiting_for_state
from mend.coordination.messages import BarrierState, RankReport, Report
from mend.errors import require
from mend.types import rack_names


def barrier_of_rack(ranks: Sequence[RankReport]) -> BarrierState | None:
    """The checkpoint that all ranks wait in, or have written. As long as some of them write, the
    rack does: no checkpoint at all would say that it has given up."""
    barriers = [rank.barrier for rank in ranks if rank.barrier is not None]
    if (
        len(barriers) < len(ranks)
        or len({(barrier.number, barrier.name) for barrier in barriers}) > 1
    ):
        return None
    return min(barriers, key=lambda barrier: barrier.written)


def next_checkpoint(
    log: LogState, lineage: str, reports: Mapping[int, Report], live: frozenset[int]
) -> CheckpointRecord | None:
    """The record that is due, if there is one. `log`: the appended log."""
    policy = require(log.policy, "racks report after the first record")
    if log.checkpoint is None and not any(report.barrier for report in reports.values()):
        return None
    heard = {rack for rack in log.seats if policy.lockstep or rack in live}
    newest = {rack: reports.get(rack) for rack in sorted(heard)}
    # They copy what is decided, or wait for a donor's state, and train later.
    newcomers = log.non_voters - log.demoted | waiting_for_state(reports)
    if log.checkpoint is not None and not log.checkpoint.written:
        # One that was started again meanwhile is a newcomer, and will not write.
        writers = {rack: each for rack, each in newest.items() if rack not in newcomers}
        if written := _written(log.checkpoint, writers):
            return CheckpointRecord(
                log.checkpoint.number, log.checkpoint.name, lineage, written, written=True
            )
    asked = {
        rack: report.barrier if report is not None else None
        for rack, report in newest.items()
        if not (
            report is not None and report.barrier is None and (report.leaving or rack in newcomers)
        )
    }
    barriers = set(asked.values())
    barrier = barriers.pop() if len(barriers) == 1 else None
    if barrier is None or barrier.written or barrier.number != log.checkpoint_number + 1:
        return None
    return CheckpointRecord(barrier.number, barrier.name, lineage, tuple(asked))


def waits(log: LogState, reports: Mapping[int, Report]) -> str:
    """Why a checkpoint that a rack asks for is not made yet, or empty."""
    by_name = dict[str, list[int]]()
    missing = list[int]()
    for rack in sorted(log.seats):
        barrier = reports[rack].barrier if rack in reports else None
        (missing if barrier is None else by_name.setdefault(barrier.name, [])).append(rack)
    if not by_name:
        return ""
    waiting = ", ".join(f"{rack_names(racks)} in {name!r}" for name, racks in by_name.items())
    are = "are" if len(missing) > 1 else "is"
    return f"checkpoint: {waiting}" + (f"; {rack_names(missing)} {are} in none" if missing else "")


def _written(record: CheckpointRecord, newest: Mapping[int, Report | None]) -> tuple[int, ...]:
    """Racks of the checkpoint that have written it, once no other rack still may; else none. A rack
    that waits in no checkpoint any more, or in another one, has given up."""
    writing, done = (BarrierState(record.number, record.name, written) for written in (False, True))
    reports = {rack: newest[rack] for rack in record.racks if rack in newest}
    if any(report is None or report.barrier == writing for report in reports.values()):
        return ()
    return tuple(rack for rack, report in reports.items() if report and report.barrier == done)
