"""Finds slow ranks and racks from samples and reports. The rules are the detector's.

A rank judges itself against its own past and reports its pace, about 16 bytes in each report. The
coordinator compares the racks with their peers and sends all verdicts to all racks in its orders.
The ladder decides what follows from them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from statistics import median
from typing import Final

from msgspec.structs import replace

from mend.coordination.events import CommonEffect, Effect, Note, Probed, Started, Timed, Validated
from mend.coordination.messages import SLOW_MAX, FailSlow, Pace, Report, SlowLink
from mend.coordination.slow_cause import CauseSearch
from mend.coordination.slow_links import LinkPaces, worst_links
from mend.detector import (
    LINK,
    UNKNOWN,
    DetectorOptions,
    MeasuredPace,
    OwnPast,
    PeerComparison,
    cause_in_words,
    cause_of,
)
from mend.errors import require
from mend.events.kinds import RackSlow, RackSlowOver
from mend.types import MS, Address

OWN_PAST: Final = "own past"
PEERS: Final = "peers"

HEALTHY_SAMPLES = 2
"""After this many times `samples_min` samples, the micro-benchmark of a healthy rank is run."""

_PS_PER_NS = 1000


def sentence_of(verdict: FailSlow) -> str:
    """The verdict as a sentence for people."""
    ratio, sure = verdict.ratio_tenths / 10, verdict.sure_milli / 10
    if verdict.of_link:
        rack, link_to = verdict.rack, verdict.link_to
        pulls = f"pulls by rank {verdict.rank} of rack {link_to} take {ratio:.1f}x"
        since = f"since its step {verdict.since_step} ({sure:.1f} % sure)"
        link = f"the link {rack} -> {link_to} is slow"
        return f"{link}: {pulls} the time per byte of its own past, {since}"
    by = cause_in_words(verdict.cause, verdict.rank, verdict.link_to)
    who = f"rack {verdict.rack} is slow{by and ' '}{by}: "
    who += f"{ratio:.1f}x the time per token of "
    if verdict.own_past:
        return f"{who}its own past, since its step {verdict.since_step} ({sure:.1f} % sure)"
    return f"{who}the median of the others, seen at its step {verdict.since_step}"


@dataclass(slots=True)
class RankPace:
    """One rank: its samples and the verdict of its own past."""

    rack: int
    rank: int
    options: InitVar[DetectorOptions]
    past: OwnPast = field(init=False)
    search: CauseSearch = field(init=False)
    links: LinkPaces = field(init=False)
    since_step: int = 0
    """Step at which the slowdown in force began; 0: there is none."""
    batch: int = 0
    """Micro-batches per step for which the script has asked how many to take."""
    start_ms: int = 0
    """Time from its start to its first step; 0 also if it must not be evicted whatever a restart
    costs."""
    _steps: deque[int] = field(init=False)

    def __post_init__(self, options: DetectorOptions) -> None:
        self.past = OwnPast(options)
        self.search = CauseSearch(self.rack, self.rank)
        self.links = LinkPaces(self.rack, self.rank, options)
        self._steps = deque(maxlen=options.lately)

    def observe(self, event: Timed | Started) -> list[Effect]:
        """Take a sample (ignored without tokens or time), or the duration of the start."""
        if isinstance(event, Started):
            self.start_ms = event.ns // MS
            return []
        self.batch = event.batch
        if event.tokens <= 0 or event.ns <= 0:
            return []
        self._steps.append(event.step)
        before = self.past.slowdown
        if not self.past.observe(event.ns / event.tokens):
            options, healthy = self.past.options, self.past.slowdown is None
            due = self.past.count == HEALTHY_SAMPLES * options.samples_min
            return self.search.begin() if options.validates and healthy and due else []
        now = self.past.slowdown
        if now is None:
            before = require(before, "a verdict ends that was not in force")
            relief = RackSlowOver(
                slow_rack=self.rack, slow_rank=self.rank, against=OWN_PAST, step=event.step,
                since_step=self.since_step, ratio=round(before.ratio, 2),
            )  # fmt: skip
            self.since_step = 0
            self.search.over()
            return [Note(relief)]
        self.since_step = max(self._steps[now.since - self.past.count], 1)
        onset = RackSlow(
            slow_rack=self.rack, slow_rank=self.rank, against=OWN_PAST, step=event.step,
            since_step=self.since_step, ratio=round(now.ratio, 2),
            probability=round(now.probability, 4),
        )  # fmt: skip
        validation = self.search.begin(now.ratio) if self.past.options.validates else []
        return [Note(onset), *validation]

    def on_measured(
        self, event: Validated | Probed, holders: Mapping[int, Address], now_ns: int
    ) -> list[Effect]:
        """Take a result of a micro-benchmark. `holders`: lanes of the same rank in the other
        racks."""
        if isinstance(event, Validated):
            return self.search.on_validated(event, holders, now_ns)
        return self.search.on_probed(event, now_ns)

    @property
    def verdict(self) -> Pace:
        """The part of the pace that is news, as `verdict_of` says."""
        cause = self.search.cause
        return Pace(
            rank=self.rank,
            slow_since=self.since_step,
            cause=cause.kind if cause else "",
            link_to=cause.rack if cause else -1,
            links=news_of(self.links.slow),
        )

    @property
    def pace(self) -> Pace:
        """The pace as it is reported."""
        measured, slow = self.past.pace, self.past.slowdown
        return replace(
            self.verdict,
            time_ps=round(measured.time * _PS_PER_NS),
            margin_ppm=round(measured.margin * 1e6),
            ratio_milli=round(slow.ratio * 1000) if slow else 0,
            sure_milli=round(slow.probability * 1000) if slow else 0,
            gemm_ns=self.search.gemm_ns,
            batch=self.batch,
            links=self.links.slow,
            start_ms=self.start_ms,
        )


def pace_of_rack(paces: Sequence[Pace]) -> Pace:
    """The pace of a rack: that of its slowest rank. Of ranks judged slow the worst is named; one
    whose own compute, link or input is slow goes first, because the others wait for it."""
    if not paces:
        return Pace()
    slowest = max(paces, key=lambda pace: (pace.time_ps, -pace.rank))
    slow = [pace for pace in paces if pace.slow_since]
    worst = max(
        slow,
        key=lambda pace: (pace.cause not in ("", UNKNOWN), pace.ratio_milli, -pace.rank),
        default=Pace(),
    )
    measured = {"time_ps": slowest.time_ps, "margin_ppm": slowest.margin_ppm}
    measured["gemm_ns"] = max(pace.gemm_ns for pace in paces)
    measured["start_ms"] = max(pace.start_ms for pace in paces)
    links = worst_links(link for pace in paces for link in pace.links)
    return replace(worst, **measured, batch=min(pace.batch for pace in paces), links=links)


def verdict_of(pace: Pace) -> Pace:
    """The part of a pace that is news; the rest is sent along with reports."""
    measured = {"time_ps": 0, "margin_ppm": 0, "ratio_milli": 0, "sure_milli": 0, "gemm_ns": 0}
    return replace(pace, **measured, batch=0, start_ms=0, links=news_of(pace.links))


def news_of(links: tuple[SlowLink, ...]) -> tuple[SlowLink, ...]:
    """Slow links without what changes from sample to sample."""
    return tuple(replace(link, ratio_milli=0, sure_milli=0) for link in links)


@dataclass(slots=True)
class RackPaces:
    """The coordinator's comparison. `judged`: all verdicts in force, ascending by rack, its own
    past first; those on links last. Soft state: a new coordinator compares again."""

    judged: tuple[FailSlow, ...] = ()
    due_ns: int = 0
    _peers: PeerComparison = field(default_factory=PeerComparison)
    _since: dict[int, int] = field(default_factory=dict)

    def look(self, reports: Mapping[int, Report]) -> list[CommonEffect]:
        """Compare the racks that are live and have a seat."""
        there = {r: reports[r] for r in sorted(reports) if not reports[r].leaving}
        paces = {rack: report.pace for rack, report in there.items()}
        return self.compare(paces, {rack: report.step for rack, report in there.items()})

    def compare(self, paces: Mapping[int, Pace], steps: Mapping[int, int]) -> list[CommonEffect]:
        """Compare. `paces`: of the racks that are live and train; `steps`: their steps."""
        measured = {
            rack: MeasuredPace(pace.time_ps / _PS_PER_NS, pace.margin_ppm / 1e6)
            for rack, pace in paces.items()
        }
        onset, relief = self._peers.compare(measured)
        effects: list[CommonEffect] = []
        for rack in sorted(relief):
            since_step = self._since.pop(rack)
            over = RackSlowOver(
                slow_rack=rack, against=PEERS, step=steps.get(rack, since_step),
                since_step=since_step,
            )  # fmt: skip
            effects.append(Note(over))
        for rack in sorted(onset):
            self._since[rack] = max(steps[rack], 1)
            ratio = round(self._peers.slow[rack], 2)
            effects.append(
                Note(RackSlow(slow_rack=rack, against=PEERS, step=steps[rack], ratio=ratio))
            )
        verdicts = []
        for rack in sorted(paces):
            pace = paces[rack]
            if pace.slow_since:
                ratio, sure = round(pace.ratio_milli / 100), pace.sure_milli
                own = FailSlow(rack, pace.rank, True, pace.slow_since, ratio, sure)
                verdicts.append(replace(own, cause=pace.cause, link_to=pace.link_to))
            if rack in self._peers.slow:
                ratio, cause = round(self._peers.slow[rack] * 10), self._cause(rack, paces)
                since = self._since[rack]
                verdicts.append(FailSlow(rack, pace.rank, False, since, ratio, cause=cause))
        self.judged = tuple([*verdicts, *_slow_links(paces)][:SLOW_MAX])
        return effects

    def _cause(self, rack: int, paces: Mapping[int, Pace]) -> str:
        """The cause by which a rack is slower than its peers: matrix products are compared, too."""
        others = [paces[r].gemm_ns for r in sorted(paces) if r != rack and paces[r].gemm_ns]
        if not paces[rack].gemm_ns or not others:
            return ""
        gemm = paces[rack].gemm_ns / median(others)
        return cause_of(self._peers.slow[rack], gemm, 0.0, {}).kind


def _slow_links(paces: Mapping[int, Pace]) -> list[FailSlow]:
    """Ascending by the rack that is pulled from, then by the one that pulls."""
    verdicts = [
        FailSlow(
            rack=link.rack,
            rank=link.rank,
            own_past=True,
            since_step=link.since_step,
            ratio_tenths=round(link.ratio_milli / 100),
            sure_milli=link.sure_milli,
            cause=LINK,
            link_to=rack,
            of_link=True,
        )
        for rack, pace in paces.items()
        for link in pace.links
        if link.rack in paces and link.rack != rack
    ]
    return sorted(verdicts, key=lambda verdict: (verdict.rack, verdict.link_to))
