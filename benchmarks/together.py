"""benchmarks.together: how many of the rounds have every rack in, without lockstep and without a
fault? Prints one JSON object.

    python -m benchmarks.together --seconds 30 --repeats 3

Racks on loopback that train by sleeping, all settings but H, P and tau as they are by default. Two
jobs in every repeat: two equal racks, of which one begins half a gap between two rounds later; and
four racks of the speeds 1 : 1 : .7 : .5, whose steps take `step-ms` and more.

`measured` is the least over the jobs of a repeat of the rounds with every rack in, in percent of
all rounds until time is up; the median of the repeats. `waited_pct` is what the training thread
waited for others, of the rack that waited most, in percent of its time. `rounds_per_period` are
the rounds of a fragment in a period of rack 0: racks that open rounds in turns have up to 2.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks._common import RackArgs, arguments, limit, report, spread
from benchmarks._work import Seen, trained, work

SPEEDS: dict[str, tuple[float, ...]] = {"apart": (1.0, 1.0), "speeds": (1.0, 1.0, 0.7, 0.5)}
LATE = {"apart": 1}
"""Job -> the rack that begins later."""

WHOLE_PCT_MIN = 95.0
WAITED_PCT_MAX = 1.0

Ended = dict[int, Seen]
"""The last word of every rack."""


def main() -> None:
    options = _options()
    ran = [{name: _ran(options, name) for name in SPEEDS} for _ in range(options.repeats)]
    whole = {name: [whole_pct(each[name]) for each in ran] for name in SPEEDS}
    waited = {name: [waited_pct(each[name]) for each in ran] for name in SPEEDS}
    values = [min(pair) for pair in zip(*whole.values(), strict=True)]
    longest = max(statistics.median(each) for each in waited.values())
    report(
        "together",
        goal=f">= {WHOLE_PCT_MIN:g} % of the rounds, waiting < {WAITED_PCT_MAX:g} % of the time",
        values=values,
        passed=statistics.median(values) >= WHOLE_PCT_MIN and longest < WAITED_PCT_MAX,
        options=options,
        unit="%",
        better="higher",
        beside=limit("of the rounds", "%", [WHOLE_PCT_MIN]),
        more={
            "whole_pct": {name: spread(each, 1) for name, each in whole.items()},
            "waited_pct": {name: spread(each, 2) for name, each in waited.items()},
            "rounds_per_period": {
                name: spread([rounds_per_period(each[name], options) for each in ran], 2)
                for name in SPEEDS
            },
            "rounds_by_racks": {name: [each[name][0].by_racks for each in ran] for name in SPEEDS},
        },
    )


def _options() -> argparse.Namespace:
    parser = arguments("together", __doc__)
    parser.add_argument("--repeats", type=int, default=3, help="of both jobs (default 3)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a job (default 30)")
    parser.add_argument("--numel", type=int, default=1 << 14, help="fp32 elements (default 16384)")
    parser.add_argument("--fragments", type=int, default=2, help="P (default 2)")
    parser.add_argument("--period", type=int, default=32, help="H (default 32)")
    parser.add_argument("--overlap", type=int, default=8, help="tau (default 8)")
    parser.add_argument("--step-ms", type=float, default=25.0, help="of training (default 25)")
    return parser.parse_args()


def _ran(options: argparse.Namespace, name: str) -> Ended:
    one = argparse.Namespace(**{**vars(options), "job": name})
    return trained(_rack, one, len(SPEEDS[name]))


def _rack(args: RackArgs) -> None:
    options = args.options
    half_a_gap = options.period / options.fragments / 2
    late = LATE.get(options.job) == args.rack
    work(
        args,
        options.step_ms / SPEEDS[options.job][args.rack],
        late_ms=half_a_gap * options.step_ms if late else 0.0,
        sync_period_steps=options.period,
        overlap_steps=options.overlap,
    )


def whole_pct(ended: Ended) -> float:
    """Rounds with every rack in, as rack 0 has seen them."""
    rounds = dict(ended[0].by_racks)
    return 100 * rounds.get(len(ended), 0) / max(1, sum(rounds.values()))


def waited_pct(ended: Ended) -> float:
    return max(seen.stall_ms / 10 / (seen.at_s - seen.began_s) for seen in ended.values())


def rounds_per_period(ended: Ended, options: argparse.Namespace) -> float:
    return ended[0].commits / options.fragments / (ended[0].step / options.period)


if __name__ == "__main__":
    main()
