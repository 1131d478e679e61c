"""Decides which events are warnings: those after which a person should act.

Steps that take a little longer and single waits are part of a healthy run, above all on machines
that others use as well. They are recorded, and warnings only where they cost something.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

SLOW_RATIO_LEAST = 1.5
"""A rack that takes less than so many times its usual step is noted without a warning."""

STALL_WINDOW_NS = 60 * 10**9
STALL_PCT_LEAST = 5
"""Waits without a result are one warning per window, if they took this part of it."""

_SLOW = frozenset({"fail-slow", "fail-slow-cause", "fail-slow-over"})
_STALL_MS_LEAST = STALL_WINDOW_NS // 10**6 * STALL_PCT_LEAST // 100


class Loudness:
    """Of one process. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slow: set[str] = set()
        """Racks whose slowness was a warning, and is not over."""
        self._times = self._ms = self._since_ns = 0
        """Waits without a result in this window; 0 ns: none."""

    def warning(
        self, kind: str, fields: Mapping[str, object], now_ns: int
    ) -> Mapping[str, object] | None:
        """Fields of the warning; None: the event is none. Of a kind that may be a warning."""
        if kind in _SLOW:
            with self._lock:
                return fields if self._is_slow(kind, fields) else None
        if kind == "stall-over":
            with self._lock:
                return self._stalled(fields, now_ns)
        return fields

    def _is_slow(self, kind: str, fields: Mapping[str, object]) -> bool:
        rack, ratio = str(fields.get("slow_rack")), fields.get("ratio")  # files may hold anything
        if kind == "fail-slow" and isinstance(ratio, int | float) and ratio >= SLOW_RATIO_LEAST:
            self._slow.add(rack)
        warned = rack in self._slow
        if kind == "fail-slow-over":
            self._slow.discard(rack)
        return warned

    def _stalled(self, fields: Mapping[str, object], now_ns: int) -> Mapping[str, object] | None:
        if now_ns - self._since_ns >= STALL_WINDOW_NS:
            self._times, self._ms, self._since_ns = 0, 0, now_ns
        before, ms = self._ms, fields.get("ms")
        self._times, self._ms = self._times + 1, before + (ms if isinstance(ms, int) else 0)
        if not before < _STALL_MS_LEAST <= self._ms:
            return None
        sums = {"times": self._times, "ms": self._ms, "within_s": STALL_WINDOW_NS // 10**9}
        return {**fields, **sums}
