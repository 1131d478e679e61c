"""benchmarks.device_encode: the cost of an offer that a GPU encodes. Prints one JSON object.

    python -m benchmarks.device_encode --numel 100000000

Needs a GPU and Triton. Variants take turns in every repeat:

copy        torch's copy_ of the elements, on the device
NAME kernel the kernel that makes an offer of snapshot, anchor and residual: per element it reads 12
            bytes and writes 8 and the payload (topk, which has no residual, reads 8). A speed is
            the bytes read and written per second.
NAME odd    the same of one element less, which vectors do not divide
host        a capture with encode_on="host": copy on the device, then fp32 over the bus
NAME device a capture with encode_on="device": copy on the device, kernel, the parcel over the bus

Of captures the time on the stream is in `captures`, with what the training thread takes to launch
one, and the bytes that cross the bus.

`measured` is the median over repeats of the slowest codec's speed over that of the copy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks._common import Goal, limit, noise, ratios, read_options, report, spread
from mend.codec import codec_named
from mend.codec.on_device import ON_DEVICE, DeviceEncoder, device_encoder
from mend.engine.compute.numerics import keeps_in_weights
from mend.fragment import FragmentView, build_plan
from mend.fragment.device import Side
from mend.fragment.shards import replicated

GOAL = 0.6
TENSOR_NUMEL = 1 << 22
SCALE = 1e-3
OPTIONS = {
    "numel": (100_000_000, "fp32 elements"),
    "codecs": (dict.fromkeys(ON_DEVICE), "codecs to measure"),
    "repeats": (9, "two more warm up"),
}


def main() -> None:
    options = read_options("device_encode", __doc__, OPTIONS)
    device = torch.device("cuda")
    numel = options.numel
    anchor_N = noise(numel, 1).to(device)
    snapshot_N = anchor_N - SCALE * noise(numel, 2).to(device)
    residual_N = SCALE / 8 * noise(numel, 3).to(device)
    speeds, seconds = dict[str, list[float]](), dict[str, list[float]]()
    launches = dict[str, list[float]]()
    runs: dict[str, tuple[float, Callable[[], object]]] = {}
    out_N = torch.empty_like(anchor_N)
    runs["copy"] = 8.0 * numel, lambda: out_N.copy_(anchor_N)
    encoders = {
        name: device_encoder(codec_named(name), keeps_in_weights(codec_named(name), "carry"))
        for name in options.codecs.split(",")
    }
    for name, encoder in encoders.items():
        owed_N = None if encoder.in_weights else residual_N
        for kind, count in (("kernel", numel), ("odd", numel - 1)):
            given = (
                snapshot_N[:count],
                anchor_N[:count],
                owed_N if owed_N is None else owed_N[:count],
            )
            moved = (16.0 if owed_N is None else 20.0) * count
            moved += codec_named(name).payload_bytes(count)  # type: ignore[union-attr]
            runs[f"{name} {kind}"] = moved, partial(encoder.encode, *given)
    captures = _captures(anchor_N, residual_N, encoders)
    for repeat in range(options.repeats + 2):
        for name, (moved, run) in runs.items():
            taken_s, _ = _time(run)
            if repeat > 1:
                speeds.setdefault(name, []).append(moved / taken_s / 1e9)
        for name, (_, capture) in captures.items():
            taken_s, launch_s = _time(capture)
            if repeat > 1:
                seconds.setdefault(name, []).append(taken_s * 1e3)
                launches.setdefault(name, []).append(launch_s * 1e3)
    copy = speeds.pop("copy")
    kernels = {name: speeds[f"{name} kernel"] for name in encoders}
    slowest = min(kernels, key=lambda name: statistics.median(kernels[name]))
    shares = ratios(kernels[slowest], copy)
    goal = Goal(f">= {GOAL} of the speed of a copy ({slowest})", GOAL, "of a copy", better="higher")
    plain = limit("copy on the device", "GB/s", copy, 0)
    more = {
        "gpu": torch.cuda.get_device_name(),
        "variants": {
            name: {"GBps": spread(speed, 0), "of_copy": spread(ratios(speed, copy))}
            for name, speed in speeds.items()
        },
        "captures": {
            name: {
                "ms": spread(seconds[name], 2),
                "launch_ms": spread(launches[name], 3),
                "bus_bytes": captures[name][0],
            }
            for name in captures
        },
    }
    report("device_encode", goal, shares, options, plain, more)


def _captures(
    anchor_N: Tensor, residual_N: Tensor, encoders: dict[str, DeviceEncoder]
) -> dict[str, tuple[int, Callable[[], object]]]:
    """Name -> bytes over the bus, and a capture that is waited for."""
    parts = anchor_N.split(TENSOR_NUMEL)
    made = nn.ParameterList([nn.Parameter(part.clone()) for part in parts])
    (layout,) = build_plan(made, 1)
    view = FragmentView(layout, list(made))
    owned = replicated(layout, 1, 0).owned
    side = Side(anchor_N.device)
    whole_N = torch.empty(owned.numel, pin_memory=True)
    found: dict[str, tuple[int, Callable[[], object]]] = {
        "host": (whole_N.nbytes, lambda: side.snapshot(view, owned, whole_N))
    }
    for name, encoder in encoders.items():
        out_B = torch.empty(encoder.parcel_bytes(owned.numel), dtype=torch.uint8, pin_memory=True)
        owed_N = None if encoder.in_weights else residual_N
        given = (view, owned, anchor_N, owed_N, encoder.encode, out_B)
        found[f"{name} device"] = out_B.nbytes, partial(side.encode, *given)
    return found


def _time(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds until it is done, and until the call returned."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return time.perf_counter() - started, launched - started


if __name__ == "__main__":
    main()
