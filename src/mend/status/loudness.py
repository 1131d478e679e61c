"""Decides which loud events are shown: those that a person should act on.

Slightly longer steps and single waits are part of a healthy run, above all on shared machines. They
are always recorded, but shown only if they cost enough.
"""

from __future__ import annotations

import threading

from msgspec.structs import replace

from mend.events.base import LoggedEvent
from mend.events.kinds import RackSlow, RackSlowCause, RackSlowOver, StallOver

SLOW_RATIO_LEAST = 1.5
"""A rack whose steps take less than this multiple of their usual time is recorded without a
warning."""

STALL_WINDOW_NS = 60 * 10**9
STALL_PCT_LEAST = 5
"""Waits without a result give one warning per window, if they took this percentage of it."""

_STALL_MS_LEAST = STALL_WINDOW_NS // 10**6 * STALL_PCT_LEAST // 100


class Loudness:
    """The filter of one process. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slow: set[int] = set()
        """Racks whose slowness was shown as a warning and has not ended."""
        self._times = self._ms = self._since_ns = 0
        """Waits without a result in this window; 0 ns: none."""

    def shown(self, event: LoggedEvent, now_ns: int) -> LoggedEvent | None:
        """The event to show; None: it is not loud, or not now."""
        match event:
            case RackSlow() | RackSlowCause() | RackSlowOver():
                with self._lock:
                    return event if self._is_slow(event) else None
            case StallOver():
                with self._lock:
                    return self._stalled(event, now_ns)
        return event if event.loud else None

    def _is_slow(self, event: RackSlow | RackSlowCause | RackSlowOver) -> bool:
        if isinstance(event, RackSlow) and event.ratio >= SLOW_RATIO_LEAST:
            self._slow.add(event.slow_rack)
        warned = event.slow_rack in self._slow
        if isinstance(event, RackSlowOver):
            self._slow.discard(event.slow_rack)
        return warned

    def _stalled(self, event: StallOver, now_ns: int) -> StallOver | None:
        if now_ns - self._since_ns >= STALL_WINDOW_NS:
            self._times, self._ms, self._since_ns = 0, 0, now_ns
        before = self._ms
        self._times, self._ms = self._times + 1, before + event.ms
        if not before < _STALL_MS_LEAST <= self._ms:
            return None
        within_s = STALL_WINDOW_NS // 10**9
        return replace(event, times=self._times, ms=self._ms, within_s=within_s)
