"""Decides which rack gets which units of data. Racks ask; one record answers them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mend.consensus.log import LogState
from mend.consensus.records import Grant, Spans, UnitBook, Units
from mend.consensus.units import first_of, without
from mend.coordination.messages import Report, UnitsAsk
from mend.errors import require
from mend.types import Member, rack_names

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
    demand = _demand(log, log.units, reports, live)
    if demand.evenly and demand.awaited:
        return None
    if demand.evenly:
        shares = _even_shares(policy.units, policy.epochs, sorted(demand.asks))
    else:
        shares = _shares(log.units.free, demand.asks, len(log.seats))
    if shares or demand.back:
        return Grant(shares, demand.back)
    ends = demand.empty and (policy.lockstep or not demand.awaited)
    return Grant(()) if ends and not log.units.free and not log.units.ended else None


def why_no_units(log: LogState, reports: Mapping[int, Report], live: frozenset[int]) -> str:
    """Why racks that have no units left get none, or empty. `log`: the appended log."""
    if log.units is None or not log.seats:
        return ""
    policy = require(log.policy, "units are in the first record")
    demand = _demand(log, log.units, reports, live)
    waits = demand.evenly or not (policy.lockstep or log.units.free or log.units.ended)
    if not waits or not demand.empty or not demand.awaited:
        return ""
    racks = sorted(member.rack for member in demand.awaited)
    silent = [rack for rack in racks if rack not in live]
    what = "to read the ledger" if demand.evenly else "to take the last rows that were given out"
    why = f"data ledger: waiting for {rack_names(racks)} {what}"
    if not silent:
        return why
    each = " or ".join(f"`mend retire {rack}`" for rack in silent)
    return f"{why}, silent: {rack_names(silent)} ({each}, if it is lost)"


def racks_without_rows(
    log: LogState, reports: Mapping[int, Report], live: frozenset[int]
) -> frozenset[int]:
    """Racks that have taken all their rows and get more only when a rack that leaves has left. A
    round that waits for their offers would wait forever, if it merges the work of that rack.

    Empty while a live rack trains on rows of its own, as its offers come; and in lockstep, where
    every rack has its part from the beginning.
    """
    units = log.units
    if units is None or units.free or units.ended:
        return frozenset()
    if require(log.policy, "units are in the first record").lockstep:
        return frozenset()
    demand = _demand(log, units, reports, live)
    holders = {member.rack for member in demand.awaited} & live
    if not holders or not all(rack in reports and reports[rack].leaving for rack in holders):
        return frozenset()
    return frozenset(member.rack for member in demand.empty)


@dataclass(frozen=True, slots=True)
class _Demand:
    """What the racks of the roster want of the ledger."""

    asks: Mapping[Member, UnitsAsk]
    """New ones, of live racks."""
    empty: frozenset[Member]
    """Those that have taken all that they got."""
    back: tuple[Member, ...]
    """Racks that have stopped, with units that are not done."""
    evenly: bool
    """Whether the first record of lockstep is due."""
    awaited: frozenset[Member]
    """Racks without which no record is due: those that have not asked yet (`evenly`), or else those
    that still hold units."""


def _demand(
    log: LogState, units: Units, reports: Mapping[int, Report], live: frozenset[int]
) -> _Demand:
    books = {book.member: book for book in units.books}
    trains, asks, back = set[Member](), dict[Member, UnitsAsk](), list[Member]()
    for rack, seat in sorted(log.seats.items()):
        report, book = reports.get(rack), books[seat.member]
        if report is not None and report.leaving and report.idle:
            back += [seat.member] if book.given > book.done else []
            continue
        trains.add(seat.member)
        if report is not None and rack in live and _is_new(report.units, book):
            asks[seat.member] = require(report.units, "it has asked")
    evenly = require(log.policy, "units are in the first record").lockstep and not units.fresh
    empty = frozenset(member for member, ask in asks.items() if ask.empty)
    holding = {member for member in trains if books[member].given > books[member].done}
    awaited = trains - asks.keys() if evenly else holding - empty
    return _Demand(asks, empty, tuple(back), evenly, frozenset(awaited))


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
