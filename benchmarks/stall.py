"""benchmarks.stall: what an overlapped round takes from the training thread. Prints one JSON
object.

    python -m benchmarks.stall --numel 50331648 --rounds 24

Two racks on loopback, one core's worth of training each: matrix products that take `step-ms` per
step, all gradients left out. P fragments, one captured every `gap` steps and applied `overlap`
steps later, which is long enough for the exchange. mend's part of every step is timed by itself.

`measured` is the median over the rounds of both racks of (capture + apply), in milliseconds. A
capture is one copy of the fragment; an apply reads theta, the delta and two anchors and writes
theta, so both grow with the fragment and shrink with the threads that torch may use. `waited_ms` is
what the training thread spent waiting for anything (status().stall_ms_total): 0 is what overlap
promises.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import mend
from benchmarks._common import Flat, RackArgs, arguments, limit, noise, racks, report, spread

GOAL_MS = 5.0
COPIES = 10


def main() -> None:
    options = _options()
    with racks(_rack, options) as pipes:
        found = [pipe.recv() for pipe in pipes]
    rounds = [
        sum(one) for rack in found for one in zip(rack["capture"], rack["apply"], strict=True)
    ]
    report(
        "stall",
        goal=f"<= {GOAL_MS:g} ms per round",
        values=rounds,
        passed=statistics.median(rounds) <= GOAL_MS,
        options=options,
        unit="ms",
        beside=limit(
            "two plain copies of a fragment", "ms", [ms for rack in found for ms in rack["copies"]]
        ),
        more={
            "at_steps_ms": {
                kind: spread([ms for rack in found for ms in rack[kind]], 3)
                for kind in ("capture", "apply", "other")
            },
            "waited_ms": [rack["waited_ms"] for rack in found],
            "missed": [rack["missed"] for rack in found],
            "step_ms": [round(rack["step_ms"], 1) for rack in found],
            "fragment_bytes": 4 * options.numel // options.fragments,
        },
    )


def _options() -> argparse.Namespace:
    parser = arguments("stall", __doc__)
    parser.add_argument(
        "--numel",
        type=int,
        default=50_331_648,
        help="fp32 elements of the model (default 50331648)",
    )
    parser.add_argument("--fragments", type=int, default=4, help="P (default 4)")
    parser.add_argument("--gap", type=int, default=12, help="steps between captures (default 12)")
    parser.add_argument("--overlap", type=int, default=10, help="tau (default 10)")
    parser.add_argument("--rounds", type=int, default=24, help="that are counted (default 24)")
    parser.add_argument(
        "--step-ms", type=float, default=50.0, help="training per step (default 50)"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch, per rack (default 1)")
    options = parser.parse_args()
    if not 0 < options.overlap < options.gap:
        parser.error("--overlap must be less than --gap, so that no step both captures and applies")
    return options


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
    args.pipe.send({**found, "copies": _copies(moves[0])})
    mend.mend_shutdown(model)


def _train(
    runtime: mend.Runtime, parameters: list[Any], moves: list[torch.Tensor], options: Any
) -> dict[str, Any]:
    """Milliseconds of mend in every step, by what was due. The first period warms up."""
    warm_up = options.gap * options.fragments
    last = warm_up + options.gap * options.rounds + options.overlap
    found: dict[str, Any] = {"capture": [], "apply": [], "other": []}
    work_ms = []
    for step in range(1, last + 1):
        started = time.perf_counter()
        _work(options.step_ms)
        moved = step % len(parameters)  # a few of them, so that the step is not all memory traffic
        parameters[moved].data.add_(moves[moved])
        trained = time.perf_counter()
        runtime.step(tokens=1)
        ended = time.perf_counter()
        kind = _kind(runtime, step, options.overlap)
        in_time = kind == "apply" and step - options.overlap > warm_up
        if in_time or (kind != "apply" and warm_up < step <= last - options.overlap):
            found[kind].append((ended - trained) * 1e3)
            work_ms.append((trained - started) * 1e3)
    status = runtime.status()
    found |= {"waited_ms": round(status.stall_ms_total, 3), "missed": status.rounds_missed}
    found["step_ms"] = statistics.median(work_ms)
    return found


def _copies(fragment: torch.Tensor) -> list[float]:
    """Milliseconds of copying it twice, the least that a capture and an apply could take."""
    out, found = torch.empty_like(fragment).zero_(), []
    for _ in range(COPIES):
        started = time.perf_counter()
        out.copy_(fragment)
        out.copy_(fragment)
        found.append((time.perf_counter() - started) * 1e3)
    return found


def _kind(runtime: mend.Runtime, step: int, overlap: int) -> str:
    if runtime.schedule_for(step).fragments:
        return "capture"
    return "apply" if runtime.schedule_for(step - overlap).fragments else "other"


def _work(ms: float) -> None:
    """Matrix products for so long: they release the interpreter, as training does."""
    factor = torch.ones(256, 256)
    until = time.perf_counter() + ms / 1e3
    while time.perf_counter() < until:
        torch.mm(factor, factor)


if __name__ == "__main__":
    main()
