"""What the ranks of a rack add up to, as their leader knows it.

A rack has offered, holds or leaves once all its ranks have said so. What they add up to is
therefore made anew when the first rank says something, and when the last one does; the reports in
between are counted, so that a leader's work per report does not grow with its ranks.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from msgspec.structs import replace

from mend.consensus.records import BAD_MAX, Digests, Offer, checksums_of
from mend.coordination.donors import copies_of_rack
from mend.coordination.marks import cut_of_rack
from mend.coordination.messages import (
    Bad,
    Cut,
    Declined,
    Held,
    OfferId,
    Pace,
    Part,
    RankReport,
    Sliced,
    StateCopy,
)
from mend.coordination.slow import pace_of_rack, verdict_of
from mend.types import Member


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Of the newest report of every rank. `complete`: all have said something; what needs all of
    them is empty before."""

    complete: bool
    versions: tuple[int, ...]
    """Per fragment what all ranks hold; -1: nothing yet."""
    offers: tuple[Offer, ...]
    """Of the captures that all ranks have encoded."""
    declined: tuple[tuple[int, Declined], ...]
    """(seq, why) of the captures that give no offer."""
    coming: tuple[int, ...]
    """Fragments with a part that is not encoded yet; all that is encoded is offered or declined."""
    got: tuple[OfferId, ...]
    held: tuple[Held, ...]
    leaving: bool
    hurry: bool
    idle: bool
    bad: tuple[Bad, ...]
    cut: Cut | None
    wants: bool
    copies: tuple[StateCopy, ...]
    slices: tuple[Sliced, ...]


def aggregate(
    member: Member, ranks: list[RankReport], configured: int, fragments: int
) -> Aggregate:
    """Of the ranks of `member`. `ranks`: their newest reports, in rank order."""
    complete = len(ranks) == configured
    needed = ranks if complete else []
    outcomes = [_outcome(member, parts) for parts in _captures(needed)]
    versions = tuple(map(min, zip(*(rank.versions for rank in needed), strict=True)))
    return Aggregate(
        complete=complete,
        versions=versions or (-1,) * fragments,
        offers=tuple(found for _, found in outcomes if isinstance(found, Offer)),
        declined=tuple((seq, found) for seq, found in outcomes if isinstance(found, Declined)),
        coming=_coming(ranks),
        got=_in_all([rank.got for rank in needed]),
        held=_held(needed),
        leaving=complete and all(rank.leaving for rank in ranks),
        hurry=complete and any(rank.hurry for rank in ranks),
        idle=complete and all(rank.idle for rank in ranks),
        bad=_bad(ranks),
        cut=cut_of_rack(needed) if complete else None,
        wants=complete and all(rank.wants for rank in ranks),
        copies=copies_of_rack(member, needed),
        slices=_slices(needed),
    )


@dataclass
class RankReports:
    """The newest report of every rank. `news` counts how often their aggregate may have changed."""

    member: Member
    configured: int
    fragments: int
    newest: dict[int, RankReport] = field(default_factory=dict)
    heard_ns: dict[int, int] = field(default_factory=dict)
    news: int = 0
    said: dict[Hashable, int] = field(default_factory=dict)
    """How many ranks say what."""
    _at: int = -1
    _aggregate: Aggregate | None = None
    _paces: tuple[Pace, Pace] | None = None
    _step_ns: int | None = None

    def take(self, rank: int, report: RankReport, now_ns: int) -> None:
        """Reports may come twice or late: the highest serial counts."""
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
            # Where a partial is missing says something, too.
            if known is None or report.partials or _is_restated(known, report):
                self.news += 1

    def _count(self, before: set[Hashable], after: set[Hashable]) -> None:
        """Notice what the first or the last rank says, or takes back."""
        turns, changed = (0, self.configured), False
        for fact in before ^ after:
            count = self.said.get(fact, 0)
            now = count + (1 if fact in after else -1)
            changed = changed or count in turns or now in turns
            if now:
                self.said[fact] = now
            else:
                del self.said[fact]
        self.news += changed

    def ordered(self) -> list[RankReport]:
        """In rank order."""
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
        """Of the rack, and what of it is news."""
        if self._paces is None:
            pace = pace_of_rack([report.pace for report in self.newest.values()])
            self._paces = pace, verdict_of(pace)
        return self._paces

    @property
    def step(self) -> int:
        """Of the lowest rank that was heard."""
        return self.newest[min(self.newest)].step if self.newest else 0

    @property
    def step_ns(self) -> int:
        """Of the slowest rank."""
        if self._step_ns is None:
            self._step_ns = max((report.step_ns for report in self.newest.values()), default=0)
        return self._step_ns

    def all_heard_since(self, since_ns: int) -> bool:
        """Whether every rank that was heard at all was heard after `since_ns`."""
        return min(self.heard_ns.values(), default=since_ns + 1) > since_ns


def _lasting(report: RankReport) -> RankReport:
    """Without what each report says anew."""
    return replace(report, serial=0, step=0, step_ns=0, decided=0, heard=0, pace=Pace())


def _facts(report: RankReport) -> set[Hashable]:
    """What a rank says, such that an aggregate can change only when the first or the last of all
    ranks says a fact or takes it back."""
    found: set[Hashable] = {*report.got, *report.bad, report.cut}
    for each in report.slices:
        of = (each.fragment, each.version, each.attempt)
        found |= {("merged", of, count) for count in range(each.merged + 1)}
        found |= {("failed", of)} if each.failed else set()
    for part in report.parts:
        key = (part.fragment, part.seq)
        found |= {
            ("captured", key),
            ("encoded", key) if part.checksum else ("declined", key, part.declined),
            ("applied", key, part.applied),
        }
    found |= {("held", held.fragment, held.version, held.attempt) for held in report.held}
    found |= {("version", *each) for each in enumerate(report.versions)}
    found |= {(name, getattr(report, name)) for name in ("leaving", "hurry", "idle", "wants")}
    return found


def _is_restated(known: RankReport, report: RankReport) -> bool:
    """Whether a rank says something else of what it had said: a checksum or a digest is its own."""
    digests = {(h.fragment, h.version, h.attempt): h.digests for h in known.held}
    parts = {(part.fragment, part.seq): part for part in known.parts if part.checksum}
    return (
        bool(known.partials)
        or known.copies != report.copies
        or any(
            digests.get((held.fragment, held.version, held.attempt), held.digests) != held.digests
            for held in report.held
        )
        or any(
            replace(parts.get((part.fragment, part.seq), part), applied=part.applied) != part
            for part in report.parts
        )
    )


def _captures(ranks: list[RankReport]) -> list[list[Part]]:
    """Those that all ranks have made: the part of each, in rank order."""
    found = [{(part.fragment, part.seq): part for part in rank.parts} for rank in ranks]
    return [
        [parts[key] for parts in found]
        for key in (found[0] if found else {})
        if all(key in parts for parts in found)
    ]


def _outcome(member: Member, parts: list[Part]) -> tuple[int, Offer | Declined | None]:
    """(seq, what comes of a capture); None: a rank encodes it still. Ranks that did not encode yet
    may decline."""
    head, tokens = parts[0], sum(part.tokens for part in parts)
    reason = next((part.declined for part in parts if part.declined), "")
    if not reason and tokens == 0:
        reason = "no tokens were trained"
    if reason:
        return head.seq, Declined(head.fragment, head.applied, reason)
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
    )


def _coming(ranks: list[RankReport]) -> tuple[int, ...]:
    parts = [part for rank in ranks for part in rank.parts]
    return tuple(sorted({p.fragment for p in parts if not p.checksum and not p.declined}))


def _held(ranks: list[RankReport]) -> tuple[Held, ...]:
    found: list[dict[tuple[int, int, int], Digests]] = [
        {(h.fragment, h.version, h.attempt): h.digests for h in rank.held} for rank in ranks
    ]
    common = [key for key in (found[0] if found else {}) if all(key in held for held in found)]
    return tuple(Held(*key, digests=tuple(held[key][0] for held in found)) for key in common)


def _slices(ranks: list[RankReport]) -> tuple[Sliced, ...]:
    """What all ranks have merged, and what one has failed at."""
    said = dict[tuple[int, int, int], list[Sliced]]()
    for sliced in (sliced for rank in ranks for sliced in rank.slices):
        said.setdefault((sliced.fragment, sliced.version, sliced.attempt), []).append(sliced)
    found = []
    for key, each in sorted(said.items()):
        merged = min(s.merged for s in each) if len(each) == len(ranks) else 0
        failed = any(s.failed for s in each)
        found += [Sliced(*key, merged, failed)] if merged or failed else []
    return tuple(found)


def _bad(ranks: list[RankReport]) -> tuple[Bad, ...]:
    """What any rank has found; of several that found the same, the first speaks."""
    found = {bad.offer: bad for rank in reversed(ranks) for bad in rank.bad}
    ordered = sorted(found, key=lambda offer: (offer.member, offer.fragment, offer.seq))
    return tuple(found[offer] for offer in ordered)[:BAD_MAX]


def _in_all(lists: list[tuple[OfferId, ...]]) -> tuple[OfferId, ...]:
    if not lists:
        return ()
    common = set(lists[0]).intersection(*lists[1:])
    return tuple(offer for offer in lists[0] if offer in common)
