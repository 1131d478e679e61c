"""Flow control of the log to one reader: what is in flight, and what to send next.

States are repeated, records are not: a slow reader would otherwise get the same records with every
state, fall behind by reading them, and get more. A record is sent once. It is sent again when the
reader has answered a later message without having the record, or has been silent for long.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mend.consensus.log import Log
from mend.consensus.records import Record, Snapshot
from mend.types import MS

UNANSWERED_MAX = 16
"""Limit of unanswered states. At this limit, news waits for the heartbeat: states that the reader
has not read yet are outdated and fill its memory."""

BATCH_RACKS, BATCH_NS_PER_RACK = 8, 1 * MS
"""With more racks than this, news is collected before it is sent: for this long per additional
rack."""


def batch_ns(racks: int) -> int:
    """How long news may be collected. Each of R racks reports what it holds of the other racks'
    offers and gets the same from them, so per-message work grows with R. 0 in jobs of a few racks,
    which answer every message at once."""
    return max(0, racks - BATCH_RACKS) * BATCH_NS_PER_RACK


def _waiting() -> deque[int]:
    return deque(maxlen=UNANSWERED_MAX)


@dataclass(frozen=True, slots=True)
class ResendPolicy:
    """When records in flight are sent again: after `silent_ns` without an answer; after
    `strange_ns` if they contain a new lineage, because without it the reader does not recognize
    messages of the job."""

    silent_ns: int
    strange_ns: int


@dataclass(frozen=True, slots=True)
class Portion:
    """The records that a state carries, after `prev`. `snapshot`: the state at `prev`, for a reader
    whose log ends before the first record that is kept."""

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
    """The flow to one reader in one ballot. `upto`: records up to here have arrived or are in
    flight, the newest of them in the state `serial`."""

    upto: int = 0
    serial: int = 0
    since_ns: int = 0
    answered: int = 0
    waiting: deque[int] = field(default_factory=_waiting)
    """Serials of unanswered states, newest last."""

    def hears(self, serial: int) -> None:
        """Record that the reader has answered this state, or a later one."""
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
        """Record that `portion` was sent in the state `serial`."""
        self.waiting.append(serial)
        if portion:
            self.upto = portion.prev + len(portion.records)
            self.serial, self.since_ns = serial, now_ns
