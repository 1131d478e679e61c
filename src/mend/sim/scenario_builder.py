"""Scenarios by hand: calls that add one fault each and return the world."""

from __future__ import annotations

import dataclasses
from typing import Self

from mend.sim.faults import Broken
from mend.sim.scenario import FOR_EVER, Fault, Scenario
from mend.types import MS, SECOND


def _ns(seconds: float | None) -> int:
    return FOR_EVER if seconds is None else round(seconds * SECOND)


class Writer:
    """Times in seconds of virtual time; `until` left out: for ever. The witness is rack WITNESS.

    `after=("Orders", 3)` on any of them: not at a time, but right behind the third message of that
    name which rack `a` sends from `at` on; `until - at` is then how long.
    """

    scenario: Scenario
    broken: Broken

    def fault(self, fault: Fault) -> Self:
        """Any fault at all."""
        self.scenario = self.scenario.without(faults=(*self.scenario.faults, fault))
        return self

    def _add(
        self,
        kind: str,
        a: int,
        at: float,
        until: float | None,
        b: int = -1,
        racks: tuple[int, ...] = (),
        amount: int = 0,
        after: tuple[str, int] | None = None,
    ) -> Self:
        name, nth = after or ("", 0)
        return self.fault(Fault(kind, _ns(at), _ns(until), a, b, racks, amount, name, nth))

    def cut(
        self,
        a: int,
        b: int,
        *,
        at: float = 0.0,
        until: float | None = None,
        after: tuple[str, int] | None = None,
    ) -> Self:
        """Nothing gets from a to b; what b says still reaches a."""
        return self._add("cut", a, at, until, b, after=after)

    def partition(self, *racks: int, at: float = 0.0, until: float | None = None) -> Self:
        """These on one side, all others on the other."""
        return self._add("partition", -1, at, until, racks=racks)

    def lose(
        self,
        percent: int,
        a: int = -1,
        b: int = -1,
        *,
        at: float = 0.0,
        until: float | None = None,
    ) -> Self:
        """So many of the frames between a and b, or of all."""
        return self._add("lossy", a, at, until, b, amount=percent)

    def shuffle(
        self,
        late_s: float,
        a: int = -1,
        b: int = -1,
        *,
        at: float = 0.0,
        until: float | None = None,
    ) -> Self:
        """Frames come up to so much later, so that they overtake each other."""
        return self._add("shuffle", a, at, until, b, amount=_ns(late_s))

    def slow_link(
        self, a: int, b: int, late_s: float, *, at: float = 0.0, until: float | None = None
    ) -> Self:
        return self._add("slow_link", a, at, until, b, amount=_ns(late_s))

    def freeze(
        self,
        rack: int,
        *,
        at: float = 0.0,
        until: float | None = None,
        after: tuple[str, int] | None = None,
    ) -> Self:
        """It does nothing, and goes on later as if no time had passed."""
        return self._add("freeze", rack, at, until, after=after)

    def slow_rack(
        self, rack: int, times: int, *, at: float = 0.0, until: float | None = None
    ) -> Self:
        """Its steps take so many times as long."""
        return self._add("slow_rack", rack, at, until, amount=times)

    def slow_worker(
        self, rack: int, late_s: float, *, at: float = 0.0, until: float | None = None
    ) -> Self:
        """Its background jobs (encode, merge, digest) take up to so much longer."""
        return self._add("slow_worker", rack, at, until, amount=_ns(late_s))

    def flip(
        self,
        rack: int,
        percent: int = 50,
        *,
        frames: bool = False,
        at: float = 0.0,
        until: float | None = None,
    ) -> Self:
        """One bit is wrong in so many of the transfers from it, or of its frames."""
        kind = "flip_frames" if frames else "flip_bytes"
        return self._add(kind, rack, at, until, amount=percent)

    def spoil(
        self, rack: int, *, huge: bool = False, at: float = 0.0, until: float | None = None
    ) -> Self:
        """It offers NaN (or 1e30) behind its own check, with the checksums of just that."""
        return self._add("huge" if huge else "nan", rack, at, until)

    def clock(self, rack: int, ahead_s: float, *, at: float = 0.0) -> Self:
        """Its clock jumps ahead; a monotonic clock never goes back."""
        return self._add("clock_jump", rack, at, None, amount=_ns(ahead_s))

    def drift(self, rack: int, ppm: int, *, at: float = 0.0, until: float | None = None) -> Self:
        """Its clock runs so many millionths too fast."""
        return self._add("clock_drift", rack, at, until, amount=ppm)

    def crash(
        self,
        rack: int,
        *,
        rank: int | None = None,
        rest_s: float = 0.5,
        at: float = 0.0,
        after: tuple[str, int] | None = None,
    ) -> Self:
        """For ever. With `rank` that one first, the rest of its rack `rest_s` later."""
        b, amount = (-1, 0) if rank is None else (rank, round(rest_s * 1000) * MS)
        return self._add("crash", rack, at, None, b, amount=amount, after=after)

    def retire(self, rack: int, *, at: float) -> Self:
        """A person says that a rack which is dead by then will not come back."""
        return self._add("retire", rack, at, at)

    def restart(
        self, rack: int, *, at: float = 0.0, until: float, after: tuple[str, int] | None = None
    ) -> Self:
        """Crashes at `at`, comes back at `until` as a new process that remembers nothing."""
        return self._add("restart", rack, at, until, after=after)

    def stale(self, rack: int, *, at: float = 0.0, until: float | None = None) -> Self:
        """Frames for it that find it dead wait, and its next life hears them first."""
        return self._add("stale", rack, at, until)

    def heal(self, *, at: float) -> Self:
        """From here on nothing is broken; what crashed stays down."""
        self.scenario = dataclasses.replace(self.scenario, quiet_ns=_ns(at))
        return self
