"""Aggregates the reports of the ranks of one rack, for their leader.

A fact holds for a rack (it has offered, holds, leaves) once all its ranks report it. The aggregate
is recomputed when the first and when the last rank reports a fact. Reports in between are only
counted, so a leader's work per report does not grow with its ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from msgspec.structs import replace

from mend.consensus.records import BAD_MAX, TEXT_MAX, Offer, checksums_of
from mend.coordination.checkpoints import barrier_of_rack
from mend.coordination.donors import copies_of_rack
from mend.coordination.messages import (
    Bad,
    BarrierState,
    CapturePart,
    Declined,
    Held,
    OfferId,
    Pace,
    Pulled,
    RankReport,
    Report,
    Sliced,
    StateCopy,
    UnitsAsk,
)
from mend.coordination.pulls import of_ranks
from mend.coordination.slow import pace_of_rack, verdict_of
from mend.types import Member

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The newest reports of all ranks, combined. `complete`: every rank has reported; before,
    fields that need all ranks are empty. What has the name of a field of `Report` goes into it."""

    complete: bool
    versions: tuple[int, ...]
    """Per fragment the newest version that all ranks hold; -1: none yet."""
    offers: tuple[Offer, ...]
    """One offer per capture that all ranks have encoded."""
    declined: tuple[tuple[int, Declined], ...]
    """(seq, reason) of the captures that gave no offer."""
    coming: tuple[int, ...]
    """Fragments with a part that is not encoded yet. An encoded part is offered or declined."""
    got: tuple[OfferId, ...]
    held: tuple[Held, ...]
    leaving: bool
    hurry: bool
    idle: bool
    bad: tuple[Bad, ...]
    barrier: BarrierState | None
    wants: bool
    copies: tuple[StateCopy, ...]
    slices: tuple[Sliced, ...]
    units: UnitsAsk | None
    unequal: str
    """How the ranks have taken unequal numbers of rows of the data ledger; or empty."""

    def reported(self) -> dict[str, Any]:
        """The fields that the report of the rack has, too."""
        return {name: getattr(self, name) for name in _REPORTED}


_REPORTED = tuple(
    field.name
    for field in fields(Aggregate)
    if field.name in Report.__struct_fields__ and field.name != "declined"  # the leader keeps these
)


def aggregate(
    member: Member, ranks: list[RankReport], configured: int, fragments: int
) -> Aggregate:
    """Aggregate `ranks`: the newest reports of the ranks of `member`, in rank order."""
    complete = len(ranks) == configured
    needed = ranks if complete else []
    captures = _captures(needed)
    outcomes = [_outcome(member, parts) for parts in captures]
    versions = tuple(map(min, zip(*(rank.versions for rank in needed), strict=True)))
    return Aggregate(
        complete=complete,
        versions=versions or (-1,) * fragments,
        offers=tuple(outcome for _, outcome in outcomes if isinstance(outcome, Offer)),
        declined=tuple((seq, each) for seq, each in outcomes if isinstance(each, Declined)),
        coming=_coming(ranks),
        got=_in_all([rank.got for rank in needed]),
        held=_held(needed),
        leaving=complete and all(rank.leaving for rank in ranks),
        hurry=complete and any(rank.hurry for rank in ranks),
        idle=complete and all(rank.idle for rank in ranks),
        bad=_bad(ranks),
        barrier=barrier_of_rack(needed) if complete else None,
        wants=complete and all(rank.wants for rank in ranks),
        copies=copies_of_rack(member, needed),
        slices=_slices(needed),
        units=_ask(needed),
        unequal=next(filter(None, map(_unequal, captures)), ""),
    )


@dataclass
class RankReports:
    """The newest report of every rank. `news` counts changes after which their aggregate may
    differ."""

    member: Member
    configured: int
    fragments: int
    newest: dict[int, RankReport] = field(default_factory=dict)
    heard_ns: dict[int, int] = field(default_factory=dict)
    news: int = 0
    reporting: dict[Hashable, int] = field(default_factory=dict)
    """Number of ranks that report each fact."""
    _at: int = -1
    _aggregate: Aggregate | None = None
    _paces: tuple[Pace, Pace] | None = None
    _step_ns: int | None = None

    def take(self, rank: int, report: RankReport, now_ns: int) -> None:
        """Take a report. Reports may come twice or late: the highest serial counts."""
        self.heard_ns[rank] = now_ns
        known = self.newest.get(rank)
        if known is not None and report.serial <= known.serial:
            return
        self.newest[rank] = report
        if known is None or known.pace != report.pace:
            self._paces = None
        if known is None or known.step_ns != report.step_ns:
            self._step_ns = None
        if known is None or _lasting(known) != _lasting(report):
            self._count(set() if known is None else _facts(known), _facts(report))
            # A missing partial sum is news, too.
            if known is None or report.partials or _is_restated(known, report):
                self.news += 1

    def discount(self, slept_ns: int) -> None:
        """The leader's process slept for `slept_ns` and could hear nothing meanwhile."""
        self.heard_ns = {rank: heard_ns + slept_ns for rank, heard_ns in self.heard_ns.items()}

    def _count(self, before: set[Hashable], after: set[Hashable]) -> None:
        """Detect facts that the first or the last rank reports or withdraws."""
        turns, changed = (0, self.configured), False
        for fact in before ^ after:
            count = self.reporting.get(fact, 0)
            now = count + (1 if fact in after else -1)
            changed = changed or count in turns or now in turns
            if now:
                self.reporting[fact] = now
            else:
                del self.reporting[fact]
        self.news += changed

    def ordered(self) -> list[RankReport]:
        """The reports in rank order."""
        return [self.newest[rank] for rank in sorted(self.newest)]

    @property
    def aggregate(self) -> Aggregate:
        if self._aggregate is None or self._at != self.news:
            self._aggregate = aggregate(
                self.member, self.ordered(), self.configured, self.fragments
            )
            self._at = self.news
        return self._aggregate

    def paces(self) -> tuple[Pace, Pace]:
        """The pace of the rack, and the part of it that is news."""
        if self._paces is None:
            pace = pace_of_rack([report.pace for report in self.newest.values()])
            self._paces = pace, verdict_of(pace)
        return self._paces

    def pulls(self) -> tuple[Pulled, ...]:
        """Progress of the pulls of all ranks."""
        return of_ranks(report.pulls for report in self.newest.values())

    @property
    def step(self) -> int:
        """The step of the lowest rank that has reported."""
        return self.newest[min(self.newest)].step if self.newest else 0

    @property
    def step_ns(self) -> int:
        """Time per step of the slowest rank."""
        if self._step_ns is None:
            self._step_ns = max((report.step_ns for report in self.newest.values()), default=0)
        return self._step_ns

    def all_heard_since(self, since_ns: int) -> bool:
        """Whether every rank that has ever reported has reported after `since_ns`."""
        return min(self.heard_ns.values(), default=since_ns + 1) > since_ns


def _lasting(report: RankReport) -> RankReport:
    """The report without the fields that differ in every report."""
    return replace(report, serial=0, step=0, step_ns=0, decided=0, heard=0, pace=Pace(), pulls=())


def _facts(report: RankReport) -> set[Hashable]:
    """The facts that a rank reports. The aggregate can change only when the first or the last rank
    reports or withdraws a fact."""
    facts: set[Hashable] = {*report.got, *report.bad, report.barrier, ("units", report.units)}
    for sliced in report.slices:
        facts |= {("merged", sliced.key, count) for count in range(sliced.merged + 1)}
        facts |= {("failed", sliced.key)} if sliced.failed else set()
    for part in report.parts:
        key = (part.fragment, part.seq)
        facts |= {
            ("captured", key),
            ("encoded", key) if part.checksum else ("declined", key, part.declined),
            ("applied", key, part.applied),
        }
    facts |= {("held", held.key) for held in report.held}
    facts |= {("version", *pair) for pair in enumerate(report.versions)}
    facts |= {(name, getattr(report, name)) for name in ("leaving", "hurry", "idle", "wants")}
    return facts


def _is_restated(known: RankReport, report: RankReport) -> bool:
    """Whether a rank changes what it has reported: checksums and digests differ between ranks."""
    digests = {held.key: held.digests for held in known.held}
    parts = {(part.fragment, part.seq): part for part in known.parts if part.checksum}
    return (
        bool(known.partials)
        or known.copies != report.copies
        or any(digests.get(held.key, held.digests) != held.digests for held in report.held)
        or any(
            replace(parts.get((part.fragment, part.seq), part), applied=part.applied) != part
            for part in report.parts
        )
    )


def _captures(ranks: list[RankReport]) -> list[list[CapturePart]]:
    """The captures that all ranks have made: per capture its parts, in rank order."""
    by_key = [{(part.fragment, part.seq): part for part in rank.parts} for rank in ranks]
    return [[parts[key] for parts in by_key] for key in _in_all(by_key)]


def _outcome(member: Member, parts: list[CapturePart]) -> tuple[int, Offer | Declined | None]:
    """(seq, outcome) of a capture. None: some rank still encodes its part, and may still
    decline."""
    head, tokens = parts[0], sum(part.tokens for part in parts)
    reason = next((part.declined for part in parts if part.declined), "")
    reason = reason or ("" if tokens else "no tokens were trained")
    reason = reason or _unequal(parts)
    if reason:
        return head.seq, Declined(head.fragment, head.applied, reason[:TEXT_MAX])
    if any(not part.checksum for part in parts):
        return head.seq, None
    return head.seq, Offer(
        member=member,
        fragment=head.fragment,
        seq=head.seq,
        base=head.base,
        capture_step=head.capture_step,
        tokens=tokens,
        steps=head.steps,
        checksums=checksums_of(part.checksum for part in parts),
        applied=min(part.applied for part in parts),
        norm=max(part.norm for part in parts),
        sizes=sizes if any(sizes := tuple(part.size for part in parts)) else (),
        closing=head.closing,
        units=head.units,
        along=sum(part.along for part in parts),
        against=sum(part.against for part in parts),
    )


def _unequal(parts: list[CapturePart]) -> str:
    """Why the rack cannot go on, where its ranks have not taken the same units; or empty."""
    if len({part.units for part in parts}) == 1:
        return ""
    counts = " and ".join(map(str, sorted({part.units for part in parts})))
    return (
        f"its ranks have taken {counts} rows of the data ledger up to step {parts[0].capture_step}:"
        " give all ranks of a rack batches of the same size, and count every row on each"
    )


def _ask(ranks: list[RankReport]) -> UnitsAsk | None:
    """The newest ask of all ranks. One that has taken all units asks for its rack: the others may
    wait for it in a collective."""
    asks = [rank.units for rank in ranks if rank.units is not None]
    if not asks:
        return None
    given = max(ask.given for ask in asks)
    newest = [ask for ask in asks if ask.given == given]
    return UnitsAsk(given, max(a.size for a in newest), any(a.empty for a in newest))


def _coming(ranks: list[RankReport]) -> tuple[int, ...]:
    parts = [part for rank in ranks for part in rank.parts]
    return tuple(sorted({p.fragment for p in parts if not p.checksum and not p.declined}))


def _held(ranks: list[RankReport]) -> tuple[Held, ...]:
    digests = [{held.key: held.digests[0] for held in rank.held} for rank in ranks]
    return tuple(Held(*key, tuple(each[key] for each in digests)) for key in _in_all(digests))


def _slices(ranks: list[RankReport]) -> tuple[Sliced, ...]:
    """The slices that all ranks have merged, and those at which some rank has failed."""
    by_key = [{sliced.key: sliced for sliced in rank.slices} for rank in ranks]
    slices = []
    for key in sorted({key for each in by_key for key in each}):
        of_ranks = [each[key] for each in by_key if key in each]
        merged = min(s.merged for s in of_ranks) if len(of_ranks) == len(ranks) else 0
        failed = any(s.failed for s in of_ranks)
        slices += [Sliced(*key, merged, failed)] if merged or failed else []
    return tuple(slices)


def _bad(ranks: list[RankReport]) -> tuple[Bad, ...]:
    """Offers that some rank refuses, with the reason of the lowest such rank."""
    by_offer = {bad.offer: bad for rank in reversed(ranks) for bad in rank.bad}
    ordered = sorted(by_offer, key=lambda offer: (offer.member, offer.fragment, offer.seq))
    return tuple(by_offer[offer] for offer in ordered)[:BAD_MAX]


def _in_all(lists: Sequence[Collection[Key]]) -> tuple[Key, ...]:
    """What all of them contain, in the order of the first."""
    if not lists:
        return ()
    common = set(lists[0]).intersection(*lists[1:])
    return tuple(key for key in lists[0] if key in common)
