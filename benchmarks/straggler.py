"""benchmarks.straggler: one rack is N times slower; what do the fast ones lose? Prints one JSON
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
import statistics

from benchmarks._common import RackArgs, arguments, limit, report, spread
from benchmarks._work import Seen, trained, work
from mend.coordination.grace import FLOOR_PCT

RACKS, SLOW = 3, 2
FAST = (0, 1)
SHARE_MIN = 50.0
"""Percent of the slow rack's tokens that must be in a merge at any moment, or its work does not
count."""


def main() -> None:
    options = _options()
    jobs = [(_ran(options, 1.0), _ran(options, options.factor)) for _ in range(options.repeats)]
    window_ms = window_of(options)
    costs, shares = costs_ms(jobs, options.gap), merged_pct([slow for _, slow in jobs], (SLOW,))
    report(
        "straggler",
        goal=f"<= {window_ms:g} ms per round, the grace window; its work is merged",
        values=costs,
        passed=statistics.median(costs) <= window_ms and min(shares) >= SHARE_MIN,
        options=options,
        unit="ms",
        beside=limit("the least grace window", "ms", [window_ms]),
        more={
            "lost_pct": spread([100 * ms / (options.gap * options.step_ms) for ms in costs], 2),
            "stall_ms": {
                name: spread([job[which][rack].stall_ms for job in jobs for rack in FAST], 1)
                for which, name in enumerate(("alike", "beside_a_slow_one"))
            },
            "slow_merged_pct": spread(shares, 1),
            "fast_merged_pct": spread(merged_pct([slow for _, slow in jobs], FAST), 1),
            "slow_dropped": spread([slow[SLOW].dropped for _, slow in jobs], 0),
            "merges": spread([slow[0].commits for _, slow in jobs], 0),
        },
    )


def _options() -> argparse.Namespace:
    parser = arguments("straggler", __doc__)
    parser.add_argument("--factor", type=float, default=15.0, help="times slower (default 15)")
    parser.add_argument("--repeats", type=int, default=5, help="of both jobs (default 5)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a job (default 30)")
    parser.add_argument("--numel", type=int, default=1 << 16, help="fp32 elements (default 65536)")
    parser.add_argument("--fragments", type=int, default=2, help="P (default 2)")
    parser.add_argument("--gap", type=int, default=8, help="steps between merges (default 8)")
    parser.add_argument("--step-ms", type=float, default=25.0, help="of training (default 25)")
    parser.add_argument("--grace-window-ms", default="adaptive", help="(default adaptive)")
    return parser.parse_args()


def window_of(options: argparse.Namespace) -> float:
    """Milliseconds that a round waits at least for a late rack that is alive."""
    if options.grace_window_ms == "adaptive":
        return float(options.gap * options.step_ms * FLOOR_PCT / 100)
    return float(options.grace_window_ms)


def _ran(options: argparse.Namespace, factor: float) -> dict[int, Seen]:
    """The last word of every rack after so many seconds of training."""
    one = argparse.Namespace(**{**vars(options), "factor": factor})
    return trained(_rack, one, RACKS)


def _rack(args: RackArgs) -> None:
    options = args.options
    period = options.gap * options.fragments
    slower = options.factor if args.rack == SLOW else 1.0
    work(
        args,
        options.step_ms * slower,
        sync_period_steps=period,
        overlap_steps=options.gap // 2,
        grace_window_ms=options.grace_window_ms,
    )


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
