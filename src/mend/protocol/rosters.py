"""protocol: who is in, and who votes. The next change, one at a time, never at the cost of bytes.

Any change needs `hold` for every fragment under the new roster: what is decided stays reachable
by every quorum that may come.

A rack without a vote keeps its seat, its offers and its optimizer. Its vote is taken where it only
holds the others up: no commit without its bytes, no majority with its silence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from mend.protocol.log import Folded, voters_of, witness_votes
from mend.protocol.messages import Hello, Report, Roster, Seat
from mend.protocol.quorum import hold, quorum
from mend.protocol.view import View
from mend.terms import SECOND, WITNESS, Member

SILENT_DETECTS = 3
"""Detection times of silence that cost a vote, though the others can do without it so far."""

STEADY_DETECTS = 1
"""Detection times that a voter must be live on end before it gets a vote back."""

SLOW_STEADY_NS = 60 * SECOND
"""The same for who held a merge up: each time it did, the others waited."""


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
    detect_ns: int
    demotes: bool = True
    """Not in lockstep, where all racks are waited for."""
    slow: frozenset[int] = frozenset()
    """Live racks whose results are all that a merge waits for, and has waited for too long."""
    ready: Collection[Member] = ()
    """Who has accepted the whole log."""
    returned: Member | None = None
    """The witness in another life than the one that has the seat, which is silent."""
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
    return next((each for each in _changes(hall) if _keeps_bytes(hall, each)), None)


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


def _changes(hall: Hall) -> Iterable[Roster]:
    """By what is due first."""
    heard = {member for member in hall.log.voters if member.rack in hall.live}
    # What cannot be decided now would be in force as soon as it did no good any more.
    decidable = quorum(heard, hall.log.voters)
    votes = _votes(hall, heard) if decidable else ()
    for proposal in (*_comings(hall), *votes, *_evictions(hall)):
        yield from _named(hall, proposal)
    if decidable:
        yield from _witness(hall)


def _comings(hall: Hall) -> Iterable[Roster]:
    """And goings, that somebody asked for."""
    log = hall.log
    for rack, report in hall.reports.items():
        gone = report.gone and rack not in hall.live
        if gone or (report.leaving and report.hurry and report.idle):
            yield _without(log, rack, f"rack {rack} left")
    for rack in sorted((log.seats.keys() & set(hall.retired)) - hall.live):
        yield _without(log, rack, f"a person has retired rack {rack}")
    for rack in sorted(hall.joining):
        yield _with(log, hall.joining[rack])


def _evictions(hall: Hall) -> Iterable[Roster]:
    for rack in sorted(hall.views):
        view = hall.views[rack]
        silent = rack not in hall.live and hall.now_ns - view.lively_ns >= hall.evict_ns > 0
        if silent and rack in hall.log.seats:
            yield _without(hall.log, rack, f"rack {rack} was not there for too long")


def _votes(hall: Hall, heard: set[Member]) -> Iterable[Roster]:
    """Taken from racks that are silent or slow, and given to those that keep up."""
    log = hall.log
    for racks, why in _lost(hall, heard) if hall.demotes else ():
        reason = f"{_racks(racks)} {'are' if len(racks) > 1 else 'is'} {why}"
        yield _changed(log, log.seats, log.learners | racks, reason)
    for rack in sorted(log.learners & log.seats.keys()):
        if _may_vote(hall, rack) and _is_close(hall, rack):
            yield _changed(log, log.seats, log.learners - {rack}, f"rack {rack} holds everything")


def _lost(hall: Hall, heard: set[Member]) -> Iterable[tuple[set[int], str]]:
    """Racks whose votes only hold the others up, and why: no commit as long as hold needs their
    bytes. Or the next death would, as they have been silent for long."""
    voters = hall.log.voters
    racks = {member.rack for member in voters} - {WITNESS}
    silent, slow = racks - hall.live, racks & hall.slow
    if silent and not hold({m for m in heard if m.rack in racks}, voters):
        yield silent, "silent"
    if slow and not hold({m for m in heard if m.rack in racks - slow}, voters):
        yield silent | slow, "slow"
    if long := {rack for rack in silent if _silent_for_long(hall, rack)}:
        yield long, "silent for long"


def _silent_for_long(hall: Hall, rack: int) -> bool:
    limit_ns = SILENT_DETECTS * hall.detect_ns
    return rack not in hall.live and hall.now_ns - hall.views[rack].lively_ns >= limit_ns


def _may_vote(hall: Hall, rack: int) -> bool:
    """Whether it keeps up: live for some time, not slow, and with the whole log."""
    view = hall.views.get(rack)
    if view is None or rack not in hall.live - hall.slow or view.member not in hall.ready:
        return False
    return hall.now_ns >= view.vote_ns


def _is_close(hall: Hall, rack: int) -> bool:
    """Whether it has nearly all that is decided. To the last version would wait for a moment
    without rounds, which may never come; that no bytes are lost is asked of every change."""
    report = hall.reports.get(rack)
    if report is None:
        return False
    return all(has >= v - 1 for has, v in zip(report.versions, hall.log.versions, strict=True))


def _witness(hall: Hall) -> Iterable[Roster]:
    """Its seat goes to its next life, its vote comes and goes by the rule."""
    log, votes = hall.log, hall.log.witness in hall.log.voters
    if hall.returned is not None:
        back = _changed(log, log.seats, log.learners | {WITNESS}, "the witness is back")
        yield replace(back, witness=hall.returned)
    if log.witness is not None and votes != _names_witness(hall, log.seats, log.learners):
        reason = "the witness has no vote now" if votes else "the witness votes"
        yield _changed(log, log.seats, log.learners ^ {WITNESS}, reason)


def _named(hall: Hall, roster: Roster) -> Iterable[Roster]:
    """The same with the witness named by the rule; or as it was, where bytes are in the way."""
    seats = [seat.member.rack for seat in roster.members]
    others = frozenset(roster.learners) - {WITNESS}
    names = roster.witness is None or _names_witness(hall, seats, others)
    learners = tuple(sorted(others if names else others | {WITNESS}))
    yield replace(roster, learners=learners)
    if learners != roster.learners:
        yield roster


def _names_witness(hall: Hall, seats: Collection[int], learners: Collection[int]) -> bool:
    """Whether the witness is to vote beside the racks that do."""
    log = hall.log
    if log.witness in log.voters:
        able = not _silent_for_long(hall, WITNESS)
    else:
        able = _may_vote(hall, WITNESS)
    return able and witness_votes(log.witness, len(set(seats) - set(learners)))


def _without(log: Folded, rack: int, reason: str) -> Roster:
    seats = {other: seat for other, seat in log.seats.items() if other != rack}
    return _changed(log, seats, log.learners - {rack}, reason)


def _with(log: Folded, hello: Hello) -> Roster:
    """As a learner: it gets its vote when it holds what is decided."""
    rack = hello.seat.member.rack
    reason = f"rack {rack} {'is back' if rack in log.seats else 'joins'}"
    return _changed(log, {**log.seats, rack: hello.seat}, log.learners | {rack}, reason)


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


def _racks(racks: set[int]) -> str:
    return f"rack{'s' if len(racks) > 1 else ''} {','.join(map(str, sorted(racks)))}"
