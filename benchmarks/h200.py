"""benchmarks.h200: tokens per second on GPUs with mend's exchange, without it, and with training
that waits for it. Started on every rank; each writes JSON lines into --out.

    mend launch --no-witness --racks 2 benchmarks/h200.py --out runs/h200
    mend launch --no-witness --racks 2 --nproc-per-rack 2 benchmarks/h200.py \\
        --parallel fsdp2 --out runs/h200-fsdp2
    python -m benchmarks.h200_table runs/h200 --save h200

A model of the Qwen 2.5 shape with random weights (bf16, fused AdamW, sequences of 1024 random
tokens, other ones on each rack) is trained from the same start in every cell: alone (`none`), with
mend in lockstep while training waits for each exchange (`blocking`), and with mend in lockstep
while training goes on (`concurrent`). Each transfer is made later by a simulated delay. All cells
run in the same processes, and take turns in every repeat. `blocking` and `concurrent` of the same
delay have the same tau, so that their losses are the same bits if nothing but time differs.

Steps are timed by CUDA events (by the host's clock on a CPU) from optimizer step to optimizer step;
the device is synchronized at both ends of a cell only. The warm-up is not counted: it lasts until
every gap between two captures holds a capture and an apply. Python's garbage collector is frozen in
all cells. Without --tau, a first cell alone gives t_step and a first blocking cell the time of an
exchange; tau is then the least whose tau * t_step covers the delay and 1.5 exchanges, if
--steps-max allows it.

The run ends before --budget-s is over; what was measured until then is in --out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

BEGAN = time.monotonic()
# Read by cuBLAS when it is first used: the same sums in the same order in every run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if not __package__:  # started by its path: the folder that holds `benchmarks` is not searched
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PRESETS = {
    "single": {"shape": "1.5b", "repeats": 3, "delays": "0,500,1000,2000", "budget_s": 330.0},
    "fsdp2": {"shape": "3b", "repeats": 2, "delays": "0,2000", "budget_s": 150.0},
}
"""Defaults, so that two H200s need about 320 s for the first and four about 140 s for the second:
400 TFLOP/s of bf16, 4 s to join and as long as an exchange per capture."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options; those that are left out come from PRESETS."""
    parser = argparse.ArgumentParser(
        prog="mend launch --no-witness --racks 2 benchmarks/h200.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(name: str, kind: type, default: object, text: str) -> None:
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)

    parser.add_argument("--out", type=Path, required=True, help="folder for the ranks' lines")
    parser.add_argument("--parallel", choices=sorted(PRESETS), default="single",
                        help="inside a rack: one GPU, or fully_shard over its ranks")  # fmt: skip
    add("shape", str, None, "tiny, 1.5b, 3b or 7b (default 1.5b; fsdp2: 3b)")
    add("repeats", int, None, "of all cells (default 3; fsdp2: 2)")
    add("delays", str, None, "of a transfer, ms (default 0,500,1000,2000; fsdp2: 0,2000)")
    add("budget-s", float, None, "seconds the run may take (default 330; fsdp2: 150)")
    add("sequences", int, 8, "per rank and step (default 8)")
    add("positions", int, 1024, "tokens of a sequence (default 1024)")
    add("fragments", int, 8, "P (default 8)")
    add("gap", int, 8, "steps between two captures; H = gap * P (default 8)")
    add("gaps-measured", int, 2, "a cell counts so many gaps (default 2)")
    add("steps-max", int, 30, "steps of a cell at most, which limits tau (default 30)")
    add("tau", str, "auto", "auto, or one per delay: 6,8,10,14")
    add("payload", str, "float32", "float32, bfloat16 or a codec: what deltas are sent as")
    add("encode-on", str, "host", "host or device: where a codec encodes (default host)")
    add("learning-rate", float, 1e-4, "of AdamW (default 1e-4)")
    add("seed", int, 0, "of the weights; the tokens' is this and the rank's numbers")
    parser.add_argument("--recompute", action="store_true", help="checkpoint every block")
    options = parser.parse_args(argv)
    for name, value in PRESETS[options.parallel].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.delays = tuple(int(delay) for delay in options.delays.split(","))
    if options.tau != "auto":
        options.tau = tuple(int(tau) for tau in options.tau.split(","))
        if len(options.tau) != len(options.delays):
            parser.error("--tau needs one per delay")
        longest = max(options.tau) + options.gap * options.gaps_measured
        if longest > options.steps_max:
            parser.error(
                f"a cell takes tau + gap * gaps-measured = {longest} steps: raise --steps-max "
                f"{options.steps_max} or lower --tau"
            )
    return options


if __name__ == "__main__":
    from benchmarks.h200_rank import run

    run(arguments(), BEGAN)
