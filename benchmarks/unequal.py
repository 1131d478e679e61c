"""benchmarks.unequal: what unequal racks lose by training together, without lockstep and without a
fault. Prints one JSON object.

    python -m benchmarks.unequal --seconds 30 --repeats 3

Three racks on loopback that train by sleeping, of the speeds 1 : .5 : .25, all settings but H, P
and tau as they are by default. Two jobs in every repeat: equal batches; and batches of 1024, 4096
and 512 tokens a step, so that the rack that is slower makes more tokens than the fastest one. Then
the same three loops at the same time without mend: what each does alone.

`measured` is the tokens per second of the job in percent of the sum of what the racks make alone,
the lesser of both jobs of a repeat; the median of the repeats. `merged_pct` is how much of the
tokens had been merged when time was up (the rest is in open rounds and not lost), of the rack of
which least was.

Racks must have equal numbers of ranks: rank k exchanges with rank k of the others. Another number
ends with PlanMismatch at the start (docs/faq.md).
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from benchmarks._common import Flat, RackArgs, Racks, arguments, limit, noise, report, spread
from benchmarks._work import Seen, trained, work

SPEEDS = (1.0, 0.5, 0.25)
BATCHES: dict[str, tuple[int, ...]] = {"equal": (1024, 1024, 1024), "batches": (1024, 4096, 512)}
"""Job -> tokens of a step, by rack."""

GOAL_PCT = 95.0


def main() -> None:
    options = _options()
    shares: dict[str, list[float]] = {name: [] for name in BATCHES}
    merged: dict[str, list[float]] = {name: [] for name in BATCHES}
    for _ in range(options.repeats):
        for name in BATCHES:
            one = argparse.Namespace(**{**vars(options), "job": name})
            ended = trained(_rack, one, len(SPEEDS))
            shares[name].append(share_pct(ended, _alone(one)))
            merged[name].append(min(100 * s.tokens_merged / s.tokens for s in ended.values()))
    values = [min(pair) for pair in zip(*shares.values(), strict=True)]
    report(
        "unequal",
        goal=f">= {GOAL_PCT:g} % of the tokens per second of the racks alone",
        values=values,
        passed=statistics.median(values) >= GOAL_PCT,
        options=options,
        unit="%",
        better="higher",
        beside=limit("of the racks alone", "%", [GOAL_PCT]),
        more={
            "share_pct": {name: spread(each, 2) for name, each in shares.items()},
            "merged_pct": {name: spread(each, 1) for name, each in merged.items()},
        },
    )


def _options() -> argparse.Namespace:
    parser = arguments("unequal", __doc__)
    parser.add_argument("--repeats", type=int, default=3, help="of both jobs (default 3)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a job (default 30)")
    parser.add_argument("--numel", type=int, default=1 << 20, help="fp32 elements (default 1M)")
    parser.add_argument("--fragments", type=int, default=4, help="P (default 4)")
    parser.add_argument("--period", type=int, default=64, help="H (default 64)")
    parser.add_argument("--overlap", type=int, default=8, help="tau (default 8)")
    parser.add_argument("--step-ms", type=float, default=50.0, help="of the fastest (default 50)")
    return parser.parse_args()


def share_pct(ended: dict[int, Seen], alone: dict[int, float]) -> float:
    """`alone`: tokens per second, by rack."""
    together = sum(seen.tokens / (seen.at_s - seen.began_s) for seen in ended.values())
    return 100 * together / sum(alone.values())


def _rack(args: RackArgs) -> None:
    options = args.options
    work(
        args,
        options.step_ms / SPEEDS[args.rack],
        tokens=BATCHES[options.job][args.rack],
        sync_period_steps=options.period,
        overlap_steps=options.overlap,
    )


def _alone(options: argparse.Namespace) -> dict[int, float]:
    """Tokens per second of each rack without mend, all at the same time, for as long."""
    racks = Racks(_plain, options, len(SPEEDS))
    try:
        pipes = [racks.start(rack) for rack in range(len(SPEEDS))]
        return {rack: pipe.recv() for rack, pipe in enumerate(pipes)}
    finally:
        racks.close()


def _plain(args: RackArgs) -> None:
    """The loop of `work`, and nothing of mend in it."""
    torch.set_num_threads(1)
    options = args.options
    parameters = list(Flat(options.numel, options.fragments).parameters())
    move = noise(min(p.numel() for p in parameters), 11 + args.rack) * 1e-4
    step, began_s = 0, time.monotonic()
    while time.monotonic() < began_s + options.seconds:
        step += 1
        time.sleep(options.step_ms / SPEEDS[args.rack] / 1e3)
        parameters[step % len(parameters)].data[: move.numel()].add_(move)
    tokens = step * BATCHES[options.job][args.rack]
    args.pipe.send(tokens / (time.monotonic() - began_s))


if __name__ == "__main__":
    main()
