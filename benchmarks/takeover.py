"""benchmarks.takeover: the rack that coordinates is killed; what do the others notice? Prints one
JSON object.

    python -m benchmarks.takeover --repeats 5

Three racks on loopback, `step-ms` of training per step, a small model in two fragments. Rack 0
coordinates, and ends itself with SIGKILL in the middle. In every repeat the job runs twice, one
after the other: with `stall_max_s` as it is by default (0.1), with 1, and with 0.

`measured` is the median of the seconds from the last merge before the kill to the first one after
it, as the survivors see them; a dead coordinator is noticed after 2 s of silence. `stall_ms` is
what all training threads waited in the whole job, `lost` the offers of the survivors that were
dropped, or were still open at the end: 0 means that every step of theirs was merged.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from itertools import pairwise
from typing import Any

import mend
from benchmarks._common import Flat, RackArgs, arguments, limit, noise, racks, report, spread

GOAL_S = 5.0
SLACK_MS = 50.0
"""For waking up, beyond `stall_max_s`."""
RACKS = 3


def main() -> None:
    options = _options()
    waits = [float(text) for text in options.stall_max_s.split(",")]
    found: list[dict[str, Any]] = []
    for _ in range(options.repeats):
        for wait_s in waits:
            found += _job(options, wait_s)
    gaps, lost = [one["gap_s"] for one in found], sum(one["lost"] for one in found)
    stalls = {w: [one["stall_ms"] for one in found if one["limit_s"] == w] for w in waits}
    within = all(one["stall_ms"] <= 1e3 * one["limit_s"] + SLACK_MS for one in found)
    report(
        "takeover",
        goal=f"merging again within {GOAL_S:g} s, nothing lost, stall <= stall_max_s",
        values=gaps,
        passed=statistics.median(gaps) <= GOAL_S and lost == 0 and within,
        options=options,
        unit="s",
        beside=limit("usual gap between merges", "s", [one["usual_s"] for one in found], 2),
        more={
            "lost": lost,
            "stall_ms_by_stall_max_s": {f"{w:g}": spread(ms, 1) for w, ms in stalls.items()},
            "usual_gap_s": spread([one["usual_s"] for one in found], 2),
            "merges_after_it": sum(one["after"] for one in found),
        },
    )


def _options() -> argparse.Namespace:
    parser = arguments("takeover", __doc__)
    parser.add_argument("--repeats", type=int, default=5, help="of both jobs (default 5)")
    parser.add_argument("--stall-max-s", default="0.1,1,0", help="of the jobs (default 0.1,1,0)")
    parser.add_argument("--steps", type=int, default=240, help="of every rack (default 240)")
    parser.add_argument("--kill-at", type=int, default=90, help="step of rack 0 (default 90)")
    parser.add_argument("--step-ms", type=float, default=50.0, help="of training (default 50)")
    return parser.parse_args()


def _job(options: argparse.Namespace, stall_max_s: float) -> list[dict[str, Any]]:
    """What the survivors tell."""
    one = argparse.Namespace(**{**vars(options), "stall_max_s": stall_max_s})
    with racks(_rack, one, RACKS) as pipes:
        return [pipe.recv() for pipe in pipes[1:]]


def _rack(args: RackArgs) -> None:
    options = args.options
    model = Flat(1 << 16, 2)
    config = args.config(
        fragments=2,
        sync_period_steps=16,
        overlap_steps=4,
        stall_max_s=options.stall_max_s,
        shutdown_timeout_s=20.0,
    )
    moves = [noise(p.numel(), 11 + args.rack) * 1e-4 for p in model.parameters()]
    runtime = mend.mend_init(model, config)
    merges = [(time.monotonic(), 0)]
    for step in range(1, options.steps + 1):
        time.sleep(options.step_ms / 1e3)
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.data.add_(move)
        runtime.step(tokens=1)
        if args.rack == 0 and step == options.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        commits = runtime.status().rounds_committed
        if commits > merges[-1][1]:
            merges.append((time.monotonic(), commits))
    mend.mend_shutdown(model)
    args.pipe.send({"limit_s": options.stall_max_s, **_told(merges, runtime.status())})


def _told(merges: list[tuple[float, int]], status: Any) -> dict[str, Any]:
    times = [at for at, _ in merges]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    widest = max(range(len(gaps)), key=gaps.__getitem__)
    missed = status.rounds_missed
    return {
        "gap_s": gaps[widest],
        "usual_s": statistics.median(gaps),
        "after": len(gaps) - widest,
        "stall_ms": status.stall_ms_total,
        "lost": status.ledger.open + missed.get("offer dropped: too old", 0),
    }


if __name__ == "__main__":
    main()
