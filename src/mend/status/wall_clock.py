"""The time of events: wall time that does not jump while the process runs.

The system clock may be set in the middle of a run, which would falsify rates and durations computed
from its times.
"""

from __future__ import annotations

import time

_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux alone has the first; the other one stands still while the machine sleeps."""

_ZERO_NS = time.time_ns() - time.clock_gettime_ns(_CLOCK)


def wall_ns() -> int:
    """Nanoseconds since the epoch, by the clock as it was when mend was imported. On Linux it
    counts on while the machine sleeps."""
    return _ZERO_NS + time.clock_gettime_ns(_CLOCK)
