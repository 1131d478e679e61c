"""Decides the next change of the roster: who is a member, and who votes. It makes one change at a
time and none that loses bytes.

Any change needs `hold` for every fragment under the new roster, so every later quorum can reach
what is decided.

A rack without a vote keeps its seat, its offers and its optimizer state. It loses its vote if it
only blocks the others: they cannot commit without its bytes, or its silence prevents a majority.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from msgspec.structs import replace

from mend.consensus.log import LogState, voters_of, witness_votes
from mend.consensus.quorum import hold
from mend.consensus.records import Roster, Seat
from mend.coordination.member_view import MemberView
from mend.coordination.messages import Hello, Report
from mend.types import SECOND, WITNESS, Member, rack_names

SILENT_DETECTS = 3
"""Detection times of silence after which a rack loses its vote even if the others can continue
without it so far."""

STEADY_DETECTS = 1
"""Detection times for which a rack must be continuously live before it gets its vote back."""

SLOW_STEADY_NS = 60 * SECOND
"""The same for a rack that has delayed a merge that all others waited for."""


@dataclass(frozen=True)
class MembershipContext:
    """The inputs of a decision on the roster. `seat_timeout_ns` 0: silent racks keep seats."""

    log: LogState
    views: Mapping[int, MemberView]
    live: frozenset[int]
    offers: Collection[tuple[int, int]]
    """(rack, fragment) of open offers."""
    joining: Mapping[int, Hello]
    seat_timeout_ns: int
    now_ns: int
    detect_ns: int
    demotes: bool = True
    """Whether racks can lose their votes. Not in lockstep, where all racks are waited for."""
    slow: frozenset[int] = frozenset()
    """Live racks that are the only ones a merge has waited for, and for too long."""
    ready: Collection[Member] = ()
    """Members that have accepted the whole log."""
    returned: Member | None = None
    """Another incarnation of the witness than the seated one, which is silent."""
    retired: Collection[int] = ()
    """Racks that a person has retired."""

    @cached_property
    def reports(self) -> dict[int, Report]:
        newest = {rack: self.views[rack].report for rack in sorted(self.log.seats)}
        return {rack: report for rack, report in newest.items() if report is not None}

    @cached_property
    def heard(self) -> set[Member]:
        """Live voters."""
        return {member for member in self.log.voters if member.rack in self.live}

    @cached_property
    def decidable(self) -> bool:
        """Whether the live voters can decide a change. One that they cannot decide would take
        effect only when it is no longer useful."""
        return self.log.may_decide(self.heard)


def note_liveness(
    views: Mapping[int, MemberView],
    live: frozenset[int],
    slow: frozenset[int],
    now_ns: int,
    detect_ns: int,
) -> None:
    """Record when each member was last live, and when it may get a vote again."""
    for rack, view in views.items():
        if rack in live:
            view.lively_ns = now_ns
        else:
            view.vote_ns = now_ns + STEADY_DETECTS * detect_ns
        if rack in slow:
            view.vote_ns = now_ns + SLOW_STEADY_NS


def next_roster(context: MembershipContext) -> Roster | None:
    """The change that is due, if there is one and it loses no bytes."""
    over = _over(context) if context.decidable else None
    if over is not None:
        return over
    return next((each for each in _changes(context) if _keeps_bytes(context, each)), None)


def _over(context: MembershipContext) -> Roster | None:
    """The end of the job: every live rack is done and holds everything. Not if the live racks are a
    minority that can decide nothing, while the others may still train. A rack that fell silent a
    moment ago is awaited like a live one, because its link may only flap, unless a live rack is in
    a hurry."""
    done = {
        rack
        for rack, report in context.reports.items()
        if report.leaving and report.idle and list(report.versions) == context.log.versions
    }
    live = awaited = context.live & context.log.seats.keys()
    if not any(context.reports[rack].hurry for rack in live & done):
        awaited = live | {rack for rack in context.log.seats if _may_be_back(context, rack)}
    if live and awaited <= done and not any(rack in awaited for rack, _ in context.offers):
        racks = range(context.log.policy.racks) if context.log.policy is not None else ()
        lost = tuple(rack for rack in racks if rack not in live)
        why = "all racks are done"
        return Roster(context.log.roster_number + 1, (), lost, context.log.witness, why)
    return None


def _changes(context: MembershipContext) -> Iterable[Roster]:
    """Changes that are due, most urgent first."""
    votes = (*_copied(context), *_votes(context)) if context.decidable else ()
    for proposal in (*_comings(context), *votes, *_evictions(context)):
        yield from _named(context, proposal)
    if context.decidable:
        yield from _witness(context)


def _comings(context: MembershipContext) -> Iterable[Roster]:
    """Racks that leave, are retired or join."""
    log = context.log
    for rack, report in context.reports.items():
        gone = report.gone and rack not in context.live
        if gone or (report.leaving and report.hurry and report.idle):
            why = f"rack {rack} left"
            evicted = ", evicted because it is slow" if log.is_evicted(rack) else ""
            yield _without(log, rack, why + evicted)
    known = log.seats.keys() - context.live | log.away.keys()
    for rack in sorted(known & set(context.retired)):
        why = f"a person has retired rack {rack}"
        yield replace(_without(log, rack, why), retired=(rack,))
    for rack in sorted(context.joining):
        yield _with(log, context.joining[rack])


def _evictions(context: MembershipContext) -> Iterable[Roster]:
    for rack in sorted(context.views):
        view = context.views[rack]
        silent = (
            rack not in context.live
            and context.now_ns - view.lively_ns >= context.seat_timeout_ns > 0
        )
        if silent and rack in context.log.seats:
            yield _without(context.log, rack, f"rack {rack} was absent for too long")


def _copied(context: MembershipContext) -> Iterable[Roster]:
    """The racks of a unanimous lineage have copied enough from each other: from here on a quorum of
    them decides."""
    if context.log.unanimous:
        reason = "every quorum holds all decided versions"
        yield _changed(context.log, context.log.seats, context.log.non_voters, reason)


def _votes(context: MembershipContext) -> Iterable[Roster]:
    """Changes of votes: taken from racks that are silent or slow, given to racks that keep up."""
    log = context.log
    for racks, why in _lost(context) if context.demotes else ():
        reason = f"{rack_names(racks)} {'are' if len(racks) > 1 else 'is'} {why}"
        yield _changed(log, log.seats, log.non_voters | racks, reason)
    for rack in sorted(log.non_voters & log.seats.keys()):
        if _may_vote(context, rack) and _is_close(context, rack):
            yield _changed(log, log.seats, log.non_voters - {rack}, f"rack {rack} holds everything")


def _lost(context: MembershipContext) -> Iterable[tuple[set[int], str]]:
    """Racks whose votes only block the others, and the reason: nothing commits while `hold` needs
    their bytes; or they have been silent long enough that the next death would block the others."""
    voters, heard = context.log.voters, context.heard
    racks = {member.rack for member in voters} - {WITNESS}
    silent, slow = racks - context.live, racks & context.slow
    if silent and not hold({m for m in heard if m.rack in racks}, voters):
        yield silent, "silent"
    if slow and not hold({m for m in heard if m.rack in racks - slow}, voters):
        yield silent | slow, "slow"
    if long := {rack for rack in silent if _silent_for_long(context, rack)}:
        yield long, "silent for long"


def _silent_for_long(context: MembershipContext, rack: int) -> bool:
    limit_ns = SILENT_DETECTS * context.detect_ns
    return rack not in context.live and context.now_ns - context.views[rack].lively_ns >= limit_ns


def _may_be_back(context: MembershipContext, rack: int) -> bool:
    """Whether the rack is silent, only since recently, and has not left. A coordinator that has
    just taken over has no report of the one before, whose silence may be that of its link."""
    silent = rack not in context.live and not _silent_for_long(context, rack)
    return silent and not context.views[rack].gone


def _may_vote(context: MembershipContext, rack: int) -> bool:
    """Whether the rack keeps up: live for some time, not slow, and with the whole log."""
    view = context.views.get(rack)
    if view is None or rack not in context.live - context.slow or view.member not in context.ready:
        return False
    return context.now_ns >= view.vote_ns


def _is_close(context: MembershipContext, rack: int) -> bool:
    """Whether the rack holds nearly everything that is decided, and waits for no donor. Requiring
    the last version would wait for a pause between rounds that may never come; `hold` is checked
    for every change anyway."""
    report = context.reports.get(rack)
    if report is None or report.wants:
        return False
    return all(has >= v - 1 for has, v in zip(report.versions, context.log.versions, strict=True))


def _witness(context: MembershipContext) -> Iterable[Roster]:
    """Changes of the witness: its seat passes to its next incarnation, its vote follows
    `witness_votes`."""
    log, votes = context.log, context.log.witness in context.log.voters
    if context.returned is not None:
        back = _changed(log, log.seats, log.non_voters | {WITNESS}, "the witness is back")
        yield replace(back, witness=context.returned)
    if log.witness is not None and votes != _names_witness(context, log.seats, log.non_voters):
        reason = "the witness has no vote now" if votes else "the witness votes"
        yield _changed(log, log.seats, log.non_voters ^ {WITNESS}, reason)


def _named(context: MembershipContext, roster: Roster) -> Iterable[Roster]:
    """The roster with the witness's vote as `witness_votes` has it, then the unchanged roster in
    case the first one loses bytes."""
    seats = [seat.member.rack for seat in roster.members]
    others = frozenset(roster.non_voters) - {WITNESS}
    names = roster.witness is None or _names_witness(context, seats, others)
    non_voters = tuple(sorted(others if names else others | {WITNESS}))
    yield replace(roster, non_voters=non_voters)
    if non_voters != roster.non_voters:
        yield roster


def _names_witness(
    context: MembershipContext, seats: Collection[int], non_voters: Collection[int]
) -> bool:
    """Whether the witness should vote besides the voting racks."""
    log = context.log
    if log.witness in log.voters:
        able = not _silent_for_long(context, WITNESS)
    else:
        able = _may_vote(context, WITNESS)
    return able and witness_votes(log.witness, len(set(seats) - set(non_voters)))


def _without(log: LogState, rack: int, reason: str) -> Roster:
    seats = {other: seat for other, seat in log.seats.items() if other != rack}
    return _changed(log, seats, log.non_voters - {rack}, reason)


def _with(log: LogState, hello: Hello) -> Roster:
    """The roster with a joining rack, which has no vote until it holds the decided versions."""
    rack = hello.seat.member.rack
    reason = f"rack {rack} {'is back' if rack in log.seats else 'joins'}"
    return _changed(log, {**log.seats, rack: hello.seat}, log.non_voters | {rack}, reason)


def _changed(
    log: LogState, seats: Mapping[int, Seat], non_voters: Collection[int], reason: str
) -> Roster:
    ordered = tuple(seats[rack] for rack in sorted(seats))
    return Roster(log.roster_number + 1, ordered, tuple(sorted(non_voters)), log.witness, reason)


def _keeps_bytes(context: MembershipContext, roster: Roster) -> bool:
    """Whether every quorum of the new roster contains a rack that holds what is decided."""
    log = context.log
    voters = voters_of(roster.members, roster.non_voters, roster.witness)
    if voters <= {roster.witness}:
        return False
    return all(
        hold(_holders(context, fragment, version), voters)
        for fragment, version in enumerate(log.versions)
    )


def _holders(context: MembershipContext, fragment: int, version: int) -> set[Member]:
    return {
        view.member
        for view in context.views.values()
        if view.report is not None and view.report.versions[fragment] >= version
    }
