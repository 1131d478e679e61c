"""benchmarks.unequal: what unequal racks lose if they train together, without lockstep and without
a fault. Prints one JSON object.

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
import time

import torch

from benchmarks._common import (
    Flat,
    Goal,
    RackArgs,
    limit,
    noise,
    racks,
    read_options,
    report,
    spreads,
    with_options,
)
from benchmarks._work import Seen, train_racks, work

SPEEDS = (1.0, 0.5, 0.25)
BATCHES: dict[str, tuple[int, ...]] = {"equal": (1024, 1024, 1024), "batches": (1024, 4096, 512)}
"""Job -> tokens of a step, by rack."""

GOAL = Goal(">= 95 % of the tokens per second of the racks alone", 95.0, "%", better="higher")
OPTIONS = {
    "repeats": (3, "of both jobs"),
    "seconds": (30.0, "of a job"),
    "numel": (1 << 20, "fp32 elements"),
    "fragments": (4, "P"),
    "period": (64, "H"),
    "overlap": (8, "tau"),
    "step_ms": (50.0, "of the fastest"),
}


def main() -> None:
    options = read_options("unequal", __doc__, OPTIONS)
    shares: dict[str, list[float]] = {name: [] for name in BATCHES}
    merged: dict[str, list[float]] = {name: [] for name in BATCHES}
    for _ in range(options.repeats):
        for name in BATCHES:
            one = with_options(options, job=name)
            ended = train_racks(_rack, one, len(SPEEDS))
            shares[name].append(share_pct(ended, _alone(one)))
            merged[name].append(min(100 * s.tokens_merged / s.tokens for s in ended.values()))
    values = [min(pair) for pair in zip(*shares.values(), strict=True)]
    plain = limit("of the racks alone", "%", [GOAL.bound])
    more = {"share_pct": spreads(shares, 2), "merged_pct": spreads(merged, 1)}
    report("unequal", GOAL, values, options, plain, more)


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
    with racks(_plain, options, len(SPEEDS)) as pipes:
        return {rack: pipe.recv() for rack, pipe in enumerate(pipes)}


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
