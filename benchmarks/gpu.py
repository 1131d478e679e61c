"""benchmarks.gpu: training on one GPU beside an exchange, relative to no exchange. Prints one JSON
object.

    mend bench run gpu --save
    python benchmarks/compare.py benchmarks/results runs/results

Two racks on loopback, with keys. Rack 0 has the GPU; its peer is a process on CPU cores that trains
nothing and offers what it has, as bytes take their time whatever they hold. So nothing else fills
the gaps of the GPU, as a second rack on it would. Three kinds of blocks:

compute        8 layers of the Qwen 2.5 1.5B shape, 8 x 1024 tokens: the GPU is the limit
compute_late   the same; every transfer arrives `delay-ms` later
launch         370M weights, 1 x 128 tokens, eager: launching kernels is the limit, so everything
               that takes the interpreter's lock from the training thread is seen

A pair is a block without mend and one with it, after a join and a warm-up of tau steps; the first
pair of a model is not counted, and the garbage collector is frozen in all blocks. A block has
`gaps` gaps between captures, each with a capture, an exchange and an apply; CUDA events time it
from step to step. tau is chosen so that training never waits; `stall_ms` shows whether it did.

`measured` is the median of (time without / time with) over the pairs of compute and compute_late.
`launch` is the same of its pairs. To pass, no pair of the first two may be below 0.985, and the
median of launch must be at least 0.99. Without a GPU only `--shape tiny` runs.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mend
from benchmarks import qwen
from benchmarks._common import (
    Goal,
    RackArgs,
    freeze_garbage,
    limit,
    noise,
    racks,
    ratios,
    read_options,
    report,
    spreads,
)
from benchmarks.h200_machine import Clock
from benchmarks.h200_meeting import Meeting

BEGAN = time.monotonic()
GOAL = Goal(">= 0.995 of no exchange", 0.995, "of no exchange", better="higher", digits=4)
PAIR_MIN, LAUNCH_MIN = 0.985, 0.99
WORSE = 0.01
"""Share by which a later result may be worse before it has drifted."""

FRAGMENTS, WARM_UP = 8, 3
INIT_STD = 0.02
OPTIONS = {
    "shape": (("full", "tiny"), "of the models"),
    "pairs": (3, "of each kind; launch has four more"),
    "gaps": (4, "between captures in a block"),
    "gap": (8, "steps between captures"),
    "delay_ms": (600.0, "of compute_late"),
    "overlap": (7, "tau"),
    "overlap_late": (20, "tau of compute_late"),
}


class Kind(NamedTuple):
    shape: qwen.Shape
    sequences: int
    positions: int
    late: bool = False
    more_pairs: int = 0


_TINY = qwen.SHAPES["tiny"]
_HALF = qwen.Shape(8, 1536, 12, 2, 8960, 32_768, tied=True)
"""425M weights, so that a pair takes some 10 s, half of them to page-lock memory."""
KINDS = {
    "full": {
        "compute": Kind(_HALF, 8, 1024),
        "compute_late": Kind(_HALF, 8, 1024, late=True),
        "launch": Kind(qwen.Shape(24, 1024, 8, 2, 4096, 8192, tied=True), 1, 128, more_pairs=4),
    },
    "tiny": {
        "compute": Kind(_TINY, 2, 64),
        "compute_late": Kind(_TINY, 2, 64, late=True),
        "launch": Kind(_TINY, 1, 16),
    },
}


def main() -> None:
    options = read_options("gpu", __doc__, OPTIONS)
    if options.shape == "full" and not torch.cuda.is_available():
        sys.exit("gpu: there is no GPU here; --shape tiny only shows whether it runs")
    with racks(_rack, options) as pipes:
        blocks: dict[str, dict[str, Any]] = pipes[0].recv()
    found = {kind: ratios(each["without"], each["with"]) for kind, each in blocks.items()}
    values = found["compute"] + found["compute_late"]
    launch_met = statistics.median(found["launch"]) >= LAUNCH_MIN
    if torch.cuda.is_available():
        torch.cuda.init()
    report(
        "gpu", GOAL, values, options,
        limit("a step of compute without mend", "ms", blocks["compute"]["without"]),
        {
            "worse": WORSE,
            "of_no_exchange": spreads(found, 4),
            "pairs": {kind: [round(each, 4) for each in values] for kind, values in found.items()},
            "step_ms": {kind: spreads(_step_ms(each), 2) for kind, each in blocks.items()},
            "stall_ms": {kind: each["stall_ms"] for kind, each in blocks.items()},
        },
        also=min(values) >= PAIR_MIN and launch_met,
    )  # fmt: skip


def _step_ms(blocks: dict[str, Any]) -> dict[str, list[float]]:
    return {name: blocks[name] for name in ("without", "with")}


def _rack(args: RackArgs) -> None:
    torch.set_num_threads(1)
    meeting = Meeting(Path(args.folder), str(args.rack), 2)
    device = torch.device("cpu")
    if args.rack == 0 and torch.cuda.is_available():
        device = torch.device("cuda", 0)
    key = Path(args.folder) / "key"
    if args.rack == 0:
        _make_key(key)
    meeting.all_here("key")
    found: dict[str, dict[str, Any]] = {}
    bench, shape = None, None
    for name, kind in KINDS[args.options.shape].items():
        if bench is None or kind.shape != shape:
            bench = None  # frees the model before the next one is made
            bench, shape = _Bench(args, kind, device, key, meeting), kind.shape
        found[name] = bench.pairs(name, kind)
    if args.rack == 0:
        args.pipe.send(found)
    meeting.all_here("sent")


def _make_key(path: Path) -> None:
    from mend.config.keyfile import line_of

    path.touch(mode=0o600)
    path.write_text(line_of(bytes(range(32))) + "\n")


class _Bench:
    """A model on one rack, and its blocks."""

    def __init__(
        self, args: RackArgs, kind: Kind, device: torch.device, key: Path, meeting: Meeting
    ) -> None:
        self.args, self.device, self.key, self.meeting = args, device, key, meeting
        self.clock = Clock(device)
        self.model = _model(kind, device)
        self.start = [p.detach().clone() for p in self.model.parameters()]
        self.trains, self.warm = args.rack == 0, False
        # Fused on a GPU: one launch per step, as large jobs have it.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, fused=device.type == "cuda"
        )
        tokens = noise(64 * (kind.positions + 1), 3).mul(1e4).long().abs() % kind.shape.vocab
        self.tokens_BT = tokens[: 8 * (kind.positions + 1)].view(8, -1).to(device)

    def pairs(self, name: str, kind: Kind) -> dict[str, Any]:
        """ms per step of the blocks of each sort, and ms that training waited in them. A model's
        first pair does not count: memory of the host is touched for the first time."""
        options = self.args.options
        found: dict[str, Any] = {"without": [], "with": [], "stall_ms": []}
        measured = options.gap * options.gaps
        tau = options.overlap_late if kind.late else options.overlap
        warm_up, self.warm = 0 if self.warm else 1, True
        for pair in range(-warm_up, options.pairs + kind.more_pairs):
            self._restore()
            self.meeting.all_here(f"{name}.{pair}.begin")
            if self.trains:
                found["without"].append(self._block(kind, WARM_UP, measured, None)[0])
            self._restore()
            self.meeting.all_here(f"{name}.{pair}.join")
            runtime = self._join(name, pair, kind, tau)
            self.meeting.all_here(f"{name}.{pair}.joined")
            if self.trains:
                step_ms, stall_ms = self._block(kind, tau, measured, runtime)
                found["with"].append(step_ms)
                found["stall_ms"].append(stall_ms)
                print(f"gpu {name} pair={pair} of_no_exchange={found['without'][-1] / step_ms:.4f} "
                      f"stall_ms={stall_ms} elapsed_s={time.monotonic() - BEGAN:.0f}",
                      file=sys.stderr, flush=True)  # fmt: skip
            else:
                for _ in range(tau + measured):
                    runtime.step()
            self.meeting.all_here(f"{name}.{pair}.end")
            runtime.abort()
        return {sort: values[warm_up:] for sort, values in found.items()}

    def _join(self, name: str, pair: int, kind: Kind, tau: int) -> Any:
        options = self.args.options
        config = self.args.config(
            fragments=FRAGMENTS,
            sync_period_steps=FRAGMENTS * options.gap,
            overlap_steps=tau,
            lockstep=True,
            key_file=self.key,
            simulated_merge_delay_ms=options.delay_ms if kind.late else 0.0,
            start_timeout_s=60.0,
            wait_timeout_s=60.0,
        )
        config = dataclasses.replace(config, job_id=f"{name}-{pair}")
        return mend.mend_init(self.model, config, self.optimizer if self.trains else None)

    def _block(self, kind: Kind, warm_up: int, measured: int, runtime: Any) -> tuple[float, float]:
        """ms per step, and ms that training waited meanwhile."""
        freeze_garbage()
        for _ in range(warm_up):
            self._step(kind)
        stalled_ms = runtime.status().stall_ms_total if runtime else 0.0
        begun = self.clock.mark()
        for _ in range(measured):
            self._step(kind)
        ended = self.clock.mark()
        self.clock.synchronize()
        stall_ms = runtime.status().stall_ms_total - stalled_ms if runtime else 0.0
        return self.clock.between(begun, ended) / measured, round(stall_ms, 2)

    def _step(self, kind: Kind) -> None:
        tokens_BT = self.tokens_BT[: kind.sequences]
        loss: Tensor = self.model(tokens_BT[:, :-1], tokens_BT[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _restore(self) -> None:
        gc.unfreeze()  # what the pair before has left may go
        for parameter, start in zip(self.model.parameters(), self.start, strict=True):
            parameter.copy_(start)


def _model(kind: Kind, device: torch.device) -> nn.Module:
    """bf16, with the same bits on every device, so that no rack copies the other's weights."""
    with torch.device("meta"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = qwen.Qwen(kind.shape, kind.positions)
        finally:
            torch.set_default_dtype(torch.float32)
    model = model.to_empty(device=device)
    if kind.shape.tied:  # each module got memory of its own
        model.head.weight = model.embed.weight
    with torch.no_grad():
        model.cos, model.sin = qwen.rope(kind.positions, kind.shape.head_numel, device)
        for seed, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            values_N = noise(min(parameter.numel(), 1 << 20), seed).mul_(INIT_STD)
            values_N = values_N.bfloat16().to(device)
            flat_N = parameter.view(-1)
            for start in range(0, flat_N.numel(), values_N.numel()):
                part_n = flat_N[start : start + values_N.numel()]
                part_n.copy_(values_N[: part_n.numel()])
    return model


if __name__ == "__main__":
    main()
