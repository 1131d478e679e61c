"""Which ranks are slow, as reports tell it. The rules are the detector's.

A rank judges itself against its own past and reports its pace: 16 bytes or so in each report that
is sent anyway. The coordinator compares the racks with their peers and shows all verdicts to
everybody in its orders. Nobody acts on them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field

from msgspec.structs import replace

from mend.coordination.events import Effect, Note, Timed
from mend.coordination.messages import FailSlow, Pace
from mend.detector import DetectorOptions, OwnPast, PeerComparison
from mend.detector import Pace as Measured

ONSET, RELIEF = "fail-slow", "fail-slow-over"
"""Kinds of the notes."""

OWN_PAST, PEERS = "own past", "peers"

_PS_PER_NS = 1000


def sentence_of(verdict: FailSlow) -> str:
    """For people."""
    who = f"rack {verdict.rack} is slow: {verdict.ratio_tenths / 10:.1f}x the time per token of "
    if verdict.own_past:
        sure = f"{verdict.sure_milli / 10:.1f} % sure"
        return f"{who}its own past, since its step {verdict.since_step} ({sure})"
    return f"{who}the median of the others, seen at its step {verdict.since_step}"


@dataclass(slots=True)
class RankPace:
    """One rank: its samples and the verdict of its own past."""

    rack: int
    rank: int
    options: InitVar[DetectorOptions]
    past: OwnPast = field(init=False)
    since_step: int = 0
    """At which the slowdown in force began; 0: there is none."""
    _steps: deque[int] = field(init=False)

    def __post_init__(self, options: DetectorOptions) -> None:
        self.past = OwnPast(options)
        self._steps = deque(maxlen=options.lately)

    def observe(self, event: Timed) -> list[Effect]:
        """A sample; without tokens or time there is nothing to divide."""
        if event.tokens <= 0 or event.ns <= 0:
            return []
        self._steps.append(event.step)
        before = self.past.slowdown
        if not self.past.observe(event.ns / event.tokens):
            return []
        about: dict[str, object] = {"slow_rack": self.rack, "slow_rank": self.rank}
        about |= {"against": OWN_PAST, "step": event.step}
        now = self.past.slowdown
        if now is None:
            assert before is not None, "a verdict that ends was in force"
            about |= {"since_step": self.since_step, "ratio": round(before.ratio, 2)}
            self.since_step = 0
            return [Note(RELIEF, about)]
        self.since_step = max(self._steps[now.since - self.past.count], 1)
        about |= {"since_step": self.since_step, "ratio": round(now.ratio, 2)}
        return [Note(ONSET, about | {"probability": round(now.probability, 4)})]

    @property
    def verdict(self) -> Pace:
        """What of the pace is news; the rest goes along with what is sent anyway."""
        return Pace(rank=self.rank, slow_since=self.since_step)

    @property
    def pace(self) -> Pace:
        """As it is reported."""
        measured, slow = self.past.pace, self.past.slowdown
        return Pace(
            rank=self.rank,
            time_ps=round(measured.time * _PS_PER_NS),
            margin_ppm=round(measured.margin * 1e6),
            slow_since=self.since_step,
            ratio_milli=round(slow.ratio * 1000) if slow else 0,
            sure_milli=round(slow.probability * 1000) if slow else 0,
        )


def pace_of_rack(paces: Sequence[Pace]) -> Pace:
    """A rack is as fast as its slowest rank; of those that are judged slow the worst is named."""
    if not paces:
        return Pace()
    slowest = max(paces, key=lambda pace: (pace.time_ps, -pace.rank))
    slow = [pace for pace in paces if pace.slow_since]
    worst = max(slow, key=lambda pace: (pace.ratio_milli, -pace.rank), default=Pace())
    return replace(worst, time_ps=slowest.time_ps, margin_ppm=slowest.margin_ppm)


def verdict_of(pace: Pace) -> Pace:
    """What of the pace of a rack is news; the rest goes along with what is sent anyway."""
    return replace(pace, time_ps=0, margin_ppm=0, ratio_milli=0, sure_milli=0)


@dataclass(slots=True)
class RackPaces:
    """For the coordinator. `judged`: all verdicts in force, ascending by rack, its own past first.
    Soft: whoever takes over compares anew."""

    judged: tuple[FailSlow, ...] = ()
    due_ns: int = 0
    _peers: PeerComparison = field(default_factory=PeerComparison)
    _since: dict[int, int] = field(default_factory=dict)

    def compare(self, paces: Mapping[int, Pace], steps: Mapping[int, int]) -> list[Effect]:
        """`paces`: of the racks that are live and train; `steps`: where they are."""
        measured = {
            rack: Measured(pace.time_ps / _PS_PER_NS, pace.margin_ppm / 1e6)
            for rack, pace in paces.items()
        }
        onset, relief = self._peers.compare(measured)
        effects: list[Effect] = []
        for rack in sorted(relief):
            since_step = self._since.pop(rack)
            about: dict[str, object] = {"slow_rack": rack, "against": PEERS}
            about |= {"step": steps.get(rack, since_step), "since_step": since_step}
            effects.append(Note(RELIEF, about))
        for rack in sorted(onset):
            self._since[rack] = max(steps[rack], 1)
            about = {"slow_rack": rack, "against": PEERS, "step": steps[rack]}
            effects.append(Note(ONSET, about | {"ratio": round(self._peers.slow[rack], 2)}))
        found = []
        for rack in sorted(paces):
            pace = paces[rack]
            if pace.slow_since:
                ratio, sure = round(pace.ratio_milli / 100), pace.sure_milli
                found.append(FailSlow(rack, pace.rank, True, pace.slow_since, ratio, sure))
            if rack in self._peers.slow:
                ratio = round(self._peers.slow[rack] * 10)
                found.append(FailSlow(rack, pace.rank, False, self._since[rack], ratio))
        self.judged = tuple(found)
        return effects
