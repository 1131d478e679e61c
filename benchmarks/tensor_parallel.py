"""benchmarks.tensor_parallel: a rack of TP 2 x FSDP2, compiled, with async_tp_enabled on and off.

    mend launch --no-witness --racks 2 --nproc-per-rack 4 --env CUDA_VISIBLE_DEVICES= \\
        benchmarks/tensor_parallel.py --out runs/tensor-parallel

Rack 0 takes all GPUs; rack 1 is a peer on CPU cores that holds the same shards, trains nothing and
offers what it has, as bytes take their time whatever they hold. Model and options are those of h200
(default: 3b). Every block is compiled, anew in every cell. Cells take turns: `none` is without
mend, `off` and `on` are with it (tau = gap - 1), by async_tp_enabled. The ranks of a
tensor-parallel pair have the same tokens.

Each rank's lines are in --out. Rank 0 prints one JSON line at the end, by mode: tokens/s of the
rack at the median step, step times over all repeats, the losses of the first repeat; and of each
repeat its median step, what training waited, what status().async_tp said, how many graphs were
compiled. `loss_apart` is the largest distance of the losses of `on` from those of `off`, which
have other kernels. On a CPU, with `--shape tiny`, async TP says why it is not active.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
LEADS = os.environ.get("MEND_RACK") == "0"
if LEADS and not os.environ.get("CUDA_VISIBLE_DEVICES", "all"):
    del os.environ["CUDA_VISIBLE_DEVICES"]  # the launcher hides the GPUs, for the peer
if not __package__:  # started by its path: the folder that holds `benchmarks` is not searched
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# After the lines above, which they need.
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor.parallel import loss_parallel  # noqa: E402

import mend  # noqa: E402
from benchmarks import h200, h200_rank, qwen, qwen_parallel  # noqa: E402
from benchmarks.h200_cells import WARM_UP_MIN, Cell  # noqa: E402

TP = 2


class Bench(h200_rank.Bench):
    def _model(self) -> nn.Module:
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        size = (self.ranks // TP, TP)
        self.mesh = init_device_mesh(self.device.type, size, mesh_dim_names=("dp", "tp"))
        return qwen_parallel.build(self.shape, self.options.positions, self.mesh)

    def _repeats_itself(self) -> str:
        torch.use_deterministic_algorithms(False)
        return "not asked"

    def _tokens(self) -> Tensor:
        tokens_SBT = super()._tokens()
        dist.broadcast(tokens_SBT, group=self.mesh.get_group("tp"), group_src=0)
        return tokens_SBT

    def _cells(self) -> Iterator[Cell]:
        measured, tau = self.plan.measured, self.plan.gap - 1
        for repeat in range(self.plan.repeats):
            for mode in ("none", "off", "on") if repeat % 2 == 0 else ("none", "on", "off"):
                yield Cell(repeat, mode, 0, tau, max(WARM_UP_MIN, tau), measured)

    def _config(self, index: int, cell: Cell) -> mend.MendConfig:
        config = super()._config(index, dataclasses.replace(cell, mode="concurrent"))
        asked = LEADS and cell.mode == "on"
        # The peer waits while rack 0 compiles.
        return dataclasses.replace(config, async_tp_enabled=asked, wait_timeout_s=240.0)

    def _join(self, index: int, cell: Cell) -> Any:
        optimizer = self.optimizer if LEADS else None
        return mend.mend_init(self.model, self._config(index, cell), optimizer)

    def _cell(self, index: int, cell: Cell) -> dict[str, Any]:
        """h200's, with what was said of async TP and the graphs that the cell compiled."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for block in self.model.blocks:
            block.forward = torch.compile(qwen.Block.forward.__get__(block))
        found = super()._cell(index, cell)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found |= {"async_tp": self.said, "graphs": graphs}
        self.found.setdefault(cell.mode, []).append(found)
        return found

    def _train(self, cell: Cell, runtime: Any) -> tuple[list[Any], list[Tensor], Any]:
        self.runtime = runtime
        found = super()._train(cell, runtime)
        self.said = runtime.status().async_tp if runtime else "no mend"
        return found

    def _step(self, step: int) -> Tensor:
        if not LEADS:
            if self.runtime is not None:
                self.runtime.step()
            return torch.zeros(())
        with loss_parallel():
            return h200_rank.local(super()._step(step))

    def run(self) -> None:
        self.found: dict[str, list[dict[str, Any]]] = {}
        super().run()
        if self.decides:
            print(json.dumps(self._summary()), flush=True)

    def _summary(self) -> dict[str, Any]:
        tokens = self.options.sequences * self.options.positions * self.ranks // TP
        modes: dict[str, Any] = {}
        for mode, cells in self.found.items():
            steps = [ms for cell in cells for ms in cell["step_ms"]]
            median, losses = statistics.median(steps), cells[0]["losses"]
            each = ("stall_ms", "bytes_sent", "versions", "missed", "async_tp", "graphs")
            modes[mode] = {
                "tokens_per_s": round(1e3 * tokens / median, 1),
                "step_ms": {"median": median, "min": min(steps), "max": max(steps)},
                "medians_ms": [statistics.median(cell["step_ms"]) for cell in cells],
                **{key: [cell.get(key) for cell in cells] for key in each},
                "losses": [round(float.fromhex(loss), 5) for loss in losses],
            }
        both = [modes[mode]["losses"] for mode in ("off", "on") if mode in modes]
        apart = max(abs(a - b) for a, b in zip(*both, strict=True)) if len(both) == 2 else None
        return {"name": "tensor_parallel", "modes": modes, "loss_apart": apart, **self._facts()}


if __name__ == "__main__":
    defaults = ["--parallel", "fsdp2", "--budget-s", "420"]
    h200_rank.run(h200.arguments([*defaults, *sys.argv[1:]]), BEGAN, Bench)
