"""Series of a bounded length, however long a run is. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

CURVE_POINTS_MAX = 2000
BINS_MAX = 160


@dataclass(frozen=True, slots=True)
class Point:
    """The progress of a rank. Counters go on over its lives: a restart does not begin at 0."""

    at_ns: int
    step: int
    tokens: int
    stall_ms: float
    bytes_sent: int
    bytes_received: int


@dataclass
class Track:
    """Every `stride`-th point of a counter, and always the first and the newest. What lies between
    two kept points is exact: they are sums."""

    stride: int = 1
    kept: list[Point] = field(default_factory=list)
    newest: Point | None = None
    _count: int = 0

    def add(self, point: Point) -> None:
        if self._count % self.stride == 0:
            self.kept.append(point)
        self._count += 1
        self.newest = point
        if len(self.kept) > CURVE_POINTS_MAX:
            self.kept, self.stride = self.kept[::2], 2 * self.stride

    def points(self) -> list[Point]:
        """Return the points in the order of time."""
        if self.newest is None or self.kept[-1] is self.newest:
            return list(self.kept)
        return [*self.kept, self.newest]


@dataclass
class Curve:
    """Recorded values: while they are many, each point is the mean of `width` neighbours."""

    width: int = 1
    tokens: list[float] = field(default_factory=list)
    at_ns: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    odd: int = 0
    """Values that are NaN or infinite."""
    _open: list[tuple[int, int, float]] = field(default_factory=list)

    def add(self, tokens: int, at_ns: int, value: float) -> None:
        self.odd += not math.isfinite(value)
        self._open.append((tokens, at_ns, value))
        if len(self._open) >= self.width:
            self._close()
        if len(self.values) > CURVE_POINTS_MAX:
            self.tokens, self.at_ns, self.values = (
                _pairs(self.tokens),
                _pairs(self.at_ns),
                _pairs(self.values),
            )
            self.width *= 2

    def _close(self) -> None:
        many = len(self._open)
        for place, column in enumerate((self.tokens, self.at_ns, self.values)):
            # Differences first: times in ns are too large for a mean of floats.
            first = self._open[0][place]
            more = sum(each[place] - first for each in self._open) / many if many > 1 else 0
            column.append(first + more)
        self._open = []

    def finish(self) -> None:
        """Make the last point of the values that are left over."""
        if self._open:
            self._close()


def _pairs(column: list[float]) -> list[float]:
    """Means of neighbours; one that is left over stays as it is."""
    means = [a + (b - a) / 2 for a, b in zip(column[::2], column[1::2], strict=False)]
    return means + column[len(means) * 2 :]


@dataclass
class Strip:
    """Per rack, in how many of `width` rounds after each other it was merged."""

    width: int = 1
    rounds: int = 0
    bins: dict[int, list[int]] = field(default_factory=dict)

    def add(self, racks: set[int]) -> None:
        place = self.rounds // self.width
        if place >= BINS_MAX:
            self.width *= 2
            self.bins = {
                rack: [sum(bins[i : i + 2]) for i in range(0, len(bins), 2)]
                for rack, bins in self.bins.items()
            }
            place = self.rounds // self.width
        self.rounds += 1
        for rack in racks:
            bins = self.bins.setdefault(rack, [])
            bins += [0] * (place + 1 - len(bins))
            bins[place] += 1

    def shares(self, rack: int) -> list[float]:
        """Per bin the part of its rounds that the rack was merged in, 0..1."""
        many = -(-self.rounds // self.width)
        found = self.bins.get(rack, [])
        sizes = [min(self.width, self.rounds - i * self.width) for i in range(many)]
        counts = [*found, *[0] * (many - len(found))]
        return [count / size for count, size in zip(counts, sizes, strict=True)]
