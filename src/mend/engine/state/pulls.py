"""Counts the bytes that a rank pulls, and lets them extend a wait.

A wait for bytes has no constant limit as long as bytes arrive: a model of 28 GB takes four minutes
over 1 Gbit/s, and nobody knows that number beforehand. Only the time without a byte is limited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mend.coordination.messages import Pulled
from mend.events.kinds import PullsUnderWay
from mend.types import MB, SECOND, Meter

RATE_NS = 10 * SECOND
"""Rates are of the newest 10 s."""

OWN, TAKEN = -1, -2
"""Keys of `Transfers.arrived`: bytes that this rank has pulled, and that others have pulled from
its rack."""

LOOK_NS = 5 * SECOND
"""Maximum time between two checks whether bytes arrive."""


class Pulls:
    """The pulls of one rank, by the rack whose bytes they are (`source`). Loop thread; the threads
    of the lane write `Meter.verified`."""

    def __init__(self) -> None:
        self._active: dict[int, list[Meter]] = {}
        self._ended: dict[int, int] = {}
        self._most: dict[int, int] = {}

    def begin(self, source: int, size: int) -> Meter:
        return self.count(Meter(size, source))

    def count(self, meter: Meter) -> Meter:
        """Count a pull that has begun already."""
        self._active.setdefault(meter.rack, []).append(meter)
        return meter

    def end(self, source: int, meter: Meter, *, whole: bool) -> None:
        """A pull has ended. Bytes of one that failed count again only when a later pull gets
        further: a holder that keeps sending wrong bytes makes no progress."""
        self._active[source] = [each for each in self._active[source] if each is not meter]
        self._ended[source] = self._ended.get(source, 0) + meter.size * whole

    def standing(self, waiting: Mapping[int, int]) -> tuple[Pulled, ...]:
        """Per source the bytes so far, which only grow, and those still to come. `waiting`: bytes
        of pulls that have not begun, by source."""
        pulled = []
        for source in sorted(self._active.keys() | waiting.keys()):
            meters = self._active.get(source, ())
            done = [min(meter.verified, meter.size) for meter in meters]
            left = sum(meter.size for meter in meters) - sum(done) + waiting.get(source, 0)
            most = max(self._most.get(source, 0), self._ended.get(source, 0) + sum(done))
            self._most[source] = most
            pulled.append(Pulled(source, most, left))
        return tuple(pulled)


@dataclass
class Transfers:
    """Bytes that this rank and the racks that it waits for have pulled, with rates. Written by the
    loop thread under the lock of the published state."""

    pulled: int = 0
    """Bytes that this rank has pulled and verified."""
    taken: int = 0
    """Bytes that others have pulled from its rack."""
    moving: tuple[Pulled, ...] = ()
    _past: dict[int, deque[tuple[int, int]]] = field(default_factory=dict)
    """rack -> (time in ns, bytes so far) during the last RATE_NS."""

    def take(self, moving: tuple[Pulled, ...], taken: int, now_ns: int) -> None:
        self.moving, self.taken = moving, taken
        for rack in self._past.keys() - {pulled.rack for pulled in moving}:
            del self._past[rack]
        for pulled in moving:
            past = self._past.setdefault(pulled.rack, deque())
            if past and past[-1][1] > pulled.moved:  # another life of the rack
                past.clear()
            past.append((now_ns, pulled.moved))
            while past[0][0] < now_ns - RATE_NS and len(past) > 2:
                past.popleft()

    def arrived(self, *, of_all: bool = True) -> dict[int, int]:
        """Verified bytes so far of what this rack waits for, by rack; its own under OWN and TAKEN.
        `of_all`: also what other racks pull. Waits end when none of these numbers grows."""
        others = {each.rack: each.moved for each in self.moving} if of_all else {}
        return {OWN: self.pulled, TAKEN: self.taken, **others}

    def rate(self, rack: int) -> float:
        """Bytes per second."""
        past = self._past.get(rack, deque())
        if len(past) < 2 or past[-1][0] == past[0][0]:
            return 0.0
        return (past[-1][1] - past[0][1]) * SECOND / (past[-1][0] - past[0][0])

    def notes(self) -> list[tuple[int, PullsUnderWay]]:
        """Per rack that still pulls, the event that describes its progress."""
        noted: list[tuple[int, PullsUnderWay]] = []
        for pulled in self.moving:
            if pulled.left:
                rate = self.rate(pulled.rack)
                about = PullsUnderWay(
                    peer=pulled.rack,
                    mb=_mb(pulled.moved),
                    of_mb=_mb(pulled.moved + pulled.left),
                    mb_per_s=_mb(rate),
                    left_s=round(pulled.left / rate) if rate else "unknown",
                )
                noted.append((pulled.rack, about))
        return noted

    def sentences(self) -> tuple[str, ...]:
        """The same in words."""
        return tuple(about.sentence() for _, about in self.notes())


def _mb(size: float) -> float:
    return round(size / MB, 2)


class Patience:
    """Decides when a wait for bytes ends: at its limit, or, while bytes arrive, once none has come
    for `stall_ns`. `moved` returns counts of verified bytes by rack, see `Transfers.arrived`. A
    count that disappears, or comes back with no more bytes than before, is not progress: otherwise
    pulls that fail and begin again would extend a wait endlessly."""

    def __init__(
        self, limit_ns: int, stall_ns: int, now_ns: int, moved: Callable[[], Mapping[int, int]]
    ) -> None:
        self.deadline_ns = now_ns + limit_ns
        self._limit_ns, self._stall_ns, self._moved = limit_ns, stall_ns, moved
        self._seen = dict(moved())

    def __str__(self) -> str:
        more = f" and {self._stall_ns / SECOND:g} s without a byte" if self._stall_ns else ""
        return f"{self._limit_ns / SECOND:g} s{more}"

    def look_ns(self, now_ns: int) -> int:
        """How long to wait until the next look."""
        return max(1, min(LOOK_NS, self.deadline_ns + 1 - now_ns))

    def over(self, now_ns: int, *, extends: bool = True) -> bool:
        """Whether the wait ends. `extends`: whether bytes that came since the last look extend
        it."""
        found = self._moved()
        grew = any(count > self._seen.get(key, 0) for key, count in found.items())
        self._seen |= found
        if grew and extends:
            self.deadline_ns = max(self.deadline_ns, now_ns + self._stall_ns)
        return now_ns > self.deadline_ns
