"""The grace window: how long a round waits for further racks once K offers have arrived."""

from __future__ import annotations

from mend.types import SECOND

SHARE_PCT = 50
"""gamma: percentage of the slack that may be spent waiting."""

FLOOR_PCT = 25
"""Percentage of the gap between rounds that a round always waits; not 0 for the reasons in
docs/internals/DECISIONS.md."""

WINDOW_NS_MAX = 1 * SECOND
"""Limit of the window if there is no slack, or before the times are known."""


class Mean:
    """Exponential moving average in integer ns, decay 0.1, starting at the first sample."""

    def __init__(self) -> None:
        self.value_ns: int | None = None

    def observe(self, sample_ns: int) -> None:
        old = self.value_ns
        self.value_ns = sample_ns if old is None else old + (sample_ns - old) // 10


def adaptive_grace_ns(
    *,
    step_ns: int,
    quorum_ns: int | None,
    sync_ns: int | None,
    overlap_steps: int,
    gap_steps: int,
    limit_ns: int,
) -> int:
    """Decoupled DiLoCo, Eq. 3: wait gamma * slack, at most one gap between rounds.

    slack = tau t_step - (t_quorum + t_sync).

    The paper's window is 0 until all three times are known, and whenever the slack is negative. The
    first round, and every round over a link that is slower than the overlap, would then merge the
    first rack alone. So without slack the window is a quarter of the gap between rounds, and before
    the times are known a whole gap, both at most `limit_ns`.
    """
    gap_ns = max(step_ns * gap_steps, 0)
    if step_ns == 0 or quorum_ns is None or sync_ns is None:
        return min(gap_ns or limit_ns, limit_ns)
    slack_ns = overlap_steps * step_ns - quorum_ns - sync_ns
    floor_ns = min(gap_ns * FLOOR_PCT // 100, limit_ns)
    return max(floor_ns, min(gap_ns, slack_ns * SHARE_PCT // 100))
