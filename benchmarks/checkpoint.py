"""benchmarks.checkpoint: how long a checkpoint holds up training. Prints one JSON object.

    python -m benchmarks.checkpoint
    python -m benchmarks.checkpoint --numel 150000000 --repeats 4

One rack alone trains a model of `numel` fp32 (SGD, two fragments, some rounds of its own), and
makes checkpoints without files of the script's.

`measured` is the median of the seconds in `runtime.async_checkpoint`: reaching the place of the
log, applying what is decided before it, one pass over the weights. `foreground_s` is that of
`runtime.checkpoint`, which waits until all is written, hashed and synced. The limit is one plain
copy of the model.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import mend
from benchmarks._common import Goal, copies_s, limit, noise, read_options, report, spread
from mend.tools.ports import free_ports

GOAL = Goal("< 0.1 s of training", 0.1, "s")
STEPS_BETWEEN = 5
OPTIONS = {
    "repeats": (4, "checkpoints of each kind"),
    "numel": (10_000_000, "fp32 elements; 10000000 are 40 MB"),
}


def main() -> None:
    options = read_options("checkpoint", __doc__, OPTIONS)
    torch.set_num_threads(1)
    background_s, foreground_s = _measure(options.numel, options.repeats)
    plain = limit("one plain copy of the model", "s", copies_s(options.numel), 4)
    more = {"foreground_s": spread(foreground_s)}
    report("checkpoint", GOAL, background_s, options, plain, more)


def _measure(numel: int, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds in the call, in the background and in the foreground."""
    weight = nn.Parameter(noise(numel, 1))
    halves = nn.ParameterList([weight[: numel // 2].detach(), weight[numel // 2 :].detach()])
    optimizer = torch.optim.SGD(halves.parameters(), lr=1e-3)
    port, lane = free_ports(2)
    address = f"tcp://127.0.0.1:{port}"
    config = mend.MendConfig(
        rack=0, racks=1, sideband_addr=address, sideband_peers=(address,),
        data_ports=f"{lane}-{lane}", fragments=2, sync_period_steps=8, overlap_steps=2,
    )  # fmt: skip
    found: tuple[list[float], list[float]] = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        mend.session(halves, config, optimizer) as runtime,
    ):
        for number in range(2 * repeats):
            for _ in range(STEPS_BETWEEN):
                for half in halves:
                    half.grad = half.detach()
                optimizer.step()
            path, waits = Path(folder) / str(number), number % 2
            began_s = time.perf_counter()
            if waits:
                runtime.checkpoint(path)
            else:
                pending = runtime.async_checkpoint(path)
            found[waits].append(time.perf_counter() - began_s)
            pending.result()
    return found


if __name__ == "__main__":
    main()
