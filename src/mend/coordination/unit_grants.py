"""Decides which rack gets which units of data. Racks ask; one record answers them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mend.consensus.log import LogState
from mend.consensus.records import Grant, Spans, UnitBook
from mend.consensus.units import first_of, without
from mend.coordination.messages import Report, UnitsAsk
from mend.errors import require
from mend.types import Member

GRANT_MIN = 16
"""Least number of units of a grant, while there are so many: towards the end grants become smaller,
so that all racks end together."""


def next_grant(log: LogState, reports: Mapping[int, Report], live: frozenset[int]) -> Grant | None:
    """The record that is due, if there is one. `log`: the appended log.

    In lockstep the first record gives each rack an equal part of the units of each epoch, so which
    rack takes what does not depend on when it asks. Otherwise a grant is at most half of a rack's
    part of what is free.

    The units end when every rack that holds some has taken them: these may become free again. A
    rack that holds none is not waited for. It may wait for the state of one that waits here.
    """
    if log.units is None or not log.seats:
        return None
    policy = require(log.policy, "units are in the first record")
    books = {book.member: book for book in log.units.books}
    trains, asks, back = list[Member](), dict[Member, UnitsAsk](), list[Member]()
    for rack, seat in sorted(log.seats.items()):
        report, book = reports.get(rack), books[seat.member]
        if report is not None and report.leaving and report.idle:
            back += [seat.member] if book.given > book.done else []
            continue
        trains.append(seat.member)
        if report is not None and rack in live and _is_new(report.units, book):
            asks[seat.member] = require(report.units, "it has asked")
    evenly = policy.lockstep and not log.units.fresh
    if evenly and len(asks) < len(trains):
        return None
    if evenly:
        shares = _even_shares(policy.units, policy.epochs, sorted(asks))
    else:
        shares = _shares(log.units.free, asks, len(log.seats))
    if shares or back:
        return Grant(shares, tuple(back))
    empty = {member for member, ask in asks.items() if ask.empty}
    holding = {member for member in trains if books[member].given > books[member].done}
    ends = empty and (policy.lockstep or holding <= empty)
    return Grant(()) if ends and not log.units.free and not log.units.ended else None


def _is_new(ask: UnitsAsk | None, book: UnitBook) -> bool:
    """Whether the ask was not answered yet."""
    return ask is not None and ask.given == book.given


def _shares(
    free: Spans, asks: Mapping[Member, UnitsAsk], racks: int
) -> tuple[tuple[Member, Spans], ...]:
    left, shares = sum(count for _, count in free), []
    for member, ask in sorted(asks.items()):
        size = min(ask.size, max(GRANT_MIN, left // (2 * racks)))
        if spans := first_of(free, size):
            shares.append((member, spans))
            free, left = without(free, spans), left - sum(count for _, count in spans)
    return tuple(shares)


def _even_shares(
    units: int, epochs: int, members: Sequence[Member]
) -> tuple[tuple[Member, Spans], ...]:
    """Each epoch's units, cut into equal parts in the order of the members. Who gets one more where
    they do not divide changes with the epoch."""
    racks, spans = len(members), dict[Member, list[tuple[int, int]]]()
    first = 0
    for epoch in range(epochs):
        for position, member in enumerate(members):
            size = units // racks + ((position + epoch) % racks < units % racks)
            if size:
                spans.setdefault(member, []).append((first, size))
            first += size
    return tuple((member, tuple(spans[member])) for member in members if member in spans)
