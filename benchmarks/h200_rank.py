"""benchmarks.h200_rank: one rank of h200. Builds the model once, runs every cell, writes its lines.

Lines of rack{r}-rank{k}.jsonl: `start` (parameters, machine), `cell` (one each), `end` (why).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mend
from benchmarks import h200_cells, qwen
from benchmarks._common import freeze_garbage, machine
from benchmarks.delay_sweep.train import device_of_rank
from benchmarks.h200_cells import CALIBRATION, Cell, Plan
from benchmarks.h200_machine import Clock, deterministic, memory, reset_memory
from benchmarks.h200_meeting import Meeting
from mend.tools.processes import TOKEN


def run(options: argparse.Namespace, began: float, kind: type[Bench] | None = None) -> None:
    """Run all cells of this rank. `began`: start of the process on time.monotonic()."""
    rack, racks = int(os.environ["MEND_RACK"]), int(os.environ["MEND_RACKS"])
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    folder = Path(tempfile.gettempdir()) / f"h200-{os.environ[TOKEN]}"
    meeting = Meeting(folder, f"{rack}.{rank}", racks * ranks)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"rack{rack}-rank{rank}.jsonl"
    try:
        with path.open("w", encoding="utf-8") as lines:
            (kind or Bench)(options, meeting, (rack, rank, ranks), began, lines).run()
        meeting.all_here("done")
    except BaseException as error:
        meeting.failed(error)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    meeting.leave()
    if rack == rank == 0:
        meeting.all_gone()
        shutil.rmtree(folder)


class Bench:
    """The model, its start, and the cells that are run with it."""

    def __init__(
        self,
        options: argparse.Namespace,
        meeting: Meeting,
        place: tuple[int, int, int],
        began: float,
        lines: TextIO,
    ) -> None:
        self.options, self.meeting, self.began = options, meeting, began
        self.rack, self.rank, self.ranks = place
        self._lines = lines
        self.decides = self.rack == self.rank == 0
        self.plan = Plan(
            options.fragments, options.gap, options.gaps_measured, options.steps_max,
            options.repeats, options.delays,
        )  # fmt: skip
        self.done: list[tuple[Cell, float]] = []
        self.measured: dict[str, float] = {}
        """Medians of the calibration: step_ms, exchange_ms."""
        self.device = device_of_rank()
        self.clock = Clock(self.device)
        self.shape = qwen.SHAPES[options.shape]
        self.attention = deterministic(self.device, self.shape)
        self.model = self._model()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.learning_rate, fused=True
        )
        self.start = [local(p).detach().clone() for p in self.model.parameters()]
        self.tokens_SBT = self._tokens()
        self.deterministic = self._repeats_itself()

    def _model(self) -> nn.Module:
        options = self.options
        model = qwen.build(
            self.shape, options.positions, self.device, options.seed, recompute=options.recompute
        )
        if options.parallel == "single":
            if self.ranks > 1:
                raise SystemExit("--parallel single is for one process per rack; try fsdp2")
            return model
        cuda = self.device.type == "cuda"
        dist.init_process_group("nccl" if cuda else "gloo")
        mesh = init_device_mesh(self.device.type, (self.ranks,), mesh_dim_names=("shard",))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def _repeats_itself(self) -> str:
        """yes, or why two backward passes from the same weights may give different gradients."""
        try:
            self._gradients()
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            torch.use_deterministic_algorithms(False)
            return f"no: {str(error).splitlines()[0]}"
        first = self._gradients()
        same = all(torch.equal(a, b) for a, b in zip(first, self._gradients(), strict=True))
        return "yes" if same else "no: two backward passes gave different bits"

    def _gradients(self) -> list[Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(0)
        loss.backward()  # type: ignore[no-untyped-call]
        return [local(p.grad) for p in self.model.parameters() if p.grad is not None]

    def _tokens(self) -> Tensor:
        """Steps x sequences x (positions + 1): the same in every cell, others on every rank."""
        options = self.options
        random = torch.Generator().manual_seed(options.seed + 1000 * self.rack + self.rank + 1)
        steps = max(options.steps_max, 2 * options.gap + 1)
        size = (steps, options.sequences, options.positions + 1)
        return torch.randint(self.shape.vocab, size, generator=random).to(self.device)

    # ------------------------------------------------------------------ all cells

    def run(self) -> None:
        self._line({"kind": "start", **self._facts()})
        reason = "done"
        for index, cell in enumerate(self._cells()):
            if not self._agreed(f"{index}.go", lambda c=cell: {"go": self._in_time(c)})["go"]:
                reason = "budget"
                break
            began = time.monotonic()
            found = self._cell(index, cell)
            seconds = time.monotonic() - began
            self.done.append((cell, seconds))
            self._learn(cell, found)
            self._line({"kind": "cell", "index": index, **found, "cell_s": round(seconds, 3)})
            if self.decides:
                _say(cell, found, seconds, time.monotonic() - self.began)
        self._line({"kind": "end", "reason": reason, "s": round(time.monotonic() - self.began, 1)})

    def _cells(self) -> Iterator[Cell]:
        if self.options.tau == "auto":
            yield from h200_cells.calibration(self.plan)
            taus = self._agreed("tau", self._taus)
        else:
            taus = dict(zip(map(str, self.plan.delays_ms), self.options.tau, strict=True))
        yield from h200_cells.cells(self.plan, {int(delay): tau for delay, tau in taus.items()})

    def _taus(self) -> dict[str, Any]:
        found = h200_cells.overlaps(
            self.plan, self.measured["step_ms"], self.measured["exchange_ms"]
        )
        return {str(delay): tau for delay, tau in found.items()}

    def _learn(self, cell: Cell, found: dict[str, Any]) -> None:
        if cell.repeat == CALIBRATION and cell.mode == "none":
            self.measured["step_ms"] = statistics.median(found["step_ms"])
        elif cell.repeat == CALIBRATION:
            self.measured["exchange_ms"] = found["stall_ms_last"]

    def _in_time(self, cell: Cell) -> bool:
        needed = h200_cells.expected_s(cell, self.plan.gap, self.done) + h200_cells.END_S
        return time.monotonic() - self.began + needed < self.options.budget_s

    def _agreed(self, name: str, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The decision of rank 0 of rack 0, on all ranks, so that no rack takes another cell."""
        return self.meeting.decide(name, decide()) if self.decides else self.meeting.decision(name)

    # ------------------------------------------------------------------ one cell

    def _cell(self, index: int, cell: Cell) -> dict[str, Any]:
        self._restore()
        self.meeting.all_here(f"{index}.start")
        began = time.monotonic()
        runtime = self._join(index, cell) if cell.mode != "none" else None
        joined_s = time.monotonic() - began
        self.meeting.all_here(f"{index}.joined")
        marks, losses, before = self._train(cell, runtime)
        after, peak = runtime.status() if runtime else None, memory(self.device)
        # A rack that leaves while the other still waits for a merge would keep it waiting.
        self.meeting.all_here(f"{index}.end")
        if runtime is not None:
            runtime.abort()
        step_ms = [round(self.clock.between(*pair), 4) for pair in itertools.pairwise(marks)]
        return {
            **cell.fields(),
            "rack": self.rack, "rank": self.rank,
            "tokens_per_step": self.options.sequences * self.options.positions,
            "step_ms": step_ms, "elapsed_s": round(sum(step_ms) / 1e3, 6),
            "losses": [float(loss).hex() for loss in torch.stack(losses).float().tolist()],
            "joined_s": round(joined_s, 3),
            **_exchanged(before, after), **peak,
        }  # fmt: skip

    def _join(self, index: int, cell: Cell) -> Any:
        """Start the exchange; the result has status() and abort()."""
        return mend.mend_init(self.model, self._config(index, cell), self.optimizer)

    def _train(self, cell: Cell, runtime: Any) -> tuple[list[Any], list[Tensor], Any]:
        """Marks around the measured steps, the losses of all steps, the status at the first."""
        marks: list[Any] = []
        losses: list[Tensor] = []
        before = None
        freeze_garbage()
        self.clock.synchronize()
        for step in range(cell.steps):
            if step == cell.warm_up:
                before = runtime.status() if runtime else None
                marks.append(self.clock.mark())
            losses.append(self._step(step))
            if step >= cell.warm_up:
                marks.append(self.clock.mark())
        self.clock.synchronize()
        return marks, losses, before

    def _loss(self, step: int) -> Tensor:
        tokens_BT = self.tokens_SBT[step]
        loss: Tensor = self.model(tokens_BT[:, :-1], tokens_BT[:, 1:])
        return loss

    def _step(self, step: int) -> Tensor:
        loss = self._loss(step)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def _restore(self) -> None:
        """Weights and moments of the start; nothing left over from the cell before."""
        for parameter, start in zip(self.model.parameters(), self.start, strict=True):
            local(parameter).copy_(start)
            for moment in self.optimizer.state[parameter].values():
                local(moment).zero_()
        self.optimizer.zero_grad(set_to_none=True)
        gc.unfreeze()
        gc.collect()
        reset_memory(self.device)

    def _config(self, index: int, cell: Cell) -> mend.MendConfig:
        """Addresses come from the launcher; every cell is a job of its own on the same ports."""
        return mend.MendConfig(
            job_id=f"{os.environ['MEND_JOB_ID'][:40]}-{index}",
            witness_addr="",
            fragments=self.plan.fragments,
            sync_period_steps=self.plan.period,
            overlap_steps=cell.tau,
            outer_ramp_rounds=0,  # tau is the same in every round that is measured
            outer_optimizer_momentum=0.0,
            concurrent_outer_step=cell.mode == "concurrent",
            lockstep=True,
            **self._payload(),
            simulated_merge_delay_ms=float(cell.delay_ms),
            start_timeout_s=120.0,
            wait_timeout_s=120.0,
        )

    def _payload(self) -> dict[str, Any]:
        return {"codec": self.options.payload, "encode_on": self.options.encode_on}

    def _facts(self) -> dict[str, Any]:
        options = {k: v for k, v in vars(self.options).items() if k != "out"}
        cuda = self.device.type == "cuda"
        return {
            "rack": self.rack, "rank": self.rank, "ranks": self.ranks,
            "racks": int(os.environ["MEND_RACKS"]),
            "parameters": options, "plan": dataclasses.asdict(self.plan),
            "shape": dataclasses.asdict(self.shape),
            "weights": sum(p.numel() for p in self.model.parameters()),
            "flops_per_token": qwen.flops_per_token(self.shape, self.options.positions),
            "device": torch.cuda.get_device_name() if cuda else "CPU",
            "attention": self.attention, "deterministic": self.deterministic,
            "threads": torch.get_num_threads(), "machine": machine(),
            "command": self._command(),
        }  # fmt: skip

    def _command(self) -> str:
        launch = f"mend launch --no-witness --racks {os.environ['MEND_RACKS']}"
        script = f"benchmarks/{Path(sys.argv[0]).name}"
        return f"{launch} --nproc-per-rack {self.ranks} {script} {' '.join(sys.argv[1:])}"

    def _line(self, fields: dict[str, Any]) -> None:
        """Written at once, so that a run that is cut short has told what it knew."""
        print(json.dumps(fields), file=self._lines, flush=True)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _exchanged(before: Any, after: Any) -> dict[str, Any]:
    """Counts of the runtime in the measured steps; `stall_ms_all` includes the warm-up."""
    if after is None:
        return {}
    return {
        "stall_ms": round(after.stall_ms_total - before.stall_ms_total, 3),
        "stall_ms_all": round(after.stall_ms_total, 3),
        "stall_ms_last": round(after.stall_ms_last, 3),
        "bytes_sent": after.bytes_sent - before.bytes_sent,
        "bytes_sent_all": after.bytes_sent,
        "versions": list(after.versions),
        "missed": after.rounds_missed,
        "anchor_digest": after.anchor_digest,
        "last_error": after.last_error,
    }


def _say(cell: Cell, found: dict[str, Any], seconds: float, elapsed_s: float) -> None:
    rate = found["tokens_per_step"] * cell.measured / found["elapsed_s"]
    print(
        f"h200 repeat={cell.repeat} mode={cell.mode} delay_ms={cell.delay_ms} tau={cell.tau} "
        f"tokens_per_s={rate:.0f} step_ms={statistics.median(found['step_ms']):.1f} "
        f"stall_ms={found.get('stall_ms', 0):.0f} joined_s={found['joined_s']:.1f} "
        f"cell_s={seconds:.1f} elapsed_s={elapsed_s:.0f}",
        flush=True,
    )
