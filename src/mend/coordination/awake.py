"""The awake clock of a process: time in which it did not run must not count as silence of
others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class AwakeClock:
    """Measures how long this process did not run. While it waits for others, one of its machines,
    which share the clock, has a deadline within a heartbeat. A gap of more than two heartbeats
    counts as sleep, minus half a heartbeat, so that a process that is always late still detects
    silence eventually."""

    heartbeat_ns: int
    slept_ns: int = 0
    """Total sleep."""
    ran_ns: int | None = None

    def run(self, now_ns: int) -> None:
        """Record that the process runs now."""
        gap_ns = 0 if self.ran_ns is None else now_ns - self.ran_ns
        if gap_ns >= 2 * self.heartbeat_ns:
            self.slept_ns += gap_ns - self.heartbeat_ns // 2
        self.ran_ns = now_ns

    def awake_ns(self, due_ns: int) -> int:
        """When a process with something due at `due_ns` has to run in order to count as awake until
        then."""
        return due_ns if self.ran_ns is None else min(due_ns, self.ran_ns + self.heartbeat_ns)


@dataclass
class Sleep:
    """The sleep of the process from the view of one machine. Before every event, the machine shifts
    the times at which it heard others by the result of `take`. Only silence is measured without
    sleep; deadlines, grace windows and stalls stay on the monotonic clock."""

    clock: AwakeClock
    taken_ns: int = 0

    def take(self, now_ns: int) -> int:
        """How long the process has slept since the last call."""
        self.clock.run(now_ns)
        slept_ns = self.clock.slept_ns - self.taken_ns
        self.taken_ns += slept_ns
        return slept_ns
