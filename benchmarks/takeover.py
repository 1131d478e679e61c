"""benchmarks.takeover: what the others notice if the rack that coordinates is killed. Prints one
JSON object.

    python -m benchmarks.takeover --repeats 5

Three racks on loopback, `step-ms` of training per step, a small model in two fragments. Rack 0
coordinates, and ends itself with SIGKILL in the middle. In every repeat three jobs run, one after
the other: with `stall_max_s` as it is by default (0.1), with 1, and with 0. The 15 jobs of five
repeats train for 12 s each, and start three processes each; stderr says which one runs.

`measured` is the median of the seconds from the last merge before the kill to the first one after
it, as the survivors see them; a dead coordinator is noticed after 2 s of silence. `stall_ms` is
what all training threads waited in the whole job, `lost` the offers of the survivors that were
dropped, or were still open at the end: 0 means that every step of theirs was merged.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from itertools import pairwise
from typing import Any

import mend
from benchmarks._common import (
    Flat,
    Goal,
    RackArgs,
    limit,
    noise,
    racks,
    read_options,
    report,
    spread,
    with_options,
)

GOAL = Goal("merging again within 5 s, nothing lost, stall <= stall_max_s", 5.0, "s")
SLACK_MS = 50.0
"""Allowance for waking up, beyond `stall_max_s`."""
RACKS = 3
OPTIONS = {
    "repeats": (5, "of all jobs"),
    "stall_max_s": ("0.1,1,0", "of the jobs"),
    "steps": (240, "of every rack"),
    "kill_at": (90, "step of rack 0"),
    "step_ms": (50.0, "of training"),
}


def main() -> None:
    options = read_options("takeover", __doc__, OPTIONS)
    waits = [float(text) for text in options.stall_max_s.split(",")]
    found: list[dict[str, Any]] = []
    jobs = [wait_s for _ in range(options.repeats) for wait_s in waits]
    for number, wait_s in enumerate(jobs, start=1):
        print(f"takeover: job {number} of {len(jobs)}", file=sys.stderr, flush=True)
        with racks(_rack, with_options(options, stall_max_s=wait_s), RACKS) as pipes:
            found += [pipe.recv() for pipe in pipes[1:]]  # of the survivors
    gaps, lost = [one["gap_s"] for one in found], sum(one["lost"] for one in found)
    stalls = {w: [one["stall_ms"] for one in found if one["limit_s"] == w] for w in waits}
    within = all(one["stall_ms"] <= 1e3 * one["limit_s"] + SLACK_MS for one in found)
    plain = limit("usual gap between merges", "s", [one["usual_s"] for one in found], 2)
    more = {
        "lost": lost,
        "stall_ms_by_stall_max_s": {f"{w:g}": spread(ms, 1) for w, ms in stalls.items()},
        "usual_gap_s": spread([one["usual_s"] for one in found], 2),
        "merges_after_it": sum(one["after"] for one in found),
    }
    report("takeover", GOAL, gaps, options, plain, more, also=lost == 0 and within)


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
    args.pipe.send({"limit_s": options.stall_max_s, **_outcome(merges, runtime.status())})


def _outcome(merges: list[tuple[float, int]], status: Any) -> dict[str, Any]:
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
