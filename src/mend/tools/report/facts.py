"""Facts of a run, gathered one event at a time. Pure.

They are bounded however long the run is: curves are thinned, and lists are cut and say so.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec import structs

from mend.detector import cause_in_words
from mend.events import kinds
from mend.events.base import LoggedEvent, kind_of
from mend.events.lines import TimedEvent
from mend.status.loudness import Loudness
from mend.tools.report.curve import Curve, Point, Strip, Track
from mend.types import WITNESS

NAMES_MAX = 12
"""Most kinds of recorded values."""
NAME_MAX = 40
CLOSINGS_MAX = 40
FAULTS_SHOWN = 20
"""Faults that are shown of the first, and of the last ones."""
TEXT_MAX = 4000
"""Longest text of one event that is kept."""
USUAL = (kinds.StillWaiting, kinds.EndAwaited)
"""Loud events that a report leaves out: racks begin and end at different times."""
PENDING_MAX = 20_000
"""Rounds whose digests are compared at a time."""
DIFFERENCES_MAX = 10
ROUNDS_KEPT = 64
OPEN_OFFERS_MAX = 100_000
RATIO = attrgetter("ratio")


def printable(text: str) -> str:
    """The text, with a sign in place of each character that is not printable."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def clean(text: str) -> str:
    """Printable, and at most TEXT_MAX characters: it is from a file."""
    cut = text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return printable(cut)


class Closing(NamedTuple):
    """Why a round closed: the value, and the sentence."""

    closed_by: str
    reason: str


@dataclass(frozen=True, slots=True)
class Fault:
    """A loud event of one process."""

    time_ns: int
    rack: int
    rank: int
    event: LoggedEvent

    @property
    def kind(self) -> str:
        return kind_of(self.event)

    @property
    def text(self) -> str:
        """What happened, and what to do."""
        advice = self.event.advice()
        return clean(self.event.sentence() + (advice and f"; {advice}"))


@dataclass(frozen=True, slots=True)
class Merges:
    """What a rank has said of the merges that it computed."""

    merges: int = 0
    agreement: float | None = None


@dataclass
class RankFacts:
    """One process of a rack. Counters go on over its lives."""

    rack: int
    rank: int
    track: Track = field(default_factory=Track)
    curves: dict[str, Curve] = field(default_factory=dict)
    lives: int = 1
    restarted: bool = False
    """It has begun another life, of which there is no `progress` yet."""
    closed: bool = False
    """It has ended: the last `progress` says so."""
    outcome: str = ""
    """How its newest life ended, a word of the engine's; empty: it has not."""
    captured: int = 0
    """Step of its newest offer, which may be behind its last `progress`."""
    commits: int = 0
    merges: Merges = Merges()
    """Of its newest life."""
    versions: dict[int, tuple[int, str]] = field(default_factory=dict)
    """fragment -> (newest version, its digests as one word)."""
    base: Point = field(default_factory=lambda: Point(0, 0, 0, 0.0, 0, 0))
    """Sums of its former lives."""
    now: Point | None = None


@dataclass
class RunFacts:
    """A whole run: one job, all files of its folder."""

    job: str = ""
    exchange: bool = True
    """False: every rack trains for itself, and there are no rounds."""
    elements: int = 0
    """Elements of the weights that racks exchange; 0: not known."""
    protection: dict[int, str] = field(default_factory=dict)
    """Protection of each rack: keys, loopback, insecure."""
    ranks: dict[tuple[int, int], RankFacts] = field(default_factory=dict)
    events: int = 0
    """Events that could be read, of any kind."""
    begin_ns: int = 0
    end_ns: int = 0
    rounds: int = 0
    moment_rounds: int = 0
    """How many of these rounds merged the optimizer's moments."""
    moment_bytes: int = 0
    """Bytes of all payloads of moments."""
    fragments: set[int] = field(default_factory=set)
    """Fragments of weights."""
    closings: Counter[Closing] = field(default_factory=Counter)
    participation: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(racks merged, racks that lived) -> rounds."""
    merged: Counter[int] = field(default_factory=Counter)
    """rack -> rounds that it was merged in."""
    tokens_merged: Counter[int] = field(default_factory=Counter)
    """rack -> tokens, summed over fragments."""
    missed: dict[int, Counter[str]] = field(default_factory=dict)
    """rack -> why its work was not in the round it was meant for."""
    strip: Strip = field(default_factory=Strip)
    waits: Curve = field(default_factory=Curve)
    """Seconds from a rack's capture until the round with it was decided there."""
    fault_counts: Counter[str] = field(default_factory=Counter)
    first_faults: list[Fault] = field(default_factory=list)
    last_faults: deque[Fault] = field(default_factory=lambda: deque(maxlen=FAULTS_SHOWN))
    agreed: int = 0
    """Rounds of which every digest that is on file is the same, from two ranks or more."""
    alone: int = 0
    """Rounds that only one rank's file has."""
    differences: list[str] = field(default_factory=list)
    newest: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=ROUNDS_KEPT))
    """(fragment, version, when it was decided) of the last rounds."""
    data: tuple[int, int, int, int, str] | None = None
    """Rows of the data ledger: done, open, left, given out again; and its epoch. None: there is
    none."""
    offered: tuple[int, int] = (0, 0)
    """Bytes of all payloads of a lossy codec, and what they would have been as fp32."""
    delays: tuple[int, int] = (0, 0)
    """Offers of weights, without the last ones, whose merge was applied, and the sum of the steps
    that their racks made meanwhile."""
    residuals: Curve = field(default_factory=Curve)
    """Share of each offer (length over length) that was left for a later one."""
    outer: tuple[float, float] = (0.0, 0.0)
    """Of the last round: the rounds that its fragment had merged before, and its outer momentum."""
    balances: tuple[int, float] = (0, 0.0)
    """Rounds whose offers were compared with the outer momentum, and the sum of their balances of
    signs."""
    slow: dict[tuple[int, str], kinds.RackSlow] = field(default_factory=dict)
    """(rack, compared with what) -> the worst verdict at its onset."""
    causes: dict[int, str] = field(default_factory=dict)
    """Rack that is slower than its own past -> the cause in words, where it was validated."""
    slow_links: dict[tuple[int, int], kinds.LinkSlow] = field(default_factory=dict)
    """(from rack, to rack) -> the same."""
    evicted: dict[int, str] = field(default_factory=dict)
    """Evicted rack -> why, the last time."""
    last_alone: dict[int, kinds.LastRoundsAlone] = field(default_factory=dict)
    """Rack that the last rounds merged alone -> these rounds."""
    earlier_jobs: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def racks(self) -> list[int]:
        """The racks that trained, or were merged."""
        named = {rack for rack, _ in self.ranks} | set(self.merged)
        return sorted(named - {WITNESS})

    def of_rack(self, rack: int) -> list[RankFacts]:
        return [facts for (of, _), facts in sorted(self.ranks.items()) if of == rack]

    @property
    def faults(self) -> list[Fault]:
        """The first and the last; between them some may be left out, see `fault_counts`."""
        first = set(map(id, self.first_faults))
        return self.first_faults + [each for each in self.last_faults if id(each) not in first]


Bits = dict[tuple[int, int], tuple[str, ...]]
"""(rack, rank) -> the digests of a round in its file, in the order in which they were written."""


class FactCollector:
    """Takes the events of all files in the order of time; `facts` is their result.

    Several jobs may have written into one folder: a `start` under another name begins anew, also
    behind events of a job whose own `start` was deleted.
    """

    def __init__(self, files: list[tuple[int, int]]) -> None:
        self._files = files
        self.facts = RunFacts()
        self._loudness: defaultdict[tuple[int, int], Loudness] = defaultdict(Loudness)
        self._pending: dict[tuple[int, int], Bits] = {}
        self._captured: dict[tuple[int, int, int], int] = {}
        self._open: dict[tuple[int, int], tuple[int, int]] = {}
        """(rack, fragment) -> (number, step) of its newest offer, unless that is its last one."""
        self._of_kind: dict[type[LoggedEvent], Callable[[RankFacts, int, Any], None]] = {
            kinds.ProcessStarted: self._start,
            kinds.ProtectionChosen: self._protection,
            kinds.JobFounded: self._genesis,
            kinds.Progress: self._progress,
            kinds.RowsCounted: self._rows,
            kinds.ValuesRecorded: self._recorded,
            kinds.RoundCommitted: self._commit,
            kinds.FragmentCaptured: self._capture,
            kinds.OfferEncoded: self._encoded,
            kinds.VersionApplied: self._applied,
            kinds.OfferStillOpen: self._still_open,
            kinds.LineageBegun: self._lineage,
            kinds.RackSlow: self._slow,
            kinds.LinkSlow: self._slow_link,
            kinds.RackSlowCause: self._slow_cause,
            kinds.RackEvicted: self._announce_eviction,
            kinds.RackAwaited: self._take_eviction_back,
            kinds.RankEvicted: self._eviction,
            kinds.RosterChanged: self._roster,
            kinds.LastRoundsAlone: self._last_alone,
            kinds.RankEnded: self._ended,
            kinds.RankEndedUnmerged: self._ended,
        }
        self._leaves: dict[int, str] = {}
        """Rack that is to be evicted -> why."""
        self._founded = False
        self._lives: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
        """(rack, rank) -> the newest life in its file: its member, and when it began."""
        self._written: dict[tuple[int, int, int], int] = {}
        """(rack, rank, fragment) -> the newest version of which its file has the commit."""

    def take(self, rack: int, rank: int, timed: TimedEvent) -> None:
        """One event."""
        source, (time_ns, event) = self._rank(rack, rank), timed
        if (handle := self._of_kind.get(type(event))) is not None:
            handle(source, time_ns, event)
        if event.loud and not isinstance(event, USUAL):
            shown = self._loudness[source.rack, source.rank].shown(event, time_ns)
            if shown is not None:
                self._fault(source, time_ns, shown)

    def finish(self) -> RunFacts:
        for key in list(self._pending):
            self._close_comparison(key)
        self.facts.waits.finish()
        self.facts.residuals.finish()
        for each in self.facts.ranks.values():
            for curve in each.curves.values():
                curve.finish()
        racks, protection = self.facts.racks, self.facts.protection
        self.facts.protection = {rack: protection[rack] for rack in racks if rack in protection}
        return self.facts

    def take_followed(self, timed: TimedEvent) -> None:
        """Values that a follower of the merged model has recorded. They join the curves of the
        first rank, at the tokens that it had trained by then."""
        event = timed.event
        if self._files and isinstance(event, kinds.ValuesRecorded):
            source = self._rank(*min(self._files))
            trained = source.now.tokens - source.base.tokens if source.now is not None else 0
            self._recorded(source, timed.time_ns, structs.replace(event, tokens=trained))

    def _rank(self, rack: int, rank: int) -> RankFacts:
        return self.facts.ranks.setdefault((rack, rank), RankFacts(rack, rank))

    # -------------------------------------------------------------- which job

    def _start(self, source: RankFacts, time_ns: int, event: kinds.ProcessStarted) -> None:
        who, life = (source.rack, source.rank), (event.member, time_ns)
        if self._lives.get(who) == life:
            return  # a file that was cut begins with this line once more
        self._lives[who], job = life, clean(event.job)
        if self.facts.job != job and (self.facts.job or source.now is not None):
            self._begin_anew()
        self.facts.job, self.facts.exchange = job, event.exchange
        source.outcome, source.restarted = "", source.now is not None
        self.facts.elements = event.elements or self.facts.elements

    def _protection(self, source: RankFacts, time_ns: int, event: kinds.ProtectionChosen) -> None:
        self.facts.protection[source.rack] = clean(event.protection)

    def _genesis(self, source: RankFacts, time_ns: int, event: kinds.JobFounded) -> None:
        """A job is founded once: a second one under the same name is another run."""
        if self._founded:
            job = self.facts.job
            self._begin_anew()
            self.facts.job = job
        self._founded = True

    def _begin_anew(self) -> None:
        earlier = self.facts.earlier_jobs + 1
        # A rack says how it is protected before its job has a name.
        self.facts = RunFacts(earlier_jobs=earlier, protection=self.facts.protection)
        self._pending, self._captured, self._leaves, self._founded = {}, {}, {}, False
        self._written, self._open = {}, {}

    # -------------------------------------------------------------- training

    def _progress(self, source: RankFacts, time_ns: int, event: kinds.Progress) -> None:
        now, base = source.now, source.base
        if now is not None and (source.restarted or event.step < now.step - base.step):
            # A rack that joins goes on at the step of another one, and counts its tokens anew.
            steps = now.step if event.step < now.step - base.step else base.step
            tokens = now.tokens if event.tokens < now.tokens - base.tokens else base.tokens
            source.base = base = replace(now, step=steps, tokens=tokens)
            source.lives, source.closed, source.restarted = source.lives + 1, False, False
        source.now = Point(
            event.at_ns,
            base.step + event.step,
            base.tokens + event.tokens,
            base.stall_ms + event.stall_ms_total,
            base.bytes_sent + event.bytes_sent,
            base.bytes_received + event.bytes_received,
        )
        source.track.add(source.now)
        source.merges = Merges(event.merges, event.agreement)
        source.closed = source.closed or event.last
        self._extend(event.at_ns)

    def _extend(self, at_ns: int) -> None:
        facts = self.facts
        facts.begin_ns = min(facts.begin_ns or at_ns, at_ns)
        facts.end_ns = max(facts.end_ns, at_ns)

    def _rows(self, source: RankFacts, time_ns: int, event: kinds.RowsCounted) -> None:
        self.facts.data = event.done, event.open, event.left, event.again, event.epoch

    def _recorded(self, source: RankFacts, time_ns: int, event: kinds.ValuesRecorded) -> None:
        for given, value in event.values.items():
            name = clean(given[:NAME_MAX])
            if name not in source.curves and len(source.curves) >= NAMES_MAX:
                continue
            try:
                number = float(value)
            except ValueError:
                continue
            source.curves.setdefault(name, Curve()).add(
                source.base.tokens + event.tokens, event.at_ns, number
            )
        self._extend(event.at_ns)

    def _capture(self, source: RankFacts, time_ns: int, event: kinds.FragmentCaptured) -> None:
        if not source.restarted:
            source.captured = max(source.captured, source.base.step + event.step)
        if source.rank == 0 and len(self._captured) < OPEN_OFFERS_MAX:
            self._captured[source.rack, event.fragment, event.seq] = time_ns
            if not event.closing:
                self._open[source.rack, event.fragment] = event.seq, event.step

    def _encoded(self, source: RankFacts, time_ns: int, event: kinds.OfferEncoded) -> None:
        if event.moments:
            self.facts.moment_bytes += event.bytes
            return
        size, fp32_bytes = self.facts.offered
        self.facts.offered = (size + event.bytes, fp32_bytes + event.fp32_bytes)
        self.facts.residuals.add(0, time_ns, event.residual)

    def _applied(self, source: RankFacts, time_ns: int, event: kinds.VersionApplied) -> None:
        if source.rank != 0:
            return
        if event.fate == "dropped":
            self._miss(source.rack, "its offer was too old")
        seq, step = self._open.get((source.rack, event.fragment), (0, 0))
        if event.fate == "named" and event.seq == seq and event.fragment in self.facts.fragments:
            count, steps = self.facts.delays
            self.facts.delays = count + 1, steps + event.step - step

    def _still_open(self, source: RankFacts, time_ns: int, event: kinds.OfferStillOpen) -> None:
        if source.rank == 0:
            self._miss(source.rack, "its last offer was still open")

    def _miss(self, rack: int, why: str) -> None:
        self.facts.missed.setdefault(rack, Counter())[why] += 1

    def _slow(self, source: RankFacts, time_ns: int, event: kinds.RackSlow) -> None:
        key = (event.slow_rack, event.against)
        self.facts.slow[key] = max(self.facts.slow.get(key, event), event, key=RATIO)

    def _slow_link(self, source: RankFacts, time_ns: int, event: kinds.LinkSlow) -> None:
        key = (event.from_rack, event.to_rack)
        self.facts.slow_links[key] = max(self.facts.slow_links.get(key, event), event, key=RATIO)

    def _slow_cause(self, source: RankFacts, time_ns: int, event: kinds.RackSlowCause) -> None:
        words = cause_in_words(event.cause, event.slow_rank, event.link_to)
        self.facts.causes[event.slow_rack] = words

    def _announce_eviction(self, source: RankFacts, time_ns: int, event: kinds.RackEvicted) -> None:
        """Note the reason; only when the rack has left, it is evicted."""
        self._leaves[event.slow_rack] = clean(event.reason)

    def _take_eviction_back(
        self, source: RankFacts, time_ns: int, event: kinds.RackAwaited
    ) -> None:
        self._leaves.pop(event.slow_rack, None)

    def _roster(self, source: RankFacts, time_ns: int, event: kinds.RosterChanged) -> None:
        """The coordinator's word, where there is none of the rack itself."""
        for rack in self._leaves.keys() - event.racks:
            self.facts.evicted[rack] = self._leaves.pop(rack)

    def _eviction(self, source: RankFacts, time_ns: int, event: kinds.RankEvicted) -> None:
        self.facts.evicted[source.rack] = clean(event.reason)

    def _last_alone(self, source: RankFacts, time_ns: int, event: kinds.LastRoundsAlone) -> None:
        self.facts.last_alone[source.rack] = event

    def _ended(
        self, source: RankFacts, time_ns: int, event: kinds.RankEnded | kinds.RankEndedUnmerged
    ) -> None:
        source.outcome = clean(event.outcome[:NAME_MAX])

    # -------------------------------------------------------------- rounds

    def _commit(self, source: RankFacts, time_ns: int, event: kinds.RoundCommitted) -> None:
        key = (event.fragment, event.version)
        of = (source.rack, source.rank, event.fragment)
        if event.version <= self._written.get(of, 0):
            return  # a rack that joins again writes down once more what it reads in the log
        self._written[of] = event.version
        digests = tuple(event.digests)
        source.commits += 1
        source.versions[event.fragment] = (event.version, "".join(d[:8] for d in digests[:8]))
        for share in event.members:
            if share.rack == source.rack and source.rank == 0:
                begun_ns = self._captured.pop((share.rack, event.fragment, share.seq), None)
                if begun_ns is not None:
                    self.facts.waits.add(0, time_ns, (time_ns - begun_ns) / 1e9)
        if key not in self._pending:
            self._pending[key] = {}
            self._count_round(event, time_ns)
        ranks = self._pending[key]
        ranks[source.rack, source.rank] = digests
        (rack, rank), first_digests = next(iter(ranks.items()))
        if first_digests != digests and len(self.facts.differences) < DIFFERENCES_MAX:
            self.facts.differences.append(
                f"fragment {event.fragment} version {event.version}: rack {source.rack} rank "
                f"{source.rank} has other digests than rack {rack} rank {rank}"
            )
        if len(ranks) == len(self._files) or len(self._pending) > PENDING_MAX:
            self._close_comparison(
                key if len(ranks) == len(self._files) else next(iter(self._pending))
            )

    def _close_comparison(self, key: tuple[int, int]) -> None:
        ranks = self._pending.pop(key)
        if len(ranks) < 2:
            self.facts.alone += 1
        elif len(set(ranks.values())) == 1:
            self.facts.agreed += 1

    def _count_round(self, commit: kinds.RoundCommitted, time_ns: int) -> None:
        """The first file that has it."""
        facts = self.facts
        facts.rounds += 1
        facts.newest.append((commit.fragment, commit.version, time_ns))
        closing = Closing(commit.closed_by, clean(commit.reason))
        full = len(facts.closings) >= CLOSINGS_MAX and closing not in facts.closings
        facts.closings[Closing("", "other") if full else closing] += 1
        racks = {share.rack for share in commit.members if share.rack < WITNESS}
        facts.strip.add(racks)
        if commit.live:
            facts.participation[len(racks), max(len(racks), commit.live)] += 1
        facts.merged.update(racks)
        if commit.moments:
            facts.moment_rounds += 1
            return
        facts.fragments.add(commit.fragment)
        facts.outer = (commit.rounds or 0.0, commit.momentum or 0.0)
        if commit.balance is not None:
            count, total = facts.balances
            facts.balances = (count + 1, total + commit.balance)
        for share in commit.members:
            facts.tokens_merged[share.rack] += share.tokens

    def _lineage(self, source: RankFacts, time_ns: int, event: kinds.LineageBegun) -> None:
        """End all comparisons: what only dead racks had is decided anew, to other bits."""
        self._written.clear()
        for key in list(self._pending):
            self._close_comparison(key)

    # -------------------------------------------------------------- faults

    def _fault(self, source: RankFacts, time_ns: int, event: LoggedEvent) -> None:
        fault = Fault(time_ns, source.rack, source.rank, event)
        self.facts.fault_counts[fault.kind] += 1
        if len(self.facts.first_faults) < FAULTS_SHOWN:
            self.facts.first_faults.append(fault)
        self.facts.last_faults.append(fault)
