"""benchmarks.stall: the time of the training thread that an overlapped round takes. Prints one JSON
object.

    python -m benchmarks.stall --numel 50331648 --rounds 24

Two racks on loopback, one core's worth of training each: matrix products that take `step-ms` per
step, all gradients left out. P fragments, one captured every `gap` steps and applied when its
result is there, at most `overlap` steps later. mend's part of every step is timed by itself.

`measured` is the median over the rounds of both racks of (capture + apply), in milliseconds. A
capture is one copy of the fragment; an apply reads theta, the delta and two anchors and writes
theta, so both grow with the fragment and shrink with the threads that torch may use. `waited_ms` is
what the training thread spent waiting for anything (status().stall_ms_total): 0 is what overlap
promises.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

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
    take_turns,
)

GOAL = Goal("<= 3 ms per round", 3.0, "ms")
COPIES = 10
OPTIONS = {
    "numel": (50_331_648, "fp32 elements of the model"),
    "fragments": (4, "P"),
    "gap": (12, "steps between captures"),
    "overlap": (10, "tau, less than --gap, so that no step both captures and applies"),
    "rounds": (24, "that are counted"),
    "step_ms": (50.0, "training per step"),
    "threads": (1, "of torch, per rack"),
}


def main() -> None:
    options = read_options("stall", __doc__, OPTIONS)
    if not 0 < options.overlap < options.gap:
        sys.exit("stall: --overlap must be at least 1 and less than --gap")
    with racks(_rack, options) as pipes:
        found = [pipe.recv() for pipe in pipes]
    rounds = [
        sum(one) for rack in found for one in zip(rack["capture"], rack["apply"], strict=True)
    ]
    plain = limit(
        "two plain copies of a fragment", "ms", [ms for rack in found for ms in rack["copies"]]
    )
    more = {
        "at_steps_ms": {
            kind: spread([ms for rack in found for ms in rack[kind]], 3)
            for kind in ("capture", "apply", "other")
        },
        "waited_ms": [rack["waited_ms"] for rack in found],
        "missed": [rack["missed"] for rack in found],
        "step_ms": [round(rack["step_ms"], 1) for rack in found],
        "fragment_bytes": 4 * options.numel // options.fragments,
    }
    report("stall", GOAL, rounds, options, plain, more)


def _rack(args: RackArgs) -> None:
    options = args.options
    torch.set_num_threads(options.threads)
    model = Flat(options.numel, options.fragments)
    config = args.config(
        fragments=options.fragments,
        sync_period_steps=options.gap * options.fragments,
        overlap_steps=options.overlap,
        stall_max_s=30.0,
        grace_window_ms=5000.0,
    )
    moves = [noise(p.numel(), 11 + args.rack) * 1e-4 for p in model.parameters()]
    runtime = mend.mend_init(model, config)
    found = _train(runtime, list(model.parameters()), moves, options)
    fragment, copy = moves[0], torch.zeros_like(moves[0])

    def copy_twice() -> None:
        """The least that a capture and an apply could take."""
        copy.copy_(fragment)
        copy.copy_(fragment)

    copies_s = take_turns({"copies": copy_twice}, COPIES)["copies"]
    args.pipe.send({**found, "copies": [1e3 * s for s in copies_s]})
    mend.mend_shutdown(model)


def _train(
    runtime: mend.Runtime, parameters: list[Any], moves: list[torch.Tensor], options: Any
) -> dict[str, Any]:
    """Milliseconds of mend in every step, by what happened in it: an offer is in flight from its
    capture to the apply of its merge. The first period warms up."""
    warm_up = options.gap * options.fragments
    last = warm_up + options.gap * options.rounds + options.overlap
    found: dict[str, Any] = {"capture": [], "apply": [], "other": []}
    work_ms, capture_ms = [], 0.0
    for step in range(1, last + 1):
        started = time.perf_counter()
        _work(options.step_ms)
        flew = runtime.outer_step_in_flight()
        moved = step % len(parameters)  # a few of them, so that the step is not all memory traffic
        parameters[moved].data.add_(moves[moved])
        trained = time.perf_counter()
        runtime.step(tokens=1)
        ended = time.perf_counter()
        mend_ms, flies = (ended - trained) * 1e3, runtime.outer_step_in_flight()
        if step > warm_up:
            work_ms.append((trained - started) * 1e3)
        if flies and not flew:
            capture_ms = mend_ms if step > warm_up else 0.0
        elif flew and not flies and capture_ms:
            found["capture"].append(capture_ms)
            found["apply"].append(mend_ms)
        elif step > warm_up:
            found["other"].append(mend_ms)
    status = runtime.status()
    found |= {"waited_ms": round(status.stall_ms_total, 3), "missed": status.rounds_missed}
    found["step_ms"] = statistics.median(work_ms)
    return found


def _work(ms: float) -> None:
    """Matrix products for so long: they release the interpreter, as training does."""
    factor = torch.ones(256, 256)
    until = time.perf_counter() + ms / 1e3
    while time.perf_counter() < until:
        torch.mm(factor, factor)


if __name__ == "__main__":
    main()
