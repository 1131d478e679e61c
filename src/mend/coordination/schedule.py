"""Decides after which step each fragment is captured and applied, equally on all ranks of a rack.

`Schedule` is the fixed grid of lockstep, known from the configuration alone. A rack that captures
with the others (docs/internals/protocol.md, Capturing together) leaves that grid; its `Calendar`
counts from its own captures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mend.consensus.records import MomentFragments, Policy
from mend.errors import ensure


@dataclass(frozen=True)
class Schedule:
    """P fragments of weights, each captured once per H steps, applied at most tau steps later; then
    those of moments, each group in the same way with a period of its own.

    Steps count from 1. Fragment p is due after step s when s >= o_p and (s - o_p) mod H = 0, with
    o_p = floor((p + 1) H / P). Source: Streaming DiLoCo, 2501.18512.
    """

    fragments: int
    period_steps: int
    overlap_steps: int
    overlap_ramp: int = 0
    """Versions over which tau rises in lockstep (see `overlap_at`); 0: it is constant."""
    moments: tuple[MomentFragments, ...] = ()
    """Further fragments, after these P, with their own periods."""
    polls: int = 0
    """Steps between two polls for rounds that other racks have opened; 0: never, as in lockstep."""
    _groups: tuple[tuple[int, int, int], ...] = field(init=False, repr=False, compare=False)
    """(first, count, period) of the fragments that share a period."""

    def __post_init__(self) -> None:
        ensure(self.fragments >= 1, "a schedule without fragments", schedule=self)
        ensure(
            0 <= self.overlap_steps < self.period_steps,
            "an overlap beyond the period",
            schedule=self,
        )
        groups, first = [(0, self.fragments, self.period_steps)], self.fragments
        for count, period in ((each.count, each.period_steps) for each in self.moments):
            ensure(
                self.overlap_steps < period,
                "an overlap beyond the period",
                overlap=self.overlap_steps,
                period=period,
            )
            groups.append((first, count, period))
            first += count
        object.__setattr__(self, "_groups", tuple(groups))

    @property
    def count(self) -> int:
        """Total number of fragments."""
        first, count, _ = self._groups[-1]
        return first + count

    def _group(self, fragment: int) -> tuple[int, int, int]:
        return next(each for each in reversed(self._groups) if fragment >= each[0])

    def period(self, fragment: int) -> int:
        """Steps between two captures of the fragment."""
        return self._group(fragment)[2]

    def offset(self, fragment: int) -> int:
        """o_p: the first step after which the fragment is captured."""
        first, count, period = self._group(fragment)
        return (fragment - first + 1) * period // count

    def first(self, fragment: int) -> int:
        """The first step after which the fragment is captured, counted from 1."""
        return self.offset(fragment) or self.period(fragment)

    def captures(self, step: int) -> tuple[int, ...]:
        """Fragments captured after this step, ascending."""
        return tuple(
            fragment
            for fragment in range(self.count)
            if step >= (offset := self.offset(fragment))
            and (step - offset) % self.period(fragment) == 0
        )

    def overlap(self, version: int) -> int:
        """tau of a capture on this version."""
        return overlap_at(version, self.overlap_steps, self.overlap_ramp)


def overlap_at(version: int, overlap_steps: int, ramp: int) -> int:
    """tau of a capture on `version`: tau v / (0.9 (v + c)), rounded, from 1 to tau; with ramp c = 0
    always tau. Late merges cost most while the inner steps are large, that is, at the start of a
    run (docs/internals/quality.md); the version is in the log, so all racks agree."""
    if not ramp or overlap_steps <= 1:
        return overlap_steps
    part = 9 * (version + ramp)
    return min(overlap_steps, max(1, (20 * overlap_steps * version + part) // (2 * part)))


def gap_steps(fragments: int, period_steps: int) -> int:
    """Steps between two rounds when P fragments share a period; at least 1."""
    return max(1, period_steps // fragments)


POLLS_PER_GAP = 4
"""Least number of polls for open rounds between two of a rack's own captures."""

POLLS_PER_OVERLAP = 4
"""Least number of polls within tau: a round that a rack learns of late lacks its offer when the
opener needs the result."""


def poll_steps(ranks: int, fragments: int, period_steps: int, overlap_steps: int) -> int:
    """Steps between two polls of a rack that is not in lockstep; at least 1. A rack of one rank
    polls after every step, as it agrees with nobody."""
    if ranks == 1:
        return 1
    often = period_steps // (POLLS_PER_GAP * fragments)
    if overlap_steps > 0:
        often = min(often, overlap_steps // POLLS_PER_OVERLAP)
    return max(1, often)


def schedule_of(policy: Policy) -> Schedule:
    """The schedule of every rank. Where there are other racks, and no lockstep, a rack polls for
    rounds that they have opened."""
    of = policy.of_weights, policy.period_steps, policy.overlap_steps
    polls = 0 if policy.lockstep or policy.racks == 1 else poll_steps(policy.ranks, *of)
    return Schedule(*of, policy.overlap_ramp, policy.moments, polls)


NEVER_CAPTURED = -1


@dataclass
class Calendar:
    """The steps after which one rack captures, applies and looks for open rounds.

    A fragment is first due by the schedule, then H steps after its mark, the step of its last
    capture point. A capture point comes sooner if the rack joins a round that another rack has
    opened; otherwise the points are those of the schedule.
    """

    schedule: Schedule
    marks: list[int] = field(init=False)
    versions: list[int] = field(init=False)
    """Per fragment the version that the rack trained on at its mark."""
    next_step: int = field(init=False)
    """The first step at which something is due; the training loop compares it at every step."""
    event_step: int = field(init=False)
    """Up to this step only polls are due."""

    def __post_init__(self) -> None:
        count = self.schedule.count
        self.marks, self.versions = [0] * count, [NEVER_CAPTURED] * count
        self.past(0)

    def due(self, fragment: int) -> int:
        """The step of the next capture, unless a round is joined before."""
        mark = self.marks[fragment]
        return mark + self.schedule.period(fragment) if mark else self.schedule.first(fragment)

    def captures(self, step: int) -> tuple[int, ...]:
        """Fragments to be captured after this step, ascending."""
        return tuple(p for p in range(len(self.marks)) if self.due(p) == step)

    def last(self, fragment: int) -> int:
        """The step at which training waits for the result of the last capture. In lockstep it is
        also the one at which the result is applied, and it comes sooner while the overlap rises."""
        mark, schedule = self.marks[fragment], self.schedule
        if schedule.polls:
            return mark + schedule.overlap_steps
        return mark + schedule.overlap(max(0, self.versions[fragment]))

    def lasts(self, step: int) -> tuple[int, ...]:
        """Fragments whose results training waits for at this step, ascending."""
        return tuple(p for p, mark in enumerate(self.marks) if mark and self.last(p) == step)

    def applies(self, fragment: int, step: int) -> bool:
        """Whether a result may be applied after this step. Without lockstep at every poll, as a
        result that is applied sooner costs less (docs/internals/quality.md). In lockstep only from
        the end of the overlap on: its steps must not depend on how long the exchange takes."""
        return self.schedule.polls > 0 or step >= self.last(fragment)

    def is_poll(self, step: int) -> bool:
        return self.schedule.polls > 0 and step % self.schedule.polls == 0

    def mark(self, fragment: int, step: int, version: int) -> None:
        """Record a capture point, at which the rack trained on `version`."""
        self.marks[fragment], self.versions[fragment] = step, version

    def joins(self, opened: Iterable[int]) -> list[int]:
        """Fragments with an open round of a version (`opened`, one per fragment) in which the rack
        has passed no capture point, longest waiting first."""
        fragments = [p for p, version in enumerate(opened) if version > self.versions[p]]
        return sorted(fragments, key=lambda p: (self.marks[p], p))

    def past(self, step: int) -> None:
        """Record that this step is done, and find the next step at which something is due."""
        nexts = [self.due(p) for p in range(len(self.marks))]
        for p, mark in enumerate(self.marks):
            if mark and self.last(p) > step:
                nexts.append(self.last(p))
        self.event_step = min(nexts)
        self.polled(step)

    def polled(self, step: int) -> None:
        """Record that this step is done, at which at most a poll was due."""
        self.next_step = self.event_step
        if polls := self.schedule.polls:
            self.next_step = min(self.event_step, step - step % polls + polls)
