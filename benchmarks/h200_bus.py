"""benchmarks.h200_bus: what copies between host and GPU cost the training beside them. Nothing is
exchanged. Started on every rank; each writes JSON lines into --out, and rank 0 prints them.

    mend launch --no-witness --racks 2 --nproc-per-rack 2 benchmarks/h200_bus.py \\
        --parallel fsdp2 --out runs/bus

A thread per rank copies between pinned memory and the device in the middle eight of 16 steps: `up`
and `down` without pause, `paced` to the device in pieces of 4 MB with pauses of 0.3 ms, `bursts` of
2.3 GB to the device every 1.5 s. Options as of benchmarks/h200.py.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if not __package__:  # started by its path: the folder that holds `benchmarks` is not searched
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# After the lines above, which they need.
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.h200 import arguments  # noqa: E402
from benchmarks.h200_cells import WARM_UP_MIN, Cell  # noqa: E402
from benchmarks.h200_rank import Bench, run  # noqa: E402
from mend.engine.trainer.cuda_staging import CudaPin  # noqa: E402

STEPS, FIRST, LAST = 16, 4, 11
"""Of a cell; the load runs in the steps [FIRST, LAST]."""
LOADS = ("none", "up", "paced", "down", "bursts")
BYTES = {"cuda": 380 << 20, "cpu": 4 << 20}
PIECE_BYTES, PAUSE_S = 4 << 20, 3e-4
BURST, BURSTS_S = 6, 1.5


class Bus(Bench):
    """Cells without exchange, each beside a load."""

    def _cells(self) -> Iterator[Cell]:
        cuda = self.device.type == "cuda"
        self.host_B = torch.zeros(BYTES[self.device.type], dtype=torch.uint8, device="cpu")
        self.device_B = torch.zeros_like(self.host_B, device=self.device)
        self.pin = CudaPin() if cuda else None
        if self.pin is not None:
            self.pin.lock(self.host_B.data_ptr(), self.host_B.nbytes)
        self.loads, self.ends, self.moved = list[str](), threading.Event(), 0
        for repeat in range(self.plan.repeats):
            for load in LOADS if repeat % 2 == 0 else LOADS[::-1]:
                self.loads.append(load)
                yield Cell(repeat, "none", 0, 0, WARM_UP_MIN, STEPS)

    def _cell(self, index: int, cell: Cell) -> dict[str, Any]:
        self.load, self.count, self.moved = self.loads[index], -WARM_UP_MIN, 0
        found = super()._cell(index, cell)
        ms = found["step_ms"]
        row = {
            "load": self.load, "moved_bytes": self.moved,
            "quiet_ms": statistics.median(ms[:FIRST] + ms[LAST + 2 :]),
            "beside_ms": statistics.median(ms[FIRST : LAST + 1]), "step_ms": ms,
        }  # fmt: skip
        if self.decides:
            print(row, flush=True)
        return {**found, **row}

    def _step(self, step: int) -> Tensor:
        if self.load != "none" and self.count == FIRST:
            self.ends.clear()
            self.thread = threading.Thread(target=self._copy, daemon=True)
            self.thread.start()
        self.count += 1
        loss = super()._step(step % len(self.tokens_SBT))
        if self.load != "none" and self.count == LAST + 1:
            self.ends.set()
            self.thread.join()
        return loss

    def _copy(self) -> None:
        cuda = self.device.type == "cuda"
        stream: Any = torch.cuda.Stream(self.device) if cuda else torch.cpu.Stream()
        into, out_of = self.device_B, self.host_B
        if self.load == "down":
            into, out_of = out_of, into
        size = PIECE_BYTES if self.load == "paced" else len(into)
        with torch.get_device_module(self.device).stream(stream):
            while True:
                for _ in range(BURST if self.load == "bursts" else 1):
                    for start in range(0, len(into), size):
                        piece = slice(start, start + size)
                        into[piece].copy_(out_of[piece], non_blocking=True)
                        self.moved += into[piece].nbytes
                        if self.load == "paced":
                            stream.synchronize()
                            time.sleep(PAUSE_S)
                stream.synchronize()
                if self.ends.wait(BURSTS_S if self.load == "bursts" else 0):
                    return


if __name__ == "__main__":
    run(arguments(), BEGAN, Bus)
