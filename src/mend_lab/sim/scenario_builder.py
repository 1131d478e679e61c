"""Scenarios by hand: calls that add one fault each and return the world."""

from __future__ import annotations

import dataclasses
from typing import Self, TypedDict, Unpack

from mend.types import MS, SECOND
from mend_lab.sim.faults import Broken
from mend_lab.sim.scenario import FOR_EVER, Fault, Scenario


class Start(TypedDict, total=False):
    """`at`: seconds of virtual time, 0 unless given. `after=("Orders", 3)`: not at that time, but
    right after the third message of that name which the target `a` sends from then on."""

    at: float
    after: tuple[str, int]


class When(Start, total=False):
    """`until`: seconds of virtual time, for ever unless given. With `after` a fault lasts for
    `until - at`."""

    until: float


def _ns(seconds: float | None) -> int:
    return FOR_EVER if seconds is None else round(seconds * SECOND)


class Writer:
    """One method per kind of fault. The witness is rack WITNESS."""

    scenario: Scenario
    broken: Broken

    def fault(self, fault: Fault) -> Self:
        """Any fault at all."""
        self.scenario = self.scenario.without(faults=(*self.scenario.faults, fault))
        return self

    def _add(
        self,
        kind: str,
        a: int = -1,
        b: int = -1,
        *,
        racks: tuple[int, ...] = (),
        amount: int = 0,
        at: float = 0.0,
        until: float | None = None,
        after: tuple[str, int] = ("", 0),
    ) -> Self:
        return self.fault(Fault(kind, _ns(at), _ns(until), a, b, racks, amount, *after))

    def cut(self, a: int, b: int, **when: Unpack[When]) -> Self:
        """Nothing gets from a to b; what b says still reaches a."""
        return self._add("cut", a, b, **when)

    def partition(self, *racks: int, **when: Unpack[When]) -> Self:
        """These on one side, all others on the other."""
        return self._add("partition", racks=racks, **when)

    def lose(self, percent: int, a: int = -1, b: int = -1, **when: Unpack[When]) -> Self:
        """A share of the frames between a and b, or of all frames."""
        return self._add("lossy", a, b, amount=percent, **when)

    def shuffle(self, late_s: float, a: int = -1, b: int = -1, **when: Unpack[When]) -> Self:
        """Frames come up to `late_s` later, so that they overtake each other."""
        return self._add("shuffle", a, b, amount=_ns(late_s), **when)

    def slow_link(self, a: int, b: int, late_s: float, **when: Unpack[When]) -> Self:
        """Frames and transfers between a and b take `late_s` longer."""
        return self._add("slow_link", a, b, amount=_ns(late_s), **when)

    def freeze(self, rack: int, **when: Unpack[When]) -> Self:
        """It does nothing, and goes on later as if no time had passed."""
        return self._add("freeze", rack, **when)

    def slow_rack(self, rack: int, times: int, **when: Unpack[When]) -> Self:
        """Its steps take `times` times as long."""
        return self._add("slow_rack", rack, amount=times, **when)

    def slow_worker(self, rack: int, late_s: float, **when: Unpack[When]) -> Self:
        """Its background jobs (encode, merge, digest) take up to `late_s` longer."""
        return self._add("slow_worker", rack, amount=_ns(late_s), **when)

    def flip(
        self, rack: int, percent: int = 50, *, frames: bool = False, **when: Unpack[When]
    ) -> Self:
        """One bit is wrong in a share of the transfers from it, or of its frames."""
        return self._add("flip_frames" if frames else "flip_bytes", rack, amount=percent, **when)

    def spoil(self, rack: int, *, huge: bool = False, **when: Unpack[When]) -> Self:
        """It offers NaN (or 1e30), which its own check does not see, with right checksums."""
        return self._add("huge" if huge else "nan", rack, **when)

    def clock(self, rack: int, ahead_s: float, **start: Unpack[Start]) -> Self:
        """Its clock jumps ahead; a monotonic clock never goes back."""
        return self._add("clock_jump", rack, amount=_ns(ahead_s), **start)

    def drift(self, rack: int, ppm: int, **when: Unpack[When]) -> Self:
        """Its clock runs `ppm` millionths too fast."""
        return self._add("clock_drift", rack, amount=ppm, **when)

    def crash(
        self, rack: int, *, rank: int | None = None, rest_s: float = 0.5, **start: Unpack[Start]
    ) -> Self:
        """For ever. With `rank` that one first, the rest of its rack `rest_s` later."""
        b, amount = (-1, 0) if rank is None else (rank, round(rest_s * 1000) * MS)
        return self._add("crash", rack, b, amount=amount, **start)

    def retire(self, rack: int, *, at: float) -> Self:
        """A person says that a rack which is dead by then will not come back."""
        return self._add("retire", rack, at=at, until=at)

    def restart(self, rack: int, *, until: float, **start: Unpack[Start]) -> Self:
        """It crashes, and comes back at `until` as a new process that remembers nothing."""
        return self._add("restart", rack, until=until, **start)

    def stale(self, rack: int, **when: Unpack[When]) -> Self:
        """Frames for it that find it dead wait, and its next life hears them first."""
        return self._add("stale", rack, **when)

    def heal(self, *, at: float) -> Self:
        """From here on nothing is broken; what crashed stays down."""
        self.scenario = dataclasses.replace(self.scenario, quiet_ns=_ns(at))
        return self
