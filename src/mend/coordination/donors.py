"""Chooses the donor that gives its training state (optimizers, registered objects, step) to a
joining rack.

The joining rack asks in its reports, the coordinator names a donor in its orders, the donor copies
its state after a step and reports the copy, and the orders pass that on. All of these are whole
states, like every other message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mend.consensus.log import LogState
from mend.coordination.messages import Donor, Orders, RankReport, Report, StateCopy
from mend.types import Member

Reports = Mapping[int, Report]

LEAVES = "it leaves the job, and no other rack trains"
ALL_JOIN = "every rack of the job joins, and none trains"


def donors_of(log: LogState, reports: Reports, live: frozenset[int]) -> tuple[Donor, ...]:
    """For every live rack that asks, a training rack that has not refused it: the lowest that has
    copied for it already, so that a copy is not abandoned for a lower rack; otherwise the
    lowest."""
    asking = _asking(log, reports, live)
    donors = []
    for rack in asking:
        to = log.seats[rack].member
        able = [r for r in _training(log, reports, live) if not _refusal(reports[r], to)]
        if able:
            donor = next((r for r in able if _has_copy(reports[r], to)), able[0])
            donors.append(Donor(to, log.seats[donor].member))
    return tuple(donors)


def copies_of(
    log: LogState, reports: Reports, live: frozenset[int], donors: Sequence[Donor]
) -> tuple[StateCopy, ...]:
    """The copies of the donors; if every donor has refused, the refusal of the lowest rack. Where
    all racks join, the lowest that votes is refused in its own name: it trains then, and can give
    its state to the others."""
    copies = []
    named = {each.to: each.donor for each in donors}
    for rack in _asking(log, reports, live):
        to = log.seats[rack].member
        if to in named:
            copies += [copy for copy in reports[named[to].rack].copies if copy.to == to][:1]
        else:
            copies += _refusals(log, reports, live, rack)[:1]
    return tuple(copies)


def copies_of_rack(member: Member, ranks: Sequence[RankReport]) -> tuple[StateCopy, ...]:
    """The copies that all ranks of a donor have made at the same step. A refusal by one rank
    refuses for the rack.

    `ranks`: reports of all its ranks, in rank order.
    """
    of_rack = []
    for to in sorted({copy.to for rank in ranks for copy in rank.copies}):
        copies = [copy for rank in ranks for copy in rank.copies if copy.to == to]
        refused = next((copy.refused for copy in copies if copy.refused), "")
        step = copies[0].step
        if refused:
            of_rack.append(StateCopy(to, member, 0, (), (), refused))
        elif len(copies) == len(ranks) and all(copy.step == step for copy in copies):
            sizes, digests = (c.size for c in copies), (c.digest for c in copies)
            of_rack.append(StateCopy(to, member, step, tuple(sizes), tuple(digests)))
    return tuple(of_rack)


def asked_of(orders: Orders | None, member: Member) -> tuple[Member, ...]:
    """Joining racks that this rack is the donor of."""
    return tuple(each.to for each in orders.donors if each.donor == member) if orders else ()


def copy_for(orders: Orders | None, member: Member) -> StateCopy | None:
    """The copy that a donor has made for this rack."""
    copies = (each for each in (orders.copies if orders else ()) if each.to == member)
    return next(copies, None)


def waiting_for_state(reports: Reports) -> frozenset[int]:
    """Joining racks that wait for a donor's state before they train."""
    return frozenset(rack for rack, report in reports.items() if report.wants)


def _asking(log: LogState, reports: Reports, live: frozenset[int]) -> list[int]:
    return [rack for rack in _heard(log, reports, live) if reports[rack].wants]


def _refusals(log: LogState, reports: Reports, live: frozenset[int], rack: int) -> list[StateCopy]:
    """Why the rack, which asks, gets no copy: by rack."""
    to = log.seats[rack].member
    if training := _training(log, reports, live):
        refusals = (_refusal(reports[r], to) for r in training)
        return [each for each in refusals if each is not None]
    if rack == _first_of_joining(log, reports, live):
        return [StateCopy(to, to, 0, (), (), ALL_JOIN)]
    leaving = _all_leaving(log, reports)
    step = max((reports[r].step for r in leaving), default=0)
    return [StateCopy(to, log.seats[r].member, step, (), (), LEAVES) for r in leaving]


def _newcomers(log: LogState) -> frozenset[int]:
    return log.non_voters - log.demoted


def _training(log: LogState, reports: Reports, live: frozenset[int]) -> list[int]:
    """Live racks that neither leave nor join."""
    racks = set(_heard(log, reports, live)) - _newcomers(log)
    return sorted(r for r in racks if not (reports[r].wants or reports[r].leaving))


def _heard(log: LogState, reports: Reports, live: frozenset[int]) -> list[int]:
    """Live racks that have reported, ascending."""
    return sorted(log.seats.keys() & reports.keys() & live)


def _all_leaving(log: LogState, reports: Reports) -> list[int]:
    """The seated racks that are not joining, if all of them leave. One that is silent, or not heard
    yet, may still train."""
    racks = _not_joining(log, reports)
    return racks if all(rack in reports and reports[rack].leaving for rack in racks) else []


def _first_of_joining(log: LogState, reports: Reports, live: frozenset[int]) -> int | None:
    """The lowest live rack that votes and waits for a state, if every seated rack joins: all that
    trained were started again before a copy was made."""
    if _not_joining(log, reports):
        return None
    newcomers = _newcomers(log)
    return next((rack for rack in _asking(log, reports, live) if rack not in newcomers), None)


def _not_joining(log: LogState, reports: Reports) -> list[int]:
    return sorted(log.seats.keys() - _newcomers(log) - waiting_for_state(reports))


def _has_copy(report: Report, to: Member) -> bool:
    return any(copy.to == to and not copy.refused for copy in report.copies)


def _refusal(report: Report, to: Member) -> StateCopy | None:
    return next((copy for copy in report.copies if copy.to == to and copy.refused), None)
