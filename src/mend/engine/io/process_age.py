"""How long ago this process was started."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path

_loaded_ns = time.monotonic_ns()


def process_age_ns() -> int:
    """Time since this process was started; where the system does not provide it, since mend was
    imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_ns = int(fields[19]) * 10**9 // os.sysconf("SC_CLK_TCK")
        return max(0, time.clock_gettime_ns(time.CLOCK_BOOTTIME) - started_ns)
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic_ns() - _loaded_ns


@cache
def startup_ns() -> int:
    """Time from the start of this process until the first call. It is fixed by then: a later life
    of the rack in the same process takes no longer to start."""
    return process_age_ns()
