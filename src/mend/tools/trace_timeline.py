"""Facts and times of each round, read from tapes. Pure.

Times are those of the coordinator where its tape is among them, moved to the time of day by the
clocks in the header of each tape.
"""

from __future__ import annotations

import bisect
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mend.consensus.records import Commit, Drop, Genesis, Lineage, Offer, Record, Roster
from mend.coordination import events as ev
from mend.coordination.machines import COORDINATOR, RANK_MACHINE
from mend.coordination.messages import Orders, RankOrders, Reason, Report
from mend.events.base import LoggedEvent
from mend.events.kinds import (
    LinkSlow,
    LinkSlowOver,
    RackSlow,
    RackSlowCause,
    RackSlowOver,
    RoundDecided,
)
from mend.trace.format import Entry, Gap, Header

RoundKey = tuple[int, int]
"""A round: its fragment, and the version that it made."""

Span = tuple[int, int]

SLOW_EVENTS = (RackSlow, RackSlowCause, RackSlowOver, LinkSlow, LinkSlowOver)
"""Events of a rank about itself that the timeline shows for a whole run."""


@dataclass
class OfferFacts:
    """`announced_ns`: when the coordinator first heard of it. `holders`: rack -> since when."""

    offer: Offer
    announced_ns: int
    holders: dict[int, int] = field(default_factory=dict)


@dataclass
class RankTimes:
    """One rank's part in a round. `in_mend_ns`: its training thread, from the end of the step until
    the version was applied; not known of the last step."""

    stepped_ns: int | None = None
    """End of the step after which it captured; unknown after the last step."""
    captured_ns: int | None = None
    encoded_ns: int | None = None
    pulls: dict[int, Span] = field(default_factory=dict)
    pulled_bytes: int = 0
    merge: Span | None = None
    learnt_ns: int | None = None
    """Time at which the rank learned that it is decided."""
    applied_ns: int | None = None
    in_mend_ns: int | None = None


@dataclass(eq=False)
class RoundFacts:
    fragment: int
    version: int
    opened: tuple[int, int] | None = None
    """(time, rack that opened it)."""
    whys: list[tuple[int, Reason]] = field(default_factory=list)
    """(time, why it did not go on), whenever that changed."""
    proposals: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    """(time, attempt, racks)."""
    held: dict[int, int] = field(default_factory=dict)
    declined: dict[int, str] = field(default_factory=dict)
    written_ns: int | None = None
    decided_ns: int | None = None
    commit: Commit | None = None
    index: int = 0
    """Index of its record in the log."""
    ranks: dict[tuple[int, int], RankTimes] = field(default_factory=lambda: defaultdict(RankTimes))

    @property
    def closed_ns(self) -> int | None:
        """Time at which its members were fixed for the last time."""
        return self.proposals[-1][0] if self.proposals else self.written_ns


@dataclass(eq=False)
class Story:
    rounds: dict[RoundKey, RoundFacts] = field(default_factory=dict)
    offers: dict[tuple[int, int, int], OfferFacts] = field(default_factory=dict)
    """(rack, fragment, seq) -> its facts."""
    rosters: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Index in the log, and who is a member from there on."""
    live: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """(time, racks that counted as live), whenever that changed."""
    reports_ns: dict[int, array[int]] = field(
        default_factory=lambda: defaultdict(lambda: array("q"))
    )
    """Rack -> the times at which it was heard."""
    notes: list[tuple[int, LoggedEvent]] = field(default_factory=list)
    """Notes of coordinators besides decisions."""
    payload_bytes: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    coordinated: bool = False
    """The tape of a process that coordinated is among them."""

    drops: dict[int, Drop] = field(default_factory=dict)
    """Index in the log -> offers that ended without a commit."""
    decided: list[RoundFacts] = field(default_factory=list)
    """Decided rounds in the order of the log."""

    def round(self, fragment: int, version: int) -> RoundFacts:
        return self.rounds.setdefault((fragment, version), RoundFacts(fragment, version))

    def racks(self, index: int) -> tuple[int, ...]:
        """The members when record `index` was written; nobody knows: all that offered anything."""
        place = bisect.bisect_left(self.rosters, (index, ()))
        if place:
            return self.rosters[place - 1][1]
        return tuple(sorted({rack for rack, _, _ in self.offers}))

    def last_heard_ns(self, rack: int, at_ns: int) -> int | None:
        """Return when a rack was heard for the last time before; None: not known."""
        times = self.reports_ns[rack]
        place = bisect.bisect_right(times, at_ns)
        return times[place - 1] if place else None

    def heard(self, at_ns: int) -> tuple[int, ...] | None:
        """Return the racks that counted as live then; None: not known."""
        place = bisect.bisect_right(self.live, (at_ns, (1 << 20,)))
        return self.live[place - 1][1] if place else None


class TapeSource(Protocol):
    """Such as a `RecordedTape`; `entries` may be called again."""

    @property
    def header(self) -> Header: ...

    def entries(self) -> Iterable[Entry | Gap]: ...


def newest_job(
    tapes: Sequence[TapeSource],
) -> tuple[int, list[tuple[Header, Iterable[Entry | Gap]]]]:
    """Return how many jobs these tapes are of, and the entries of the one that was founded last.
    Several may have written into one folder, and their rounds have the same numbers. Raises
    TapeError."""
    founded = [_founded(tape) for tape in tapes]
    jobs: dict[Genesis, int] = {}
    for mine in founded:
        for genesis, at_ns in mine.items():
            jobs[genesis] = _first(jobs.get(genesis), at_ns)
    if len(jobs) < 2:
        return len(jobs), [(tape.header, tape.entries()) for tape in tapes]
    newest = max(jobs, key=jobs.__getitem__)
    # From where the tape itself has it on: clocks of machines differ.
    begun = [mine.get(newest, jobs[newest]) for mine in founded]
    placed = [(t.header, _since(t, at_ns)) for t, at_ns in zip(tapes, begun, strict=True)]
    return len(jobs), placed


def _founded(tape: TapeSource) -> dict[Genesis, int]:
    """The first records of logs that the tape heard of or sent, with the time of day."""
    found: dict[Genesis, int] = {}
    for entry in tape.entries():
        if isinstance(entry, Gap):
            continue
        bodies = [
            e.body for e in (entry.event, *entry.effects) if isinstance(e, ev.Heard | ev.Send)
        ]
        for body in bodies:
            first = body.records[:1] if isinstance(body, Orders | RankOrders) else ()
            for genesis in (each for each in first if isinstance(each, Genesis)):
                found.setdefault(genesis, _time_of_day(tape, entry))
    return found


def _since(tape: TapeSource, begin_ns: int) -> Iterable[Entry | Gap]:
    return (e for e in tape.entries() if isinstance(e, Gap) or _time_of_day(tape, e) >= begin_ns)


def _time_of_day(tape: TapeSource, entry: Entry) -> int:
    return entry.now_ns + tape.header.wall_ns - tape.header.mono_ns


def story_of(tapes: Iterable[tuple[Header, Iterable[Entry | Gap]]]) -> Story:
    """Make the story of the tapes of one job. Raises TapeError as the entries do."""
    story = Story()
    for header, entries in tapes:
        offset_ns = header.wall_ns - header.mono_ns
        coordinator, rank_machine = _CoordinatorReader(story), _RankReader(story, header)
        story.payload_bytes[(header.rack, header.rank)] = header.payload_bytes
        for entry in entries:
            if isinstance(entry, Gap):
                continue
            if entry.machine == COORDINATOR:
                coordinator.take(entry, entry.now_ns + offset_ns)
            elif entry.machine == RANK_MACHINE:
                rank_machine.take(entry, entry.now_ns + offset_ns)
        rank_machine.end()
    done = [made for made in story.rounds.values() if made.commit is not None]
    story.decided = sorted(done, key=lambda made: made.index)
    story.rosters = sorted(set(story.rosters))
    story.live.sort()
    story.reports_ns.update({rack: array("q", sorted(t)) for rack, t in story.reports_ns.items()})
    story.notes.sort(key=lambda note: note[0])
    return story


def _first(old_ns: int | None, new_ns: int) -> int:
    return new_ns if old_ns is None else min(old_ns, new_ns)


def _records(story: Story, prev: int, records: tuple[Record, ...], at_ns: int) -> None:
    for index, record in enumerate(records, start=prev + 1):
        if isinstance(record, Commit):
            made = story.round(record.fragment, record.version)
            made.commit, made.index = record, index
            made.written_ns = _first(made.written_ns, at_ns)
        elif isinstance(record, Drop):
            story.drops[index] = record
        elif isinstance(record, Genesis):
            story.rosters.append((index, tuple(seat.member.rack for seat in record.roster)))
        elif isinstance(record, Roster | Lineage):
            story.rosters.append((index, tuple(seat.member.rack for seat in record.members)))


class _CoordinatorReader:
    """Reads what a coordinator heard and said."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._versions: dict[int, int] = defaultdict(int)
        self._whys: dict[int, Reason] = {}
        self._live: tuple[int, ...] | None = None

    def take(self, entry: Entry, at_ns: int) -> None:
        event = entry.event
        if isinstance(event, ev.Heard) and isinstance(event.body, Report):
            self._report(event.peer.rack, event.body, at_ns)
        whys: tuple[Reason, ...] | None = None
        for effect in entry.effects:
            if isinstance(effect, ev.Send) and isinstance(effect.body, Orders):
                self._story.coordinated = True
                whys = effect.body.why
                self._orders(effect.body, at_ns)
            elif isinstance(effect, ev.Note) and isinstance(effect.event, RoundDecided):
                self._decided(effect.event, at_ns)
            elif isinstance(effect, ev.Note):
                self._story.notes.append((at_ns, effect.event))
        if whys is not None:
            self._why(whys, at_ns)

    def _report(self, rack: int, report: Report, at_ns: int) -> None:
        story = self._story
        story.reports_ns[rack].append(at_ns)
        for offer in report.offers:
            key = (rack, offer.fragment, offer.seq)
            facts = story.offers.setdefault(key, OfferFacts(offer, at_ns))
            facts.holders.setdefault(rack, at_ns)
            self._open(offer.fragment, offer.applied, rack, at_ns)
        for got in report.got:
            known = story.offers.get((got.member.rack, got.fragment, got.seq))
            if known is not None:
                known.holders.setdefault(rack, at_ns)
        for declined in report.declined:
            made = story.round(declined.fragment, declined.applied + 1)
            made.declined.setdefault(rack, declined.reason)
            self._open(declined.fragment, declined.applied, rack, at_ns)
        for held in report.held:
            story.round(held.fragment, held.version).held.setdefault(rack, at_ns)

    def _open(self, fragment: int, applied: int, rack: int, at_ns: int) -> None:
        made = self._story.round(fragment, applied + 1)
        made.opened = made.opened or (at_ns, rack)

    def _orders(self, orders: Orders, at_ns: int) -> None:
        story = self._story
        _records(story, orders.prev, orders.records, at_ns)
        for proposal in orders.proposals:
            made = story.round(proposal.fragment, proposal.version)
            if all(attempt != proposal.attempt for _, attempt, _ in made.proposals):
                racks = tuple(offer.member.rack for offer in proposal.members)
                made.proposals.append((at_ns, proposal.attempt, racks))
        if orders.live != self._live:
            self._live = orders.live
            story.live.append((at_ns, orders.live))

    def _decided(self, decided: RoundDecided, at_ns: int) -> None:
        fragment, version = decided.fragment, decided.version
        made = self._story.round(fragment, version)
        made.decided_ns = _first(made.decided_ns, at_ns)
        self._versions[fragment] = version
        self._whys.pop(fragment, None)

    def _why(self, whys: tuple[Reason, ...], at_ns: int) -> None:
        """Take the reasons of rounds; others are of the start."""
        for why in whys:
            if why.fragment >= 0 and self._whys.get(why.fragment) != why:
                self._whys[why.fragment] = why
                made = self._story.round(why.fragment, self._versions[why.fragment] + 1)
                made.whys.append((at_ns, why))


class _RankReader:
    """Reads what one rank did."""

    def __init__(self, story: Story, header: Header) -> None:
        self._story, self._me = story, (header.rack, header.rank)
        self._bytes = header.payload_bytes
        self._stepped_ns: int | None = None
        self._step = 0
        """The newest that the tape tells, which ended at `_stepped_ns`."""
        self._pulling: dict[tuple[int, int, int], int] = {}
        self._pulled: dict[tuple[int, int, int], Span] = {}
        self._slices: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        """(rack, fragment, version) -> from when to when slices were pulled from it, and bytes."""
        self._merging: dict[RoundKey, int] = {}
        self._captured: dict[tuple[int, int], tuple[int | None, ...]] = {}
        self._steps: dict[tuple[int, int], int] = {}
        """(fragment, seq) -> step of the capture."""
        self._behind: list[RankTimes] = []
        """Versions that were applied after the newest step, or captured there and merged."""

    def end(self) -> None:
        """The tape is at its end: what came last may be of who left, long after its step."""
        for facts in self._behind:
            facts.in_mend_ns = facts.stepped_ns = None

    def take(self, entry: Entry, at_ns: int) -> None:  # noqa: C901 - one flat table
        for effect in entry.effects:
            match effect:
                case ev.Note(noted) if isinstance(noted, SLOW_EVENTS):
                    self._story.notes.append((at_ns, noted))
                case ev.Fetch(offer):
                    name = (offer.member.rack, offer.fragment, offer.seq)
                    self._pulling.setdefault(name, at_ns)
                case ev.FetchSlice(fragment, version, member=member):
                    self._slices.setdefault((member.rack, fragment, version), (at_ns, at_ns, 0))
                case ev.Merge(fragment, version):
                    self._merging[(fragment, version)] = at_ns
                case ev.RecordCommitted(Commit() as commit):
                    self._commit(commit, at_ns)
        match entry.event:
            case ev.Heard(_, _, RankOrders() as orders):
                _records(self._story, orders.prev, orders.records, at_ns)
            case ev.StepReached(step):
                self._step, self._stepped_ns = step, at_ns
                self._behind.clear()
            case ev.Captured(fragment, seq, step=step):
                stepped_ns = self._stepped_ns if step == self._step else None
                self._captured[(fragment, seq)] = (stepped_ns, at_ns)
                self._steps[(fragment, seq)] = step
            case ev.Encoded(fragment, seq):
                if (fragment, seq) in self._captured:
                    self._captured[(fragment, seq)] += (at_ns,)
            case ev.Fetched(member, fragment, seq, error):
                name = (member.rack, fragment, seq)
                if not error and name in self._pulling:
                    self._pulled[name] = (self._pulling.pop(name), at_ns)
            case ev.SliceFetched(fragment, version, _, rack, error="", size=size):
                key = (rack, fragment, version)  # a tape may begin after the pull
                first_ns, _, before = self._slices.get(key, (at_ns, at_ns, 0))
                self._slices[key] = (first_ns, at_ns, before + size)
            case ev.Merged(fragment, version):
                if (begun_ns := self._merging.pop((fragment, version), None)) is not None:
                    self._facts(fragment, version).merge = (begun_ns, at_ns)
            case ev.Applied(fragment, version):
                facts = self._facts(fragment, version)
                facts.applied_ns = at_ns
                if self._stepped_ns is not None:
                    facts.in_mend_ns = at_ns - self._stepped_ns
                self._behind.append(facts)

    def _facts(self, fragment: int, version: int) -> RankTimes:
        return self._story.round(fragment, version).ranks[self._me]

    def _commit(self, commit: Commit, at_ns: int) -> None:
        made = self._story.round(commit.fragment, commit.version)
        made.commit = commit
        if not self._story.coordinated:
            made.decided_ns = _first(made.decided_ns, at_ns)
        facts = self._facts(commit.fragment, commit.version)
        facts.learnt_ns = at_ns
        for share in commit.members:
            rack = share.member.rack
            if (
                sliced := self._slices.pop((rack, commit.fragment, commit.version), None)
            ) is not None:
                facts.pulls[rack] = sliced[:2]
                facts.pulled_bytes += sliced[2]
            pulled = self._pulled.pop((rack, commit.fragment, share.seq), None)
            if pulled is not None:
                facts.pulls[rack] = pulled
                if commit.fragment < len(self._bytes):
                    facts.pulled_bytes += self._bytes[commit.fragment]
            if rack == self._me[0]:
                times = self._captured.pop((commit.fragment, share.seq), ())
                if self._steps.pop((commit.fragment, share.seq), -1) == self._step:
                    self._behind.append(facts)
                known = (*times, None, None, None)
                facts.stepped_ns, facts.captured_ns, facts.encoded_ns = known[:3]
