"""Flow control of the log to one reader: what is under way, what to send next.

States are repeated, records are not: a reader that is slow would otherwise get the same records
with every state, fall behind by reading them, and get more. A record is sent once, and again when
the reader has answered something that was said after it without having it, or is silent for long.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mend.consensus.log import Log
from mend.consensus.records import Record, Snapshot
from mend.types import MS

UNANSWERED_MAX = 16
"""States that a reader has not answered. With so many, news wait for the heartbeat: what a reader
has not read yet is out of date, and fills its memory."""

BATCH_RACKS, BATCH_NS_PER_RACK = 8, 1 * MS
"""With more racks than this, news is collected before it is told, for so long per rack beyond."""


def batch_ns(racks: int) -> int:
    """How long news may wait for more of it. Of R racks each tells what it has of each other's
    offers, and each is told: what is done at every word costs R times as much per rack. 0 in jobs
    of a few racks, where a word is answered at once."""
    return max(0, racks - BATCH_RACKS) * BATCH_NS_PER_RACK


def _waiting() -> deque[int]:
    return deque(maxlen=UNANSWERED_MAX)


@dataclass(frozen=True, slots=True)
class ResendPolicy:
    """When everything that is under way is sent once more: after so long without an answer, or,
    where a new lineage is among it, without which the reader does not know that it is spoken to."""

    silent_ns: int
    strange_ns: int


@dataclass(frozen=True, slots=True)
class Portion:
    """The records that a state carries, after `prev`. `snapshot`: the state at `prev`, for a reader
    whose log ends before the first record that is left."""

    prev: int
    records: tuple[Record, ...] = ()
    snapshot: Snapshot | None = None

    def __bool__(self) -> bool:
        return bool(self.records) or self.snapshot is not None


def whole(log: Log, stop: int | None = None) -> Portion:
    """The snapshot of the log, and the records after it up to `stop`."""
    return Portion(log.decided, log.portion(log.decided, log.decided, stop), log.snapshot())


@dataclass
class Flow:
    """To one reader, in one ballot. `upto`: records up to here are there or under way, the newest
    in the state `serial`."""

    upto: int = 0
    serial: int = 0
    since_ns: int = 0
    answered: int = 0
    waiting: deque[int] = field(default_factory=_waiting)
    """Serials of states that the reader has not answered, the newest last."""

    def hears(self, serial: int) -> None:
        """The reader has answered this state, or a later one."""
        self.answered = max(self.answered, serial)
        while self.waiting and self.waiting[0] <= self.answered:
            self.waiting.popleft()

    @property
    def calm(self) -> bool:
        """Whether the reader has answered all records that were sent to it."""
        return self.answered >= self.serial

    @property
    def full(self) -> bool:
        return len(self.waiting) == UNANSWERED_MAX

    def next(
        self, log: Log, known: int, now_ns: int, again: ResendPolicy, stop: int | None = None
    ) -> Portion:
        """The next records of `log`, up to `stop`, for a reader that has it up to `known`."""
        if self.upto > known and log.reaches(self.upto):
            same = log.lineage_at(self.upto) == log.lineage_at(known)
            limit_ns = again.silent_ns if same else again.strange_ns
            if self.answered < self.serial and now_ns - self.since_ns < limit_ns:
                return Portion(self.upto, log.portion(known, self.upto, stop))
        if not log.reaches(known):
            return whole(log, stop)
        return Portion(known, log.portion(known, known, stop))

    def went(self, portion: Portion, serial: int, now_ns: int) -> None:
        """It was sent, in the state `serial`."""
        self.waiting.append(serial)
        if portion:
            self.upto = portion.prev + len(portion.records)
            self.serial, self.since_ns = serial, now_ns
