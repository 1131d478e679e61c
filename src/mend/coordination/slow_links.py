"""Finds links that have become slow, from the times of the pulls that a rank makes anyway.

It makes no probes and needs no slow steps, so it also finds a slow link that the overlap hides.

A sample is the time per byte of pulls that took SAMPLE_NS in total. Concurrent pulls from several
racks are each charged a part of the time, because they share this rank's link: a rack does not
become slow because its pulls coincide with others. `OwnPast` of the detector judges, with a limit
of LINK_MIN, because pulls vary more than steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from mend.coordination.events import Effect, Note
from mend.coordination.messages import SlowLink
from mend.detector import LINK_MIN, DetectorOptions, OwnPast
from mend.errors import require
from mend.events.kinds import LinkSlow, LinkSlowOver
from mend.types import MS, Member

SAMPLE_NS = 50 * MS
"""Least duration of the pulls of one sample. It bounds the work, and scheduling noise makes shorter
times useless."""

SAMPLE_NS_MAX = 20 * SAMPLE_NS
"""After this long a sample ends even if another pull from the same rack is in flight."""


@dataclass(slots=True)
class _Inflow:
    """Pulls from one rack. `steps`: this rank's steps at the newest samples."""

    past: OwnPast
    steps: deque[int]
    flying: int = 0
    busy_ns: int = 0
    size: int = 0
    failed: bool = False
    """Whether a pull of this sample failed, so that the time of the others does not measure the
    link."""
    since_step: int = 0
    """Step at which the slowdown in force began; 0: none is in force."""

    def sample(self) -> float:
        """ns per byte; 0: there is no complete sample yet."""
        whole = self.flying == 0 and self.busy_ns >= SAMPLE_NS
        if not whole and self.busy_ns < SAMPLE_NS_MAX:
            return 0.0
        per_byte = self.busy_ns / self.size if self.size and not self.failed else 0.0
        self.busy_ns, self.size, self.failed = 0, 0, False
        return per_byte


@dataclass(slots=True)
class LinkPaces:
    """The pulls of one rank, by source member."""

    rack: int
    rank: int
    options: DetectorOptions
    _inflows: dict[Member, _Inflow] = field(default_factory=dict)
    _at_ns: int = 0
    """Time up to which pulls are charged."""

    def begin(self, member: Member, now_ns: int) -> None:
        """Record that a pull from the rack of `member` begins."""
        self._charge(now_ns)
        if member not in self._inflows:
            options = replace(self.options, shift_min=1 - 1 / LINK_MIN)
            self._inflows[member] = _Inflow(OwnPast(options), deque(maxlen=options.lately))
        self._inflows[member].flying += 1

    def end(self, member: Member, size: int, error: str, step: int, now_ns: int) -> list[Effect]:
        """Record that a pull has ended. `size`: bytes; `step`: this rank's step."""
        self._charge(now_ns)
        inflow = self._inflows.get(member)
        if inflow is None or not inflow.flying:
            return []
        inflow.flying -= 1
        inflow.size += size
        inflow.failed = inflow.failed or bool(error)
        time = inflow.sample()
        if not time:
            return []
        inflow.steps.append(step)
        before = inflow.past.slowdown
        if not inflow.past.observe(time):
            return []
        where, now = (member.rack, self.rack, self.rank, step), inflow.past.slowdown
        if now is None:
            before = require(before, "a verdict ends that was not in force")
            since_step, inflow.since_step = inflow.since_step, 0
            return [Note(LinkSlowOver(*where, since_step, round(before.ratio, 2)))]
        inflow.since_step = max(inflow.steps[now.since - inflow.past.count], 1)
        ratio, sure = round(now.ratio, 2), round(now.probability, 4)
        rate_mb_s = round(1e3 / time, 2)
        return [Note(LinkSlow(*where, inflow.since_step, ratio, sure, rate_mb_s))]

    def keep(self, members: Iterable[Member]) -> None:
        """Forget all other members: a restarted rack may be on another machine."""
        kept = set(members)
        self._inflows = {m: inflow for m, inflow in self._inflows.items() if m in kept}

    @property
    def slow(self) -> tuple[SlowLink, ...]:
        """Links that are slow, ascending by rack."""
        return tuple(
            SlowLink(
                rack=member.rack,
                rank=self.rank,
                since_step=inflow.since_step,
                ratio_milli=round(now.ratio * 1000),
                sure_milli=round(now.probability * 1000),
            )
            for member, inflow in sorted(self._inflows.items())
            if (now := inflow.past.slowdown) is not None
        )

    def _charge(self, now_ns: int) -> None:
        flying = [inflow for inflow in self._inflows.values() if inflow.flying]
        for inflow in flying:
            inflow.busy_ns += (now_ns - self._at_ns) // len(flying)
        self._at_ns = now_ns


def worst_links(links: Iterable[SlowLink]) -> tuple[SlowLink, ...]:
    """Merge the slow links of a rack's ranks: per other rack the one with the greatest ratio,
    ascending by rack."""
    worst: dict[int, SlowLink] = {}
    for link in links:
        known = worst.get(link.rack)
        if known is None or (link.ratio_milli, -link.rank) > (known.ratio_milli, -known.rank):
            worst[link.rack] = link
    return tuple(worst[rack] for rack in sorted(worst))
