"""The clock of events: wall time that does not jump while the process runs.

If the system clock is set during a run, rates and durations computed from it would be wrong.
"""

from __future__ import annotations

import time

_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Only Linux has the first one. The other does not advance while the machine sleeps."""

_ZERO_NS = time.time_ns() - time.clock_gettime_ns(_CLOCK)


def wall_ns() -> int:
    """Nanoseconds since the epoch, by the system clock as it was set when mend was imported. On
    Linux it advances while the machine sleeps."""
    return _ZERO_NS + time.clock_gettime_ns(_CLOCK)
