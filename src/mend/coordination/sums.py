"""Sums over the ranks of a rack, for merges whose weights depend on whole tensors. The sums are
opaque bytes here.

A rank owns a part of every tensor, so it cannot compute the weights alone. Once the payloads of a
merge proposal have arrived, it measures its part and reports the bytes (Partial) to its leader.
When the leader has those of all its ranks for the same (fragment, version, attempt), it combines
them into one answer (Total) and repeats it until every rank holds the version. With the total a
rank merges.

A rank that holds the version without having measured it (it copied the state) will never measure,
and neither will one at a later attempt. Then the total is empty, which means that there will be
none. A rank that reads an empty total and finds the version decided copies the state, too. So
either all ranks that wait for each other report the same key, or the leader sees that one will not.
No rank waits forever, and no clock is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from msgspec.structs import replace

from mend.coordination.events import Measure, Measured, Merge, Note, Sum, Summed
from mend.coordination.messages import Partial, RankReport, Total
from mend.events.kinds import SumsFailed
from mend.types import Member

Attempt = tuple[int, int]
"""(version, attempt)"""


class SumPhase(Enum):
    """NONE: nothing is requested. MEASURING: a worker measures. REPORTED: the own partial is
    reported. HERE: the total has arrived, the merge may begin. NEVER: there will be no total."""

    NONE = auto()
    MEASURING = auto()
    REPORTED = auto()
    HERE = auto()
    NEVER = auto()


@dataclass
class Sums:
    """One fragment on one rank: the sums of the requested merge."""

    of: Attempt = (0, 0)
    members: tuple[tuple[Member, int], ...] = ()
    phase: SumPhase = SumPhase.NONE
    blob: bytes = b""
    """The own partial in phase REPORTED, the total in phase HERE."""

    def towards(self, merge: Merge) -> Measure | Merge | None:
        """The next step towards this merge. None: it waits for the leader, or there will be no
        total."""
        of = merge.which
        if self.phase is SumPhase.NONE or (self.of, self.members) != (of, merge.members):
            self.of, self.members = of, merge.members
            self.phase, self.blob = SumPhase.MEASURING, b""
            return Measure(merge.fragment, *of, merge.members, merge.weights, verify=merge.verify)
        if self.phase is SumPhase.HERE:
            return replace(merge, total=self.blob)
        return None

    def on_measured(self, event: Measured) -> None:
        """A worker has ended; its result may belong to an attempt that is over."""
        if self.of == event.which and self.phase is SumPhase.MEASURING:
            self.phase = SumPhase.NONE if event.error else SumPhase.REPORTED
            self.blob = event.blob

    def take_total(self, total: Total) -> None:
        """Take a total, which the leader repeats."""
        if self.of == (total.version, total.attempt) and self.phase is SumPhase.REPORTED:
            self.phase = SumPhase.HERE if total.blob else SumPhase.NEVER
            self.blob = total.blob

    def partial(self, fragment: int, newest: int) -> Partial | None:
        """The partial to report; None if the version is held already."""
        if self.phase is not SumPhase.REPORTED or self.of[0] <= newest:
            return None
        return Partial(fragment, *self.of, self.blob)


@dataclass
class Totals:
    """The leader's side of all fragments. Keeps the newest total of each."""

    _busy: dict[int, Attempt] = field(default_factory=dict)
    _made: dict[int, Total] = field(default_factory=dict)

    def collect(self, ranks: list[RankReport]) -> list[Sum]:
        """`ranks`: the newest report of every rank, in rank order."""
        if not ranks[0].partials:
            return []
        found = [_by_key(report) for report in ranks]
        effects = []
        for key in [key for key in found[0] if all(key in partials for partials in found)]:
            fragment, *of = key
            if (of[0], of[1]) > max(self._busy.get(fragment, (0, 0)), self._of(fragment)):
                self._busy[fragment] = (of[0], of[1])
                effects.append(Sum(*key, tuple(partials[key] for partials in found)))
        return effects

    def on_summed(self, event: Summed) -> list[Note]:
        """A worker has computed a total, or failed: then the total is empty."""
        fragment, of = event.fragment, event.which
        if self._busy.get(fragment) != of:
            return []
        del self._busy[fragment]
        self._made[fragment] = Total(fragment, *of, event.blob)
        if not event.error:
            return []
        return [Note(SumsFailed(fragment, event.version, event.error))]

    def current(self, ranks: list[RankReport]) -> tuple[Total, ...]:
        """The totals for all ranks. A total that every rank has used is dropped."""
        for fragment, total in list(self._made.items()):
            if all(report.versions[fragment] >= total.version for report in ranks):
                del self._made[fragment]
        if not self._made and not any(report.partials for report in ranks):
            return ()
        keys = {key for report in ranks for key in _by_key(report)}
        return (
            *(self._made[fragment] for fragment in sorted(self._made)),
            *(Total(*key, b"") for key in sorted(keys) if self._is_never(key, ranks)),
        )

    def _of(self, fragment: int) -> Attempt:
        made = self._made.get(fragment)
        return made.which if made else (0, 0)

    def _is_never(self, key: Key, ranks: list[RankReport]) -> bool:
        """Whether some rank will never report its partial: it holds the version, or is at a later
        attempt."""
        fragment, version, attempt = key
        if (version, attempt) in (self._busy.get(fragment), self._of(fragment)):
            return False
        for report in ranks:
            theirs = _by_key(report)
            later = report.versions[fragment] >= version or any(_later(k, key) for k in theirs)
            if later and key not in theirs:
                return True
        return False


Key = tuple[int, int, int]
"""(fragment, version, attempt)"""


def _by_key(report: RankReport) -> Mapping[Key, bytes]:
    return {partial.key: partial.blob for partial in report.partials}


def _later(other: Key, key: Key) -> bool:
    return other[0] == key[0] and other[1:] > key[1:]
