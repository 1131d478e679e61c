"""Rounds as bars: why they closed, who was in them, and the phases of the last ones. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from mend.consensus.records import ClosedBy
from mend.tools.report.axes import PLACES, Scale, Tick
from mend.tools.report.facts import RunFacts
from mend.tools.report.rounds import PHASES, Bar, Rounds
from mend.tools.report.summary import duration
from mend.types import SECOND

REASONS_SHOWN = 7
LANES_MAX = 48
REASONS: dict[ClosedBy, str] = {
    "all-in": "every live rack was in, so many of the roster's",
    "rest-in": "the live racks that are not in had nothing to offer",
    "grace-over": "enough offers were in, and the grace window ended",
    "expected-in": "those of expected_racks were in",
    "slow-left": "all but slow racks that are not waited for",
    "lockstep": "all racks, always",
}
"""What `closed_by` of a commit means."""
DRAWN_IN_ORDER = ("grace", "ready", "exchange", "encode", "capture", "merge", "apply")
"""Phases in the order of drawing."""


def reasons(facts: RunFacts) -> list[tuple[str, int]]:
    """(why, rounds that closed so), the most frequent first."""
    common = facts.closings.most_common(REASONS_SHOWN)
    rest = facts.rounds - sum(count for _, count in common)
    counts = [(closing.reason, count) for closing, count in common]
    return [*counts, *([("others", rest)] if rest else [])]


def meanings(facts: RunFacts) -> str:
    """Explain the reasons that are shown."""
    shown = {closing.closed_by for closing, _ in facts.closings.most_common(REASONS_SHOWN)}
    return " ".join(f"{why}: {meaning}." for why, meaning in REASONS.items() if why in shown)


@dataclass(frozen=True, slots=True)
class Cell:
    """Rounds after each other in which the rack took part alike."""

    share: float
    rounds: int
    tooltip: str


def participation(facts: RunFacts, rack: int) -> list[Cell]:
    strip, cells, first = facts.strip, [], 1
    for share, same in groupby(strip.shares(rack)):
        rounds = min(strip.width * len(list(same)), strip.rounds - first + 1)
        span = f"round {first}" if rounds == 1 else f"rounds {first} to {first + rounds - 1}"
        cells.append(Cell(share, rounds, f"{span}: rack {rack} in {share:.0%}"))
        first += rounds
    return cells


@dataclass(frozen=True, slots=True)
class Piece:
    """A phase of a round, in thousandths of the timeline."""

    phase: str
    left: float
    width: float
    tooltip: str


@dataclass(frozen=True, slots=True)
class Lane:
    rack: int
    fragment: int
    first: bool
    """Of its rack."""
    pieces: tuple[Piece, ...]
    versions: tuple[tuple[float, int], ...]
    """(place, the version that a round makes there)."""


@dataclass(frozen=True, slots=True)
class Timeline:
    rounds: int
    lanes: tuple[Lane, ...]
    phases: tuple[str, ...]
    ticks: tuple[Tick, ...]


def timeline(rounds: Rounds, begin_ns: int) -> Timeline | None:
    """A lane per rack and fragment; None without bars. `begin_ns`: what the axis counts from."""
    bars = sorted(rounds.bars, key=lambda bar: (bar.rack, bar.fragment))
    if not bars:
        return None
    lanes = {lane: list(own) for lane, own in groupby(bars, lambda b: (b.rack, b.fragment))}
    shown = dict(list(lanes.items())[:LANES_MAX])
    bars = [bar for own in shown.values() for bar in own]
    # How long a decided round waits at the very end of a run would leave the rest no room.
    ends_ns = [bar.end_ns for bar in bars if bar.phase != "ready"] or [bar.end_ns for bar in bars]
    first_s = (min(bar.begin_ns for bar in bars) - begin_ns) / SECOND
    last_s = (max(ends_ns) - begin_ns) / SECOND
    scale = Scale(first_s, max(last_s, first_s + 1e-3))

    def place(at_ns: int) -> float:
        at = scale.places(np.array([(at_ns - begin_ns) / SECOND]))[0]
        return round(min(float(at), PLACES), 2)

    def piece(bar: Bar) -> Piece:
        left = place(bar.begin_ns)
        took = duration((bar.end_ns - bar.begin_ns) / SECOND)
        tooltip = (
            f"rack {bar.rack}, fragment {bar.fragment}, version {bar.version}: {bar.phase} {took}"
        )
        return Piece(bar.phase, left, round(place(bar.end_ns) - left, 2), tooltip)

    made, racks = [], set[int]()
    for (rack, fragment), own in shown.items():
        own.sort(key=lambda bar: (DRAWN_IN_ORDER.index(bar.phase), bar.begin_ns))
        versions = tuple((place(at_ns), version) for at_ns, version in _beginnings(own))
        pieces = tuple(map(piece, own))
        made.append(Lane(rack, fragment, rack not in racks, pieces, versions))
        racks.add(rack)
    used = {bar.phase for bar in bars}
    phases = tuple(phase for phase in PHASES if phase in used)
    return Timeline(len(rounds.shown), tuple(made), phases, tuple(scale.ticks()))


def _beginnings(bars: list[Bar]) -> Iterator[tuple[int, int]]:
    """(where its work begins in the lane, version) of each round."""
    first: dict[int, int] = {}
    for bar in bars:
        if bar.phase != "grace":
            first[bar.version] = min(first.get(bar.version, bar.begin_ns), bar.begin_ns)
    for version, at_ns in sorted(first.items()):
        yield at_ns, version
