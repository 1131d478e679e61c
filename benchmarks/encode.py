"""benchmarks.encode: the cost of making and encoding a delta. Prints one JSON object.

    python -m benchmarks.encode --numel 50000000

One thread. Variants take turns in every repeat, so that a disturbance of the machine meets all:

NAME offer  all work for an offer with this codec: anchor - snapshot, the check for NaN and Inf,
            the codec, the residual where the codec is lossy, the checksum
NAME again  the same in a later round, which adds the residual of the one before to its delta
NAME codec  the codec alone
NAME decode decoding of the whole vector (powersgd reads its factors once, as in a merge)
memcpy      torch's copy_ of the same elements

`numba` says whether codecs were compiled (`pip install numba`) or run by torch.

A speed is the bytes of the delta (4 per element) per second; memcpy's is what it copies, once.

`measured` is the median over repeats of GB/s of the codec that is farthest below its goal (of a
codec that loses nothing: of its whole offer).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch

from benchmarks._common import Goal, limit, noise, ratios, read_options, report, spread, take_turns
from mend.codec import Codec, codec_named
from mend.engine.compute.buffers import Spare
from mend.engine.compute.numerics import Numerics
from mend.kernels import block_kernels
from mend.merge import MERGES
from mend.outer import Nesterov
from mend.types import Owned, Span

GOALS = {
    "float32": 1.5, "bfloat16": 3.0, "int8": 3.0, "int4": 1.5, "e3m0": 1.5, "topk": 0.5,
    "sparse": 0.5, "powersgd-4": 1.0,
}  # fmt: skip
"""GB/s of input, one thread."""
MATRIX = (1024, 4096)
"""Shape of the delta's matrices, for codecs that depend on it."""
SCALE = 1e-3
SPARE = Spare(3)
"""Large vectors that are kept from offer to offer, as a rank keeps them from round to round."""
OPTIONS = {
    "numel": (50_000_000, "fp32 elements"),
    "codecs": (GOALS, "codecs to measure"),
    "repeats": (9, "one more warms up"),
}


def main() -> None:
    options = read_options("encode", __doc__, OPTIONS)
    torch.set_num_threads(1)
    speeds = _speeds(options, 4 * options.numel / 1e9)
    memcpy = speeds.pop("memcpy")
    judged = {
        name: speeds[f"{name} {'offer' if name == 'float32' else 'codec'}"]
        for name in options.codecs.split(",")
    }
    name = min(judged, key=lambda name: statistics.median(judged[name]) / GOALS[name])
    least = judged[name]
    goal = Goal(f">= {GOALS[name]:g} GB/s, 1 thread ({name})", GOALS[name], "GB/s", better="higher")
    plain = limit("memcpy, 1 thread", "GB/s", memcpy, 2)
    more = {
        "numba": block_kernels("int8") is not None,
        "variants": {
            name: {"GBps": spread(speed, 2), "of_memcpy": spread(ratios(speed, memcpy))}
            for name, speed in speeds.items()
        },
    }
    report("encode", goal, least, options, plain, more)


def _speeds(options: argparse.Namespace, gigabytes: float) -> dict[str, list[float]]:
    """GB/s of every repeat, by variant."""
    anchor = noise(options.numel, 1)
    trained = anchor - SCALE * noise(options.numel, 2)
    snapshot, delta = torch.empty_like(anchor), anchor - trained
    out, residual = torch.empty_like(anchor), delta * 1e-3
    runs: dict[str, Callable[[], object]] = {"memcpy": lambda: out.copy_(delta)}
    parts = []
    for name in options.codecs.split(","):
        numerics = Numerics(codec_named(name), MERGES["mean"](), Nesterov(1.0, 0.0), 1, SPARE)
        parts.append(numerics)
        codecs = numerics.codecs(_owned(options.numel))
        state = torch.empty(codecs.state_numel)
        codecs.first(state)
        codec = codecs.at(state, 0)
        runs[f"{name} offer"] = partial(_offer, numerics, codec, snapshot, None, anchor)
        if not codec.exact:
            runs[f"{name} again"] = partial(_offer, numerics, codec, snapshot, residual, anchor)
        runs[f"{name} codec"] = partial(codec.encode, delta)
        runs[f"{name} decode"] = partial(codec.decode, codec.encode(delta), 0, options.numel, out)
    # An offer is made in the snapshot's memory.
    seconds = take_turns(runs, options.repeats, before=lambda: snapshot.copy_(trained))
    for numerics in parts:
        numerics.close()
    return {name: [gigabytes / s for s in each] for name, each in seconds.items()}


def _owned(numel: int) -> Owned:
    """Return as many matrices as there is room for, and a vector of the rest."""
    size = MATRIX[0] * MATRIX[1]
    spans = [Span(0, min(size, numel - begin)) for begin in range(0, numel, size)]
    shapes = tuple(MATRIX if span.numel == size else (span.numel,) for span in spans)
    return Owned(tuple(spans), numel, shapes)


def _offer(
    numerics: Numerics,
    codec: Codec,
    snapshot: torch.Tensor,
    residual: torch.Tensor | None,
    anchor: torch.Tensor,
) -> str:
    return numerics.encode(snapshot, residual, anchor, codec).checksum


if __name__ == "__main__":
    main()
