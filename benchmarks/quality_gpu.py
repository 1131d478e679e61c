"""benchmarks.quality_gpu: what outer rules cost in loss, many arms at once on one GPU.

    python -m benchmarks.quality_gpu --size tiny --steps 64            seconds, on a CPU
    python -m benchmarks.quality_gpu --size 5M --steps 3072 --out runs/scratch.json \\
        --arms dp,alone,merge,merge:lr=.7:mu=.9,merge:lr=1-.7:mu=.9:ramp=10
    python -m benchmarks.quality_gpu --size 5M --steps 3072 --warm 1024 --out runs/warm.json
    python -m benchmarks.quality_gpu_table runs/*.json                 tables of what was kept

Byte-level GPTs learn the Python sources of the machine; every rack has packages of its own, the
loss is that of packages nobody trained on. Arms x seeds x racks are one batched model (bfloat16
products on a GPU, float32 on a CPU; weights, optimizer and outer rule float32). All arms of a run
have the same start, the same windows in the same order per rack and the same inner AdamW (clip 1,
warm-up over a tenth of the steps, cosine to a tenth), so arms are compared in pairs by seed.

The outer rule is mend's: fragments, schedule, delta from the rack's anchor, mean, Nesterov step,
carry tau steps later. tests/unit/test_quality_gpu compares the CPU size with mend_lab.reference.

--inner muon: the matrices of the blocks step by Muon (Jordan 2024; Nesterov 0.95, five
Newton-Schulz steps, scaled to AdamW's size as in Liu et al. 2025, arXiv 2502.16982), the rest by
AdamW, at one rate.

--warm W: the first W of the steps are data-parallel for all arms; then each goes its way.
--minutes: a piece ends there, writes OUT.part beside OUT and exits with 75; the same command again
goes on from it, to the same bits as one long run (tested on a CPU). A finished run is not made
again.

--average 2,4 --spacing 32: at the end also the loss of the mean of the closed model and the last 1
or 3 anchors, 32 steps apart; data parallel has the mean of its weights at the same steps.

How to read it: `losses` are nats per byte of the merged model (the mean of the racks' weights), by
arm, look and seed; `closed` is that of the model after mend's closing round, by arm and seed,
`averaged` the same of the means.
quality_gpu_table compares: only runs on one text compare.

Arms (--arms, comma-separated):
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA: products that repeat

import torch
from torch import Tensor, nn

from benchmarks import quality_gpu_outer
from benchmarks._common import parser_of
from benchmarks.quality_gpu_model import (
    BETAS,
    CLIP_NORM,
    EPS,
    MUON_MOMENTUM,
    SIZES,
    WEIGHT_DECAY,
    Muon,
    Size,
    Texts,
    leaves_of,
    losses,
    sources,
    start,
)
from benchmarks.quality_gpu_outer import Course, Outer, learning_rate, parse_arm
from benchmarks.quality_table import nulls
from mend.tools.demo_corpus import Corpus

ARMS = "dp,alone,merge,merge:lr=.7:mu=.9,merge:lr=1-.7:mu=.9:ramp=10"
NOT_FINISHED = 75
"""Exit status of a piece that is not the last one (EX_TEMPFAIL)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One run. Of two runs with equal `basis` and equal text the arms compare."""

    size: str
    racks: int
    seeds: int
    steps: int
    warm: int
    learning_rate: float
    look: int
    """Steps between two looks at the held-out loss."""
    held_out: int
    """Batches of a look."""
    arms: tuple[str, ...]
    inner: str = "adamw"
    average: tuple[int, ...] = ()
    """Models in a mean at the end, one loss for each of these counts."""
    spacing: int = 32
    """Steps between two of them."""

    @property
    def basis(self) -> dict[str, Any]:
        apart = ("seeds", "arms", "average", "spacing")
        kept = {key: value for key, value in asdict(self).items() if key not in apart}
        if self.inner == "adamw":  # results from before there was another one compare
            del kept["inner"]
        return kept


class Bench:
    """All models of a run, and where it is. Deterministic: no result depends on time or threads."""

    def __init__(self, plan: Plan, size: Size, corpus: Corpus, device: torch.device) -> None:
        self.plan, self.size = plan, size
        self.arms = [parse_arm(each) for each in plan.arms]
        self.leaves, self.texts = leaves_of(size), Texts(corpus, size, device)
        self.seeds, self.step, self.curve = range(plan.seeds), 0, list[tuple[int, list[Any]]]()
        self.losses: Callable[..., Tensor] = functools.partial(losses, size, self.leaves)
        self.wide = 1 if plan.warm else len(self.arms)  # arms that have parted
        begun = [start(self.leaves, seed) for seed in self.seeds]
        self._take([torch.stack(each).to(device) for each in zip(*begun, strict=True)], self.wide)
        self.outers: dict[int, Outer] = {}
        self.anchors = list[list[Tensor]]()
        """Of the steps that `average` names, oldest first: [arms, S, N] per leaf."""
        if not plan.warm:
            self._part()

    # ---- weights: leaves [M, N], M = arms x seeds x racks

    def _take(self, values_SN: Sequence[Tensor], arms: int) -> None:
        """Copies of [S, N] for `arms` and all racks, and a fresh optimizer."""
        self.values = [
            nn.Parameter(value[None, :, None].repeat(arms, 1, self.plan.racks, 1).flatten(0, 2))
            for value in values_SN
        ]
        groups = [
            {"params": [value], "weight_decay": WEIGHT_DECAY if leaf.decays else 0.0}
            for leaf, value in zip(self.leaves, self.values, strict=True)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPS, fused=True)
        self.muon = Muon(self.leaves, self.values) if self.plan.inner == "muon" else None

    def view(self, value: Tensor) -> Tensor:
        """[arms, S, R, N]"""
        return value.view(self.wide, self.plan.seeds, self.plan.racks, -1)

    def _part(self) -> None:
        """From here on every arm goes its own way."""
        fragments = [[2 * part, 2 * part + 1] for part in range(self.size.fragments)]
        for number, arm in enumerate(self.arms):
            if arm.exchanges:
                thetas = [self.view(value.detach())[number] for value in self.values]
                slots = [leaf.slots for leaf in self.leaves]
                course = Course(self.plan.steps, self.plan.warm)
                moments = functools.partial(self._moments, number)
                self.outers[number] = Outer(arm, thetas, fragments, slots, course, moments)

    def _moments(self, arm: int, leaf: int) -> list[tuple[float, Tensor]]:
        """(decay a step, [S, R, N]) of the moments of this leaf that the arm averages."""
        state, kind = self.optimizer.state[self.values[leaf]], self.arms[arm].moments
        found = []
        if kind != "none":
            found.append((BETAS[0], state["exp_avg"]))
            if self.muon:
                found.append((MUON_MOMENTUM, self.muon.momenta[leaf]))
        if kind == "mv":
            found.append((BETAS[1], state["exp_avg_sq"]))
        return [(decay, self.view(each)[arm]) for decay, each in found]

    def _spread(self) -> None:
        """The end of the warm start: its model and moments for all arms."""
        width = len(self.arms)
        old = [self.optimizer.state[value] for value in self.values]
        moments = self.muon.momenta if self.muon else []
        firsts = [self.view(value.detach())[0, :, 0] for value in self.values]
        self._take(firsts, width)
        for value, state in zip(self.values, old, strict=True):
            self.optimizer.state[value] = {
                key: part if part.dim() == 0 else part.repeat(width, 1)
                for key, part in state.items()
            }
        if self.muon:
            self.muon.momenta = [each.repeat(width, 1) for each in moments]
        self.wide = width
        self._part()

    # ---- training

    def advance(self) -> None:
        """One step of all models, then one of the outer rules."""
        self.step += 1
        text = self.texts.batch(self.seeds, self.step)
        self.train(text[None].expand(self.wide, *text.shape).flatten(0, 2))
        if self.step > self.plan.warm:
            for outer in self.outers.values():
                outer.after(self.step - self.plan.warm)
        if self.step == self.plan.warm:
            self._spread()
        if self._due():
            self.anchors.append(self._merged(anchors=True))
        if self.step > self.plan.warm and self.step % self.plan.look == 0:
            self.curve.append((self.step, self.look()))

    def train(self, text_MBT1: Tensor) -> None:
        """Forward, backward, mean of gradients where data-parallel, clip per model, AdamW."""
        for value in self.values:
            value.grad = None
        self.losses(self.values, text_MBT1).sum().backward()  # type: ignore[no-untyped-call]
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        grads = [value.grad for value in self.values if value.grad is not None]
        assert len(grads) == len(self.values), "a weight without a gradient"
        for number, arm in enumerate(self.arms[: self.wide]):
            if arm.kind == "dp" or self.step <= self.plan.warm:
                for grad in grads:
                    racks = self.view(grad)[number]
                    racks.copy_(racks.mean(1, keepdim=True).expand_as(racks))
        norms = torch.stack([torch.linalg.vector_norm(grad, dim=1) for grad in grads])
        scale_M1 = (CLIP_NORM / (norms.norm(dim=0) + 1e-6)).clamp(max=1.0)[:, None]
        for grad in grads:
            grad.mul_(scale_M1)
        rate = learning_rate(self.step, self.plan.steps, self.plan.learning_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._step(rate)

    def _step(self, rate: float) -> None:
        """The optimizers' step: of an arm with a rate of its own at that, of resting racks none."""
        resting = self._resting()
        kept = [[part[resting] for part in parts] for parts in self._parts()] if resting else []
        own = self._own_rates()
        olds = [[self.view(v.detach())[arm].clone() for v in self.values] for arm in own]
        if self.muon:
            self.muon.step(rate)
        self.optimizer.step()
        for (arm, factor), before in zip(own.items(), olds, strict=True):
            for value, old in zip(self.values, before, strict=True):
                now = self.view(value.detach())[arm]
                now.sub_(old).mul_(factor).add_(old)  # a step is linear in its rate
        for parts, rested in zip(self._parts() if kept else (), kept, strict=True):
            for part, old in zip(parts, rested, strict=True):
                part[resting] = old

    def _own_rates(self) -> dict[int, float]:
        """The arms that have an inner rate of their own, and its factor."""
        parted = self.step > self.plan.warm
        return {n: arm.rate for n, arm in enumerate(self.arms) if arm.rate != 1 and parted}

    def _resting(self) -> list[int]:
        """The models whose racks are too slow to make this step."""
        step, count, each = self.step - self.plan.warm, self.plan.racks, self.plan.seeds
        if step <= 0:
            return []
        return [
            (number * each + seed) * count + rack
            for number, arm in enumerate(self.arms)
            for rack in range(count)
            if arm.trained(rack, step) == arm.trained(rack, step - 1)
            for seed in range(each)
        ]

    def _parts(self) -> Iterator[list[Tensor]]:
        """The tensors that a step changes, [M, N]: weights and moments. The step count, by which
        AdamW corrects its moments, is one for all models; it matters in the first hundred only."""
        for number, value in enumerate(self.values):
            state = self.optimizer.state[value]
            moments = [state[key] for key in ("exp_avg", "exp_avg_sq") if key in state]
            if self.muon:
                moments.append(self.muon.momenta[number])
            yield [value, *moments]

    # ---- the held-out loss

    @torch.no_grad()
    def look(self) -> list[list[float]]:
        """Return by arm and seed the loss of the mean of the racks' weights; of `alone` the mean of
        the racks' losses."""
        found = self._held_out([value.flatten(0, 1) for value in self._merged()])
        by_arm = found.view(self.wide, self.plan.seeds)
        for number, arm in enumerate(self.arms):
            if arm.kind == "alone":
                own = [self.view(value.detach())[number].flatten(0, 1) for value in self.values]
                by_arm[number] = self._held_out(own).view(self.plan.seeds, -1).mean(1)
        rows: list[list[float]] = by_arm.tolist()
        return rows

    @torch.no_grad()
    def _merged(self, anchors: bool = False) -> list[Tensor]:
        """[arms, S, N] per leaf: the mean of the racks' weights, or, where there are some, the
        anchors."""
        merged = [self.view(v.detach()).mean(2, dtype=torch.float64).float() for v in self.values]
        if anchors:
            for number, outer in self.outers.items():
                for leaf, anchor in zip(merged, outer.anchors, strict=True):
                    leaf[number] = anchor
        return merged

    def _due(self) -> bool:
        """Whether the anchors of this step are in a mean at the end; those of the end are taken
        after the closing round."""
        left, spacing = self.plan.steps - self.step, self.plan.spacing
        most = max(self.plan.average, default=1) - 1
        return self.step > self.plan.warm and left % spacing == 0 and 0 < left // spacing <= most

    def averaged(self) -> dict[int, list[list[float]]]:
        """By count of models in the mean, arm and seed; after `close`."""
        models, found = [*self.anchors, self._merged(anchors=True)], {}
        for count in self.plan.average:
            last = models[-count:]
            mean = [
                torch.stack(leaf).mean(0, dtype=torch.float64) for leaf in zip(*last, strict=True)
            ]
            losses_K = self._held_out([value.float().flatten(0, 1) for value in mean])
            found[count] = losses_K.view(self.wide, self.plan.seeds).tolist()
        return found

    def _held_out(self, values_KN: Sequence[Tensor]) -> Tensor:
        count = values_KN[0].shape[0]
        total = torch.zeros(count, dtype=torch.float64, device=values_KN[0].device)
        batches = self.texts.held_out(self.plan.held_out)
        for batch in batches:
            total += losses(self.size, self.leaves, values_KN, batch.expand(count, *batch.shape))
        return total / len(batches)

    def close(self) -> list[list[float]]:
        """The run ends; losses as in `look`, after mend's closing round."""
        for outer in self.outers.values():
            outer.close(self.step - self.plan.warm)
        return self.look()

    # ---- pieces

    def save(self, path: Path) -> None:
        """Everything, in one file that replaces the old one whole. Chance has no state: windows
        are drawn from seed and step."""
        fresh = path.with_suffix(".new")
        torch.save(
            {
                "plan": asdict(self.plan), "text": self.texts.sha256, "step": self.step,
                "wide": self.wide, "values": [value.detach() for value in self.values],
                "optimizer": self.optimizer.state_dict(), "curve": self.curve,
                "anchors": self.anchors,
                "muon": self.muon.momenta if self.muon else [],
                "outers": {number: outer.state() for number, outer in self.outers.items()},
            },
            fresh,
        )  # fmt: skip
        fresh.replace(path)

    def load(self, path: Path) -> None:
        """Go on where `save` was. Raises ValueError when that was another run."""
        kept = torch.load(path, map_location=self.values[0].device, weights_only=False)
        if (kept["plan"], kept["text"]) != (asdict(self.plan), self.texts.sha256):
            raise ValueError(f"{path} is of another plan or text; remove it, or name another --out")
        self.step, self.wide, self.curve = kept["step"], kept["wide"], kept["curve"]
        self.anchors = kept["anchors"]
        if 0 < self.plan.warm <= self.step:  # after the warm start
            firsts = [value.detach()[:: self.plan.racks] for value in self.values]
            self._take(firsts, self.wide)
            self._part()
        with torch.no_grad():
            for value, old in zip(self.values, kept["values"], strict=True):
                value.copy_(old)
        self.optimizer.load_state_dict(kept["optimizer"])
        if self.muon:
            self.muon.momenta = kept["muon"]
        for number, state in kept["outers"].items():
            self.outers[number].load(state)


# ------------------------------------------------------------------ one run


def main() -> None:
    options = arguments(sys.argv[1:])
    plan = Plan(
        size=options.size, racks=options.racks, seeds=options.seeds, steps=options.steps,
        warm=options.warm, learning_rate=options.learning_rate, look=options.look or options.steps,
        held_out=options.held_out, arms=tuple(options.arms.split(",")), inner=options.inner,
        average=options.average, spacing=options.spacing,
    )  # fmt: skip
    out: Path = options.out
    if out.exists():
        sys.exit(f"quality_gpu: {out} is there already; remove it, or name another --out")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        bench = Bench(plan, SIZES[plan.size], sources(plan.racks, options.text), device)
        finished = run(bench, out.with_suffix(".part"), options)
    except ValueError as error:
        sys.exit(f"quality_gpu: {error}")
    if not finished:
        print(f"quality_gpu: {bench.step} of {plan.steps} steps; the same command again goes on")
        sys.exit(NOT_FINISHED)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report(bench, device), indent=1) + "\n")
    out.with_suffix(".part").unlink(missing_ok=True)
    print("wrote", out)


def arguments(words: Sequence[str]) -> argparse.Namespace:
    outer = quality_gpu_outer.__doc__ or ""
    parser = parser_of("quality_gpu", (__doc__ or "") + outer.partition("\n\n")[2])
    parser.add_argument("--size", choices=SIZES, default="tiny", help="parameters of a model")
    parser.add_argument("--racks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3, help="starts and orders of the text")
    parser.add_argument("--steps", type=int, default=1024, help="of each rack, warm ones included")
    parser.add_argument("--warm", type=int, default=0, help="data-parallel steps at the start")
    parser.add_argument("--arms", default=ARMS, help=f"default {ARMS}")
    parser.add_argument("--inner", choices=("adamw", "muon"), default="adamw", help="optimizer")
    parser.add_argument("--learning-rate", type=float, default=7e-4, help="inner peak")
    parser.add_argument(
        "--look", type=int, default=0, help="steps between looks (default: the end)"
    )
    parser.add_argument("--held-out", type=int, default=128, help="batches of a look")
    parser.add_argument(
        "--average", type=lambda text: tuple(map(int, text.split(","))), default=(),
        help="models in a mean at the end",
    )  # fmt: skip
    parser.add_argument("--spacing", type=int, default=32, help="steps between two of them")
    parser.add_argument("--text", type=Path, help="folder of packages (default: all installed)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of this piece")
    parser.add_argument("--compile", action="store_true", help="torch.compile the losses")
    parser.add_argument("--out", type=Path, default=Path("runs/quality_gpu.json"))
    return parser.parse_args(words)


def run(bench: Bench, part: Path, options: argparse.Namespace) -> bool:
    """Train. True: all steps are made; else they are kept in `part`."""
    begun, first = time.monotonic(), bench.step
    if part.exists():
        bench.load(part)
        first = bench.step
    if options.compile:
        bench.losses = torch.compile(bench.losses, dynamic=False)
    count = len(bench.arms) * bench.plan.seeds * bench.plan.racks
    print(f"{count} models of {sum(leaf.numel for leaf in bench.leaves):,} parameters", flush=True)
    while bench.step < bench.plan.steps:
        bench.advance()
        passed_s = time.monotonic() - begun
        if bench.step in (10, bench.plan.warm + 10) or bench.step % 256 == 0:
            ms = passed_s / (bench.step - first) * 1e3
            shown = bench.curve[-1] if bench.curve else ""
            print(f"step {bench.step} {passed_s:.0f} s, {ms:.0f} ms a step {shown}", flush=True)
        if passed_s > 60 * options.minutes and bench.step < bench.plan.steps:
            part.parent.mkdir(parents=True, exist_ok=True)
            bench.save(part)
            return False
    return True


def report(bench: Bench, device: torch.device) -> dict[str, Any]:
    """The run as one JSON object; a loss that is no number is null."""
    plan = bench.plan
    looks = [(step, nulls(rows)) for step, rows in bench.curve]
    closed, averaged = bench.close(), bench.averaged()
    return {
        "name": "quality_gpu",
        "plan": plan.basis,
        "text": {"sha256": bench.texts.sha256, "bytes": bench.texts.bytes_by_part},
        "machine": {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "looks": [step for step, _ in looks],
        # by arm: by look: by seed
        "losses": {
            said: [rows[number] for _, rows in looks] for number, said in enumerate(plan.arms)
        },
        # by arm: by seed
        "closed": dict(zip(plan.arms, nulls(closed), strict=True)),
        # by count: by arm: by seed
        "averaged": {
            str(count): dict(zip(plan.arms, nulls(rows), strict=True))
            for count, rows in averaged.items()
        },
        "command": " ".join(["python -m benchmarks.quality_gpu", *sys.argv[1:]]),
    }


if __name__ == "__main__":
    main()
