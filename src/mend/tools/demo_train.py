"""The training script that `mend demo` launches, once per rank. An ordinary loop.

Reads the text and writes one result file. What the demo claims is computed by its parent from these
files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mend
from mend.errors import ensure, require
from mend.tools import demo_corpus
from mend.tools.demo_model import SIZES, ByteGPT, Windows, held_out_loss, learning_rate, loss_of

CLIP_NORM = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One run. Travels from the demo to its ranks as JSON, so that both read the same words."""

    name: str
    out: str
    exchange: bool
    size: str
    steps: int
    seed: int
    racks: int
    quorum: int
    learning_rate: float
    eval_batches: int
    period_steps: int
    overlap_steps: int
    parallel: str = "ddp"
    fragments: int = 4
    concurrent: bool = True
    lockstep: bool = True
    delay_ms: float = 0.0
    delay_distribution: str = "constant"
    codec: str = "float32"


def mend_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of the run; addresses come from the environment of `mend launch`."""
    return {
        "exchange": recipe.exchange,
        "fragments": recipe.fragments,
        "sync_period_steps": recipe.period_steps,
        "overlap_steps": recipe.overlap_steps,
        # A short run: the overlap is whole from the first round, and the racks are averaged.
        "outer_ramp_rounds": 0,
        "outer_optimizer_momentum": 0.0,
        "concurrent_outer_step": recipe.concurrent,
        "lockstep": recipe.lockstep,
        "codec": recipe.codec,
        "merge_min_racks": recipe.quorum,
        "simulated_merge_delay_ms": recipe.delay_ms,
        "simulated_merge_delay_distribution": recipe.delay_distribution,
        "simulated_merge_delay_seed": recipe.seed,
        "diagnostics_dir": str(Path(recipe.out) / "events"),
    }


@dataclass
class Track:
    """The figures of each step. Losses are those of this rank's own batch."""

    losses: list[float]
    stall_ms: list[float]
    wall_s: float = 0.0


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    windows: Windows,
    recipe: Recipe,
    runtime: mend.Runtime,
) -> Track:
    """The loop of every run, with and without exchange."""
    track, rack = Track([], []), int(os.environ["MEND_RACK"])
    report_every = max(1, recipe.steps // 40)
    stalled_ms = started = 0.0
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe.steps, recipe.learning_rate)
        batch = windows.next()
        loss = loss_of(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        runtime.count_tokens(batch[:, 1:].numel())
        optimizer.step()
        track.losses.append(loss.item())
        runtime.record(loss=track.losses[-1])
        total_ms = runtime.status().stall_ms_total
        track.stall_ms.append(total_ms - stalled_ms)
        stalled_ms = total_ms
        started = started or time.perf_counter()  # as mend report: without the first step
        if (step + 1) % report_every == 0 and int(os.environ.get("RANK", "0")) == 0:
            print(f"demo rack={rack} step={step + 1} loss={track.losses[-1]:.4f}", flush=True)
    track.wall_s = time.perf_counter() - started
    return track


def finish(model: nn.Module, held_out: Any) -> dict[str, Any]:
    """The numbers of a run with exchange, of the merged model."""
    status = require(mend.mend_shutdown(model), "mend_shutdown found no runtime")
    return {"merged_loss": held_out(), "digest": status.anchor_digest, "status": asdict(status)}


def parallelize(model: ByteGPT, parallel: str) -> nn.Module:
    """Spread the model over the ranks of the rack. FSDP2: each block is a unit; the root has the
    rest (embeddings, the last norm)."""
    if parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    ensure(parallel == "fsdp2", "neither ddp nor fsdp2", parallel=parallel)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def run(recipe: Recipe) -> dict[str, Any]:
    """Train as the recipe says; returns what the result file holds."""
    torch.set_num_threads(1)  # two racks share a small machine, and a sum has one order
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(recipe.seed)
    rack, rank = int(os.environ["MEND_RACK"]), int(os.environ.get("RANK", "0"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    corpus, size = demo_corpus.standard_library(recipe.racks), SIZES[recipe.size]
    model = ByteGPT(size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = parallelize(model, recipe.parallel) if ranks > 1 else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.99), weight_decay=0.1
    )
    windows = Windows(
        corpus.racks[rack], size, seed=1 + rack + recipe.racks * (rank + 1000 * recipe.seed)
    )
    config = mend.MendConfig(**mend_settings(recipe))
    runtime = mend.mend_init(trained, config, optimizer=optimizer)

    def held_out() -> float:
        return held_out_loss(model, corpus.held_out, size, recipe.eval_batches)

    track = train(trained, optimizer, windows, recipe, runtime)
    result: dict[str, Any] = {
        "rack": rack,
        "rank": rank,
        "parameters": parameters,
        "train_bytes": len(corpus.racks[rack]),
        "steps": recipe.steps,
        "tokens": (recipe.steps - 1) * size.batch * size.context,
        "wall_s": track.wall_s,
        "losses": [loss.hex() for loss in track.losses],
        "stall_ms": track.stall_ms,
        "rounds_in_loop": runtime.status().rounds_committed,
    }
    if recipe.exchange:
        return result | finish(trained, held_out)
    mend.mend_shutdown(trained)
    return result | {"own_loss": held_out()}


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of `mend demo`; started by it.")
    parser.add_argument("recipe", help="a Recipe as JSON")
    recipe = Recipe(**json.loads(parser.parse_args().recipe))
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    with contextlib.ExitStack() as cleanup:
        if many:
            dist.init_process_group("gloo")
            cleanup.callback(dist.destroy_process_group)
        result = run(recipe)
        if many:
            dist.barrier()  # as in examples/fsdp2.py: no thread of gloo is busy at the end
    path = Path(recipe.out) / f"result-rack{result['rack']}-rank{result['rank']}.json"
    path.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
