"""benchmarks.tensor_parallel: a rack of TP 2 x FSDP2, compiled, with async_tp_enabled on and off.

    mend launch --no-witness --racks 2 --nproc-per-rack 4 --env CUDA_VISIBLE_DEVICES= \\
        benchmarks/tensor_parallel.py --out runs/tensor-parallel
    mend launch --no-witness --racks 1 --nproc-per-rack 4 benchmarks/tensor_parallel.py \\
        --shape 7b --modes none,async,none,async,none --repeats 1 --out runs/async-tp

Rack 0 takes all GPUs; rack 1 is a peer on CPU cores that holds the same shards, trains nothing and
offers what it has, as bytes take their time whatever they hold. Model and options are those of h200
(default: 3b). Every block is compiled, anew in every cell. Cells take turns: `none` is without
mend, `async` the same with its async TP and no exchange, `off` and `on` are with mend (tau = gap -
1), by async_tp_enabled. `--modes` names those of one repeat. The ranks of a tensor-parallel pair
have the same tokens.

Each rank's lines are in --out. Rank 0 prints one JSON line at the end, by mode: tokens/s of the
rack at the median step, step times over all repeats, the losses of the first repeat; and of each
repeat its median step, what training waited, what status().async_tp said, how many graphs were
compiled. `loss_apart` is the largest distance of the losses with async TP from those without it,
which have other kernels. On a CPU, with `--shape tiny`, async TP says why it is not active.
"""

from __future__ import annotations

import argparse
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
from mend.hardware.async_tp import AsyncTp  # noqa: E402

TP = 2
ASYNC_OF = {"none": "async", "off": "on"}
"""The cells that differ by async TP alone. The first two have no exchange, and need no peer."""


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
            for mode in self.options.modes[:: -1 if repeat % 2 else 1]:
                yield Cell(repeat, mode, 0, tau, max(WARM_UP_MIN, tau), measured)

    def _config(self, index: int, cell: Cell) -> mend.MendConfig:
        config = super()._config(index, dataclasses.replace(cell, mode="concurrent"))
        asked = LEADS and cell.mode == "on"
        # The peer waits while rack 0 compiles.
        return dataclasses.replace(config, async_tp_enabled=asked, wait_timeout_s=240.0)

    def _join(self, index: int, cell: Cell) -> Any:
        if cell.mode == "async":  # the peer has nothing to do
            self.alone = AsyncTp.enable(self.model) if LEADS else None
            return None
        optimizer = self.optimizer if LEADS else None
        return mend.mend_init(self.model, self._config(index, cell), optimizer)

    def _cell(self, index: int, cell: Cell) -> dict[str, Any]:
        """h200's, with what was said of async TP and the graphs that the cell compiled."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for block in self.model.blocks:
            block.forward = torch.compile(qwen.Block.forward.__get__(block))
        self.alone: AsyncTp | None = None
        found = super()._cell(index, cell)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found |= {"async_tp": self.said, "graphs": graphs}
        self.found.setdefault(cell.mode, []).append(found)
        return found

    def _train(self, cell: Cell, runtime: Any) -> tuple[list[Any], list[Tensor], Any]:
        self.runtime = runtime
        found = super()._train(cell, runtime)
        self.said = runtime.status().async_tp if runtime else "no mend"
        if self.alone is not None:
            self.said = self.alone.description
            self.alone.close()
        return found

    def _step(self, step: int) -> Tensor:
        if not LEADS:
            if self.runtime is not None:
                self.runtime.step()
            return torch.zeros(())
        with loss_parallel():
            loss = h200_rank.local(super()._step(step))
        if self.alone is not None:
            self.alone.stepped()
        return loss

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
        apart = [
            abs(a - b)
            for mode, other in ASYNC_OF.items() if mode in modes and other in modes
            for a, b in zip(modes[mode]["losses"], modes[other]["losses"], strict=True)
        ]  # fmt: skip
        apart_max = max(apart, default=None)
        return {"name": "tensor_parallel", "modes": modes, "loss_apart": apart_max, **self._facts()}


def _modes(text: str) -> list[str]:
    modes, known = text.split(","), [mode for pair in ASYNC_OF.items() for mode in pair]
    if unknown := set(modes) - set(known):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
    return modes


def arguments(words: list[str]) -> argparse.Namespace:
    """h200's, and the cells of one repeat."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--modes", default="none,off,on", type=_modes)
    options, others = own.parse_known_args(words)
    parsed = h200.arguments(["--parallel", "fsdp2", "--budget-s", "420", *others])
    parsed.modes = options.modes
    return parsed


if __name__ == "__main__":
    h200_rank.run(arguments(sys.argv[1:]), BEGAN, Bench)
