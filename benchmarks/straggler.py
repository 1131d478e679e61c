"""benchmarks.straggler: what the fast racks lose if one rack is N times slower. Prints one JSON
object.

    python -m benchmarks.straggler --factor 15 --repeats 5

Three racks on loopback that train by sleeping `step-ms` per step, a merge every `gap` steps, all
settings as they are by default. In every repeat the job runs twice for `seconds`: with rack 2 as
fast as the others, and with rack 2 `factor` times slower.

`measured` is the median over repeats and fast racks of the milliseconds that a round costs more of
a fast rack's time beside the slow one: the difference of the time per step, times the steps between
merges. The limit is the least that the adaptive grace window waits for a late rack, a quarter of
the time between merges. `lost_pct` is the same as a share of the fast rack's time, `stall_ms` what
it waited in all. `slow_merged_pct` is the share of the slow rack's tokens that was in a merge when
time was up (the rest is in its open offers, and not lost), `fast_merged_pct` the same of the fast
ones in the same job; `slow_dropped` counts its offers that were too old to be merged, so that the
next one had to bring the same work again. `--grace-window-ms` sets a window; it is the limit then.
"""

from __future__ import annotations

import argparse

from benchmarks._common import Goal, RackArgs, limit, read_options, report, spread, with_options
from benchmarks._work import JOB, Seen, every_gap, train_racks, work
from mend.coordination.grace import FLOOR_PCT

RACKS, SLOW = 3, 2
FAST = (0, 1)
OPTIONS = {
    "factor": (15.0, "times slower"),
    "repeats": (5, "of both jobs"),
    "seconds": (30.0, "of a job"),
    **JOB,
    "grace_window_ms": ("adaptive", "of a round"),
}
SHARE_MIN = 50.0
"""Percent of the slow rack's tokens that must be in a merge at any moment, or its work does not
count."""


def main() -> None:
    options = read_options("straggler", __doc__, OPTIONS)
    jobs = [(_run(options, 1.0), _run(options, options.factor)) for _ in range(options.repeats)]
    window_ms = window_of(options)
    costs, shares = costs_ms(jobs, options.gap), merged_pct([slow for _, slow in jobs], (SLOW,))
    wanted = f"<= {window_ms:g} ms per round, the grace window; its work is merged"
    goal = Goal(wanted, window_ms, "ms")
    plain = limit("the least grace window", "ms", [window_ms])
    more = {
        "lost_pct": spread([100 * ms / (options.gap * options.step_ms) for ms in costs], 2),
        "stall_ms": {
            name: spread([job[which][rack].stall_ms for job in jobs for rack in FAST], 1)
            for which, name in enumerate(("alike", "beside_a_slow_one"))
        },
        "slow_merged_pct": spread(shares, 1),
        "fast_merged_pct": spread(merged_pct([slow for _, slow in jobs], FAST), 1),
        "slow_dropped": spread([slow[SLOW].dropped for _, slow in jobs], 0),
        "merges": spread([slow[0].commits for _, slow in jobs], 0),
    }
    report("straggler", goal, costs, options, plain, more, also=min(shares) >= SHARE_MIN)


def window_of(options: argparse.Namespace) -> float:
    """Milliseconds that a round waits at least for a late rack that is alive."""
    if options.grace_window_ms == "adaptive":
        return float(options.gap * options.step_ms * FLOOR_PCT / 100)
    return float(options.grace_window_ms)


def _run(options: argparse.Namespace, factor: float) -> dict[int, Seen]:
    """The last observation of every rack after so many seconds of training."""
    return train_racks(_rack, with_options(options, factor=factor), RACKS)


def _rack(args: RackArgs) -> None:
    options = args.options
    slower = options.factor if args.rack == SLOW else 1.0
    window = options.grace_window_ms
    work(args, options.step_ms * slower, grace_window_ms=window, **every_gap(options))


def costs_ms(jobs: list[tuple[dict[int, Seen], dict[int, Seen]]], gap: int) -> list[float]:
    """Milliseconds per round that a fast rack lost, for every repeat and fast rack."""
    return [
        (step_s(slow[rack]) - step_s(alike[rack])) * gap * 1e3
        for alike, slow in jobs
        for rack in FAST
    ]


def step_s(last: Seen) -> float:
    """Seconds of wall time per step."""
    return (last.at_s - last.began_s) / last.step


def merged_pct(jobs: list[dict[int, Seen]], racks: tuple[int, ...]) -> list[float]:
    return [100 * job[rack].tokens_merged / job[rack].tokens for job in jobs for rack in racks]


if __name__ == "__main__":
    main()
