"""protocol: who is in. The next change of the roster, one at a time, never at the cost of bytes.

Any change needs `hold` for every fragment under the new roster: what is decided stays reachable
by every quorum that may come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from mend.protocol.log import Folded, voters_of
from mend.protocol.messages import Hello, Report, Roster, Seat
from mend.protocol.quorum import hold
from mend.protocol.view import View
from mend.terms import Member


@dataclass(frozen=True, slots=True)
class Hall:
    """What a decision on the roster looks at. `evict_ns` 0: nobody is put out for being silent."""

    log: Folded
    views: Mapping[int, View]
    live: frozenset[int]
    offers: Collection[tuple[int, int]]
    """(rack, fragment) of open offers."""
    joining: Mapping[int, Hello]
    evict_ns: int
    now_ns: int
    retired: Collection[int] = ()
    """Racks that will not come back, as a person says."""

    @property
    def reports(self) -> dict[int, Report]:
        found = {rack: self.views[rack].report for rack in sorted(self.log.seats)}
        return {rack: report for rack, report in found.items() if report is not None}


def next_roster(hall: Hall) -> Roster | None:
    """The change that is due, if there is one and no bytes are lost by it."""
    over = _over(hall)
    if over is not None:
        return over
    for proposal in _proposals(hall):
        if _keeps_bytes(hall, proposal):
            return proposal
    return None


def _over(hall: Hall) -> Roster | None:
    """The job ends when every live rack is done and holds everything."""
    done = {
        rack
        for rack, report in hall.reports.items()
        if report.leaving and report.idle and list(report.versions) == hall.log.versions
    }
    live = hall.live & hall.log.seats.keys()
    if live and live <= done and not any(rack in live for rack, _ in hall.offers):
        return Roster(hall.log.roster_number + 1, (), (), hall.log.witness, "all racks are done")
    return None


def _proposals(hall: Hall) -> Iterable[Roster]:
    log = hall.log
    for rack, report in hall.reports.items():
        gone = report.gone and rack not in hall.live
        if gone or (report.leaving and report.hurry and report.idle):
            yield _without(log, rack, f"rack {rack} left")
    retired = sorted((log.seats.keys() & set(hall.retired)) - hall.live)
    for rack in retired:
        yield _without(log, rack, f"a person has retired rack {rack}")
    for rack in sorted(hall.joining):
        yield _with(log, hall.joining[rack])
    if (
        len(hall.joining) + len(retired) > 1
    ):  # with the seat of one dead alone a quorum may lack bytes
        yield _at_once(log, retired, hall.joining)
    for rack in sorted(log.learners):
        report_of = hall.reports.get(rack)
        if report_of and rack in hall.live and list(report_of.versions) == log.versions:
            yield _changed(log, log.seats, log.learners - {rack}, f"rack {rack} holds everything")
    for rack in sorted(hall.views):
        view = hall.views[rack]
        silent = rack not in hall.live and hall.now_ns - view.lively_ns >= hall.evict_ns > 0
        if silent and rack in log.seats:
            yield _without(log, rack, f"rack {rack} was not there for too long")


def _without(log: Folded, rack: int, reason: str) -> Roster:
    seats = {other: seat for other, seat in log.seats.items() if other != rack}
    return _changed(log, seats, log.learners - {rack}, reason)


def _with(log: Folded, hello: Hello) -> Roster:
    """As a learner: it gets its vote when it holds what is decided."""
    return _at_once(log, (), {hello.seat.member.rack: hello})


def _at_once(log: Folded, gone: Collection[int], joining: Mapping[int, Hello]) -> Roster:
    """These are out, those are in."""
    new = {rack: joining[rack].seat for rack in sorted(joining)}
    why = [f"a person has retired rack {rack}" for rack in gone if rack not in new]
    why += [f"rack {rack} {'is back' if rack in log.seats else 'joins'}" for rack in new]
    stay = {rack: seat for rack, seat in log.seats.items() if rack not in gone}
    return _changed(log, {**stay, **new}, (log.learners - {*gone}) | new.keys(), ", ".join(why))


def _changed(
    log: Folded, seats: Mapping[int, Seat], learners: Collection[int], reason: str
) -> Roster:
    ordered = tuple(seats[rack] for rack in sorted(seats))
    return Roster(log.roster_number + 1, ordered, tuple(sorted(learners)), log.witness, reason)


def _keeps_bytes(hall: Hall, roster: Roster) -> bool:
    """Whether every quorum of the new roster has a rack that holds what is decided."""
    log = hall.log
    voters = voters_of(roster.members, roster.learners, roster.witness)
    if voters <= {roster.witness}:
        return False
    return all(
        hold(_holders(hall, fragment, version), voters)
        for fragment, version in enumerate(log.versions)
    )


def _holders(hall: Hall, fragment: int, version: int) -> set[Member]:
    return {
        view.member
        for view in hall.views.values()
        if view.report is not None and view.report.versions[fragment] >= version
    }
