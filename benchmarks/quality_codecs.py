"""benchmarks.quality_codecs: what a codec of deltas costs in loss, at a small size, on a CPU.

    python -m benchmarks.quality_codecs                      all arms that are not there yet
    python -m benchmarks.quality_codecs --arms int4,powersgd-4 --seeds 1
    python -m benchmarks.quality_codecs --table              the table again from the runs kept

Racks of one process with data of their own, synchronous rounds (tau 0) of one fragment, outer lr 1
without momentum. Deltas go through mend's own codec, residual, merge and outer step (`Numerics`);
every round names all racks, so the residual of a round is taken over at its end. `alone` exchanges
nothing. Each finished run is a line of quality_codecs.jsonl, and is not run again.

`held-out loss` is that of the merged model in nats per byte, a mean over seeds, with half the range
over them; `above none` pairs runs by seed, in percent. `bits` are those of the payloads per
parameter and round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._common import RESULTS, machine
from benchmarks.quality_arms import Cell, Curve, Inner, Plan, settle, windows_of
from mend.codec import codec_named
from mend.engine.numerics import Numerics
from mend.merge import Average
from mend.outer import Nesterov
from mend.tools import demo_corpus
from mend.tools.demo_corpus import Corpus
from mend.tools.demo_model import Size
from mend.types import Owned, Span

PLAN = Plan(
    size=Size(64, 2, 4, 64, 4), steps=192, period_steps=8, eval_steps=192, eval_batches=48,
    learning_rate=4e-3,
)  # fmt: skip
ARMS = ("alone", "none", "int4", "topk", "powersgd-1", "powersgd-4", "powersgd-16")
RACKS = 2


def run(arm: str, seed: int, plan: Plan, corpus: Corpus) -> dict[str, Any]:
    """One run. Its clock is not measured: runs share the machine with anything."""
    cell = Cell(plan=plan, arm=arm, racks=RACKS, seed=seed)
    racks = [Inner(cell, [windows_of(cell, corpus, rack)]) for rack in range(RACKS)]
    curve, sent, rounds = Curve(cell, corpus), 0, 0
    owned, numerics = owned_of(racks[0]), None
    if arm != "alone":
        codec = codec_named("float32" if arm == "none" else arm)
        numerics = Numerics(codec, Average(), Nesterov(1.0, 0.0))
    anchor = numerics.genesis(flat(racks[0]), owned) if numerics is not None else None
    residuals: list[Tensor | None] = [None] * RACKS
    shares = []
    for step in range(plan.steps):
        for inner in racks:
            inner.step(step)
        if numerics is None or anchor is None or (step + 1) % plan.period_steps:
            continue
        made = [
            numerics.encode(flat(inner), residual, anchor.values, anchor.codec)
            for inner, residual in zip(racks, residuals, strict=True)
        ]
        residuals = [each.pend for each in made]
        payloads = [each.payload for each in made]
        anchor = numerics.merge(payloads, [1 / RACKS] * RACKS, anchor, anchor.version + 1)
        for inner in racks:
            load(inner, anchor.values)
        sent, rounds = sent + sum(each.numel() for each in payloads), rounds + RACKS
        shares.append(statistics.fmean(e.unsent / max(e.length, 1e-30) for e in made))
    curve.look(plan.steps, *(inner.model for inner in racks[: RACKS if numerics is None else 1]))
    return {
        "arm": arm,
        "seed": seed,
        "loss": curve.points[-1][1],
        "bits": 8 * sent / max(1, rounds) / owned.numel,
        "residual": statistics.median(shares) if shares else 0.0,
        "params": owned.numel,
    }


def owned_of(inner: Inner) -> Owned:
    parameters = list(inner.model.parameters())
    spans = tuple(Span(0, p.numel()) for p in parameters)
    return Owned(spans, sum(s.numel for s in spans), tuple(tuple(p.shape) for p in parameters))


def flat(inner: Inner) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in inner.model.parameters()])


@torch.no_grad()
def load(inner: Inner, values_N: Tensor) -> None:
    begin = 0
    for parameter in inner.model.parameters():
        parameter.copy_(values_N[begin : begin + parameter.numel()].view_as(parameter))
        begin += parameter.numel()


def table(runs: list[dict[str, Any]]) -> str:
    base = {r["seed"]: r["loss"] for r in runs if r["arm"] == "none"}
    lines = [
        "| codec | bits | held-out loss | above none, % (each seed) | left for later (median) |",
        "|---|---|---|---|---|",
    ]
    for arm in ARMS:
        mine = sorted((r for r in runs if r["arm"] == arm), key=lambda r: int(r["seed"]))
        if not mine:
            continue
        losses = [r["loss"] for r in mine]
        each = [100 * (r["loss"] / base[r["seed"]] - 1) for r in mine if r["seed"] in base]
        above = ", ".join(f"{x:+.2f}" for x in each)
        above = f"{statistics.fmean(each):+.2f} ({above})" if each else ""
        half = (max(losses) - min(losses)) / 2
        bits, left = mine[0]["bits"], statistics.fmean(r["residual"] for r in mine)
        loss = f"{statistics.fmean(losses):.3f} ±{half:.3f}"
        lines.append(f"| {arm} | {bits:.3g} | {loss} | {above} | {left:.0%} |")
    return "\n".join(lines) + "\n"


def page(runs: list[dict[str, Any]], plan: Plan) -> str:
    about = (
        f"{runs[0]['params']:,} parameters, {RACKS} racks, {plan.steps} steps of "
        f"{plan.tokens_per_step} bytes, H {plan.period_steps}, tau 0, inner peak lr "
        f"{plan.learning_rate:g}; seeds {', '.join(map(str, sorted({r['seed'] for r in runs})))}."
    )
    where = ", ".join(f"{key} {value}" for key, value in machine().items())
    return (
        "# Codecs and loss on a CPU\n\n`python -m benchmarks.quality_codecs`; how to read it: its "
        f"`--help`.\n\n{about} Machine: {where}.\n\n{table(runs)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=PLAN.steps)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    plan = replace(PLAN, steps=options.steps, eval_steps=options.steps)
    kept = options.out / "quality_codecs.jsonl"
    runs = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    runs = [r for r in runs if r["steps"] == plan.steps]
    settle()
    corpus = None
    for seed in range(1, options.seeds + 1):
        for arm in () if options.table else options.arms.split(","):
            if any((r["arm"], r["seed"]) == (arm, seed) for r in runs):
                continue
            corpus = corpus or demo_corpus.standard_library(RACKS)
            begun = time.monotonic()
            found = {**run(arm, seed, plan, corpus), "steps": plan.steps}
            runs.append(found)
            with kept.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(
                f"{arm} {seed}: {found['loss']:.4f}, {time.monotonic() - begun:.0f} s", flush=True
            )
    (options.out / "quality_codecs.md").write_text(page(runs, plan))
    print(table(runs))


if __name__ == "__main__":
    main()
