"""The phases of a run's last rounds on each rack as spans of time, from the facts of
`trace_timeline`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from mend.errors import TapeError
from mend.tools.trace_timeline import RankTimes, RoundFacts, Story, story_of
from mend.trace.format import Entry, Gap, Header
from mend.trace.reader import RecordedTape, read_tape, tapes_in
from mend.types import MS, SECOND

PHASES = {
    "capture": "training thread copies the fragment",
    "encode": "worker turns the copy into the offer",
    "exchange": "pulling the other racks' offers",
    "grace": "enough offers are in; the round waits for the rest",
    "merge": "worker merges and takes the outer step",
    "ready": "decided, until its apply point",
    "apply": "training thread takes the result over, waiting for it included",
}
"""Phases in the order in which a round goes through them, each with its meaning."""
ROUNDS_SHOWN = 12
TAPE_BYTES_MAX = 200 << 20
"""Largest tape that is read; a larger one takes minutes."""

MARGIN_NS = 60 * SECOND
"""Span before the first shown decision from which on a tape is read."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One phase of one round on one rack."""

    rack: int
    fragment: int
    version: int
    phase: str
    begin_ns: int
    end_ns: int


@dataclass
class Rounds:
    """The last rounds. Every rack's times are by its own clock."""

    bars: list[Bar] = field(default_factory=list)
    """Bars of the newest ROUNDS_SHOWN."""
    shown: list[tuple[int, int]] = field(default_factory=list)
    """(fragment, version), oldest first."""
    measured: int = 0
    """Rounds that the table of phases is of."""
    ms: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    """(rack, phase) -> milliseconds per round."""
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def spread(self, rack: int, phase: str) -> tuple[float, float, float] | None:
        """(median, 90th percentile, most) in ms."""
        values = self.ms.get((rack, phase))
        if not values:
            return None
        high = quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]
        return median(values), high, max(values)


def rounds_of(folder: Path, newest: Iterable[tuple[int, int, int]], trained_ns: int) -> Rounds:
    """`newest`: (fragment, version, when decided) of the last rounds, as the events have them. What
    cannot be read is in `notes`. Rounds of the end, after the last step (`trained_ns`), are left
    out, unless there are no others: they do not show what training was like."""
    found = Rounds()
    tapes = _tapes(folder, found)
    if not tapes:
        found.notes.append(
            "There is no tape that can be read, so the phases of the rounds are not known "
            "(tape_max_mb=0 writes none)."
        )
        return found
    known = list(newest)
    chosen = [each for each in known if each[2] <= trained_ns] or known
    since_ns = min((at_ns for _, _, at_ns in chosen), default=0) - MARGIN_NS
    story = _story(tapes, since_ns, found)
    measure(story, {(fragment, version) for fragment, version, _ in chosen}, found)
    if not story.coordinated:
        found.notes.append(
            "No tape of a process that coordinated is there (the witness, or rack 0), so when "
            "rounds closed is not known."
        )
    return found


def measure(story: Story, wanted: set[tuple[int, int]], found: Rounds) -> None:
    """The phases of the rounds in `wanted`, each (fragment, version), into `found`."""
    made = [each for each in story.decided if (each.fragment, each.version) in wanted]
    found.measured = len(made)
    for place, each in enumerate(made):
        bars = list(_bars(each))
        for bar in bars:
            milliseconds = (bar.end_ns - bar.begin_ns) / MS
            found.ms.setdefault((bar.rack, bar.phase), []).append(milliseconds)
        if place >= len(made) - ROUNDS_SHOWN:
            found.bars += bars
            found.shown.append((each.fragment, each.version))


def _tapes(folder: Path, found: Rounds) -> list[RecordedTape]:
    """Read the tapes of the racks' leaders and of the witness, as far as they can be read."""
    tapes = []
    try:
        paths = [path for path in tapes_in([folder]) if path.parent == folder]
    except TapeError:
        return []
    for path in paths:
        if "-rank0" not in path.name:
            continue
        try:
            tape = read_tape(path)
        except TapeError as error:
            found.notes.append(f"A tape cannot be read: {error}")
            continue
        if tape.bytes > TAPE_BYTES_MAX:
            mb = tape.bytes / 1e6
            found.notes.append(f"{path.name} has {mb:.0f} MB and is not read for the timeline.")
            continue
        tapes.append(tape)
        if not found.settings:
            found.settings, found.versions = dict(tape.header.config), dict(tape.header.versions)
    return tapes


def _story(tapes: list[RecordedTape], since_ns: int, found: Rounds) -> Story:
    """Read the tapes from then on; a tape that is damaged in its middle, up to there."""

    def late(header: Header, entries: Iterable[Entry | Gap]) -> Iterator[Entry | Gap]:
        offset_ns = header.wall_ns - header.mono_ns
        try:
            for entry in entries:
                if isinstance(entry, Gap) or entry.now_ns + offset_ns >= since_ns:
                    yield entry
        except TapeError as error:
            found.notes.append(f"A tape is damaged: {error}")

    return story_of((tape.header, late(tape.header, tape.entries())) for tape in tapes)


def _bars(made: RoundFacts) -> Iterator[Bar]:
    """Phases that have a beginning and an end on the tapes."""
    grace = _grace(made)
    for (rack, rank), mine in sorted(made.ranks.items()):
        if rank:
            continue
        spans = {**_spans(mine), "grace": grace if mine.captured_ns is not None else None}
        for phase in PHASES:
            begin_ns, end_ns = spans[phase] or (None, None)
            if begin_ns is not None and end_ns is not None and begin_ns <= end_ns:
                yield Bar(rack, made.fragment, made.version, phase, begin_ns, end_ns)


def _spans(rank: RankTimes) -> dict[str, tuple[int | None, int | None] | None]:
    begun_ns = rank.applied_ns
    if rank.applied_ns is not None and rank.in_mend_ns is not None:
        begun_ns = rank.applied_ns - rank.in_mend_ns
    pulled = list(rank.pulls.values())
    return {
        "capture": (rank.stepped_ns, rank.captured_ns),
        "encode": (rank.captured_ns, rank.encoded_ns),
        "exchange": (min(a for a, _ in pulled), max(b for _, b in pulled)) if pulled else None,
        "merge": rank.merge,
        "ready": (rank.learnt_ns, begun_ns),
        "apply": (begun_ns, rank.applied_ns) if rank.in_mend_ns is not None else None,
    }


def _grace(made: RoundFacts) -> tuple[int, int] | None:
    """Return the span from enough offers to the close of the round; None: nobody was missing."""
    if not made.proposals:
        return None
    closed_ns = made.proposals[0][0]
    for at_ns, why in made.whys:
        if why.open_for and at_ns <= closed_ns:
            return at_ns, closed_ns
    return None
