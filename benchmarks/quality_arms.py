"""benchmarks.quality_arms: the arms of the quality harness. All share one model, one inner step and
the same tokens in the same order.

`alone`, `data-parallel` and `diloco` are plain loops of one process that use nothing of mend but
the demo's model and text, so that mend is compared with something independent. `mend-*` runs mend:
a process per rack, `mend_init`, sockets. `page-*` changes one setting of mend and runs it by
`mend_lab.reference`, the same rule in one process; it gives the results of mend in lockstep.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import mend
from benchmarks._common import RackArgs, racks
from mend.fragment.plan import build_plan
from mend.tools.demo_corpus import Corpus
from mend.tools.demo_model import ByteGPT, Size, Windows, held_out_loss, learning_rate, loss_of
from mend_lab import reference

CLIP_NORM = 1.0
BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Settings of all arms. `batch` of the size is per rank = per rack and step."""

    size: Size
    steps: int
    period_steps: int
    """H of every arm that exchanges."""
    eval_steps: int
    """Steps between two looks at the held-out loss: a multiple of H."""
    eval_batches: int
    learning_rate: float
    """Peak of the inner AdamW; tuned on data parallel only."""

    def __post_init__(self) -> None:
        assert self.eval_steps % self.period_steps == 0, (
            "a look between two merges sees old weights"
        )
        assert self.steps % self.eval_steps == 0, "the last look has to be at the end"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one rack in a step."""
        return self.size.batch * self.size.context


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to train. `kind`: alone, data-parallel, diloco, mend, or page."""

    kind: str
    says: str
    """One line for the table."""
    outer_lr: float = 1.0
    momentum: float = 0.0
    fragments: int = 4
    overlap_steps: int | None = None
    """tau; None: mend's default, min(8, H / 4). Of `page` and `mend` only."""
    apply_mode: str = "carry"
    periods: int = 1
    """This arm's H in those of the plan."""
    settings: Mapping[str, Any] | None = None
    """Of `mend`: what differs from mend's default settings. None: the plan's H, float32, no
    momentum, lockstep, and what is above."""


ARMS = {
    "alone": Arm(kind="alone", says="no exchange; mean of the racks' own losses: the floor"),
    "data-parallel": Arm(kind="data-parallel", says="gradients of all racks averaged every step"),
    "diloco": Arm(kind="diloco", says="synchronous DiLoCo, outer lr 1, momentum 0"),
    "mend-blocking": Arm(kind="mend", says="mend, training waits: tau 0", overlap_steps=0),
    "mend-concurrent": Arm(kind="mend", says="mend, overlapped: tau min(8, H/4), float32"),
    "mend-default": Arm(
        kind="mend", says="mend's default settings (H 32, int8, momentum by R H)", settings={}
    ),
    "mend-default-lockstep": Arm(
        kind="mend", says="the same in lockstep", settings={"lockstep": True}
    ),
    "diloco-textbook": Arm(
        kind="diloco", says="synchronous DiLoCo, .7 and Nesterov .9", outer_lr=0.7, momentum=0.9
    ),
    "page-concurrent": Arm(kind="page", says="mend-concurrent by the reference"),
    "page-tau-2": Arm(kind="page", says="with tau 2", overlap_steps=2),
    "page-tau-4": Arm(kind="page", says="with tau 4", overlap_steps=4),
    "page-tau-16": Arm(kind="page", says="with tau 16", overlap_steps=16),
    "page-overwrite": Arm(kind="page", says="with overwrite", apply_mode="overwrite"),
    "page-blend": Arm(kind="page", says="with blend 0.5", apply_mode="blend"),
    "page-one-fragment": Arm(kind="page", says="with one fragment", fragments=1),
    "page-long": Arm(kind="page", says="with 2 H", periods=2),
    "diloco-long": Arm(kind="diloco", says="diloco with 2 H", periods=2),
}

CORE = ("alone", "data-parallel", "diloco", "mend-blocking", "mend-concurrent", "mend-default")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run."""

    plan: Plan
    arm: str
    racks: int
    seed: int

    @property
    def key(self) -> tuple[int, int, str]:
        return self.racks, self.seed, self.arm


# ------------------------------------------------------------------ what all arms share


def period_of(arm: Arm, plan: Plan) -> int:
    """H, steps."""
    return arm.periods * plan.period_steps


def overlap_of(arm: Arm, period_steps: int) -> int:
    """tau, steps; as mend works it out."""
    return arm.overlap_steps if arm.overlap_steps is not None else min(8, period_steps // 4)


def settle() -> None:
    """One thread and one order of every sum: a run repeats bit for bit."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def fresh(cell: Cell) -> tuple[ByteGPT, torch.optim.Optimizer]:
    """The model every rack of every arm starts from, and its inner optimizer."""
    torch.manual_seed(cell.seed)
    model = ByteGPT(cell.plan.size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=cell.plan.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY
    )
    return model, optimizer


def windows_of(cell: Cell, corpus: Corpus, rack: int) -> Windows:
    """The batches of one rack: its own text, in an order that only racks, rack and seed decide."""
    seed = 1 + rack + 64 * (cell.racks + 64 * cell.seed)
    return Windows(corpus.racks[rack], cell.plan.size, seed)


class Inner:
    """The inner loop of every arm: forward, backward, clip, AdamW with warm-up and cosine."""

    def __init__(self, cell: Cell, sources: Sequence[Windows]) -> None:
        self.model, self.optimizer = fresh(cell)
        self._plan, self._sources = cell.plan, sources
        self.tokens = 0

    def step(self, step: int, before_update: Callable[[int], None] | None = None) -> None:
        """One update from the mean gradient of one batch of each source. `step` counts from 0."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self._plan.steps, self._plan.learning_rate)
        self.optimizer.zero_grad(set_to_none=True)
        fresh_tokens = 0
        for source in self._sources:
            batch_BT1 = source.next()
            (loss_of(self.model, batch_BT1) / len(self._sources)).backward()  # type: ignore[no-untyped-call]
            fresh_tokens += batch_BT1[:, 1:].numel()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        if before_update is not None:
            before_update(fresh_tokens)
        self.optimizer.step()
        self.tokens += fresh_tokens


class Curve:
    """Held-out losses (nats per byte) by tokens of a rack, all over the same windows."""

    def __init__(self, cell: Cell, corpus: Corpus) -> None:
        self._plan, self._text = cell.plan, corpus.held_out
        self.points: list[tuple[int, float]] = []

    def due(self, step: int) -> bool:
        """`step` counts from 1."""
        return step % self._plan.eval_steps == 0

    def loss(self, model: nn.Module) -> float:
        return held_out_loss(model, self._text, self._plan.size, self._plan.eval_batches)

    def look(self, step: int, *models: nn.Module) -> None:
        """Note the mean loss of these models."""
        losses = [self.loss(model) for model in models]
        self.points.append((step * self._plan.tokens_per_step, math.fsum(losses) / len(losses)))


def bits_of(model: nn.Module) -> str:
    """sha256 over all parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


# ------------------------------------------------------------------ arms of one process


def alone(cell: Cell, corpus: Corpus) -> dict[str, Any]:
    """Each rack for itself."""
    inner = [Inner(cell, [windows_of(cell, corpus, rack)]) for rack in range(cell.racks)]
    curve = Curve(cell, corpus)
    for step in range(cell.plan.steps):
        for each in inner:
            each.step(step)
        if curve.due(step + 1):
            curve.look(step + 1, *(each.model for each in inner))
    own = [curve.loss(each.model) for each in inner]
    return result_of(curve, sum(each.tokens for each in inner), inner[0].model) | {
        "own_losses": own
    }


def data_parallel(cell: Cell, corpus: Corpus) -> dict[str, Any]:
    """One model, one batch of every rack per step: what DDP over all racks computes."""
    inner = Inner(cell, [windows_of(cell, corpus, rack) for rack in range(cell.racks)])
    curve = Curve(cell, corpus)
    for step in range(cell.plan.steps):
        inner.step(step)
        if curve.due(step + 1):
            curve.look(step + 1, inner.model)
    return result_of(curve, inner.tokens, inner.model)


class Outer:
    """The global weights of DiLoCo, in fp64, and torch's own SGD on their outer gradient.

    Source: Douillard et al., 2311.08105, algorithm 1.
    """

    def __init__(self, model: nn.Module, arm: Arm) -> None:
        self._weights = [
            nn.Parameter(parameter.detach().double().clone()) for parameter in model.parameters()
        ]
        self._optimizer = torch.optim.SGD(
            self._weights, arm.outer_lr, arm.momentum, nesterov=arm.momentum > 0
        )

    @torch.no_grad()
    def merge(self, models: Sequence[nn.Module]) -> None:
        """Outer gradient: mean over racks of (global - local). Then all start from the result."""
        for weight, *locals_ in zip(
            self._weights, *(model.parameters() for model in models), strict=True
        ):
            moved: list[Tensor] = [weight - local.double() for local in locals_]
            weight.grad = torch.stack(moved).sum(0) / len(moved)
        self._optimizer.step()
        for model in models:
            for parameter, weight in zip(model.parameters(), self._weights, strict=True):
                parameter.copy_(weight)


def diloco(cell: Cell, corpus: Corpus) -> dict[str, Any]:
    """H steps of each rack, one outer step of the whole model, no overlap."""
    inner = [Inner(cell, [windows_of(cell, corpus, rack)]) for rack in range(cell.racks)]
    models = [each.model for each in inner]
    arm = ARMS[cell.arm]
    outer, curve = Outer(models[0], arm), Curve(cell, corpus)
    for step in range(cell.plan.steps):
        for each in inner:
            each.step(step)
        if (step + 1) % period_of(arm, cell.plan) == 0:
            outer.merge(models)
        if curve.due(step + 1):
            curve.look(step + 1, models[0])
    return result_of(curve, sum(each.tokens for each in inner), models[0])


def result_of(curve: Curve, tokens: int, model: nn.Module) -> dict[str, Any]:
    """`tokens`: of all racks together."""
    return {
        "loss": curve.points[-1][1],
        "curve": curve.points,
        "tokens": tokens,
        "weights": bits_of(model),
    }


# ------------------------------------------------------------------ mend


def rack_of_mend(args: RackArgs) -> None:
    """One rack, in a process of its own; rack 0 looks at the merged model."""
    settle()
    cell, corpus = args.options
    arm: Arm = ARMS[cell.arm]
    config = args.config(**settings_of_mend(arm, cell))
    inner = Inner(cell, [windows_of(cell, corpus, args.rack)])
    runtime = mend.mend_init(inner.model, config, optimizer=inner.optimizer)
    curve = Curve(cell, corpus)
    for step in range(cell.plan.steps):
        inner.step(step, runtime.count_tokens)
        if args.rack == 0 and step + 1 < cell.plan.steps and curve.due(step + 1):
            with runtime.anchor_weights():
                curve.look(step + 1, inner.model)
    status = mend.mend_shutdown(inner.model)
    assert status is not None
    assert status.ledger.merged == inner.tokens, f"not all was merged: {status.ledger}"
    if args.rack == 0:
        curve.look(cell.plan.steps, inner.model)
    args.pipe.send(
        {
            "tokens": inner.tokens,
            "weights": bits_of(inner.model),
            "points": curve.points,
            "rounds": status.rounds_committed,
            "stall_ms": status.stall_ms_total,
        }
    )


def settings_of_mend(arm: Arm, cell: Cell) -> dict[str, Any]:
    """What a rack of `mend` is told beside who its peers are."""
    if arm.settings is not None:  # `RackArgs.config` has no ramp and no momentum otherwise
        return {"outer_ramp_rounds": None, "outer_optimizer_momentum": None, **arm.settings}
    return {
        "fragments": arm.fragments,
        "sync_period_steps": period_of(arm, cell.plan),
        "overlap_steps": arm.overlap_steps,
        "concurrent_outer_step": arm.overlap_steps != 0,
        "outer_lr": arm.outer_lr,
        "outer_optimizer_momentum": arm.momentum,
        "apply_mode": arm.apply_mode,
        "codec": "float32",  # else the mean of the racks is not the merge
        "merge_min_racks": cell.racks,
        "lockstep": True,  # so that a run repeats
    }


def with_mend(cell: Cell, corpus: Corpus) -> dict[str, Any]:
    """Real processes, a real exchange. Raises EOFError when a rack died; it has results why."""
    with racks(rack_of_mend, (cell, corpus), cell.racks) as pipes:  # type: ignore[arg-type]
        results = [pipe.recv() for pipe in pipes]
    assert len({each["weights"] for each in results}) == 1, "the racks' merged models differ"
    return {
        "loss": results[0]["points"][-1][1],
        "curve": results[0]["points"],
        "tokens": sum(each["tokens"] for each in results),
        "weights": results[0]["weights"],
        "rounds": results[0]["rounds"],
        "stall_ms": [round(each["stall_ms"], 1) for each in results],
    }


# ------------------------------------------------------------------ one setting changed


@torch.no_grad()
def mean_into(merged: nn.Module, models: Sequence[nn.Module]) -> None:
    """The merge of all models at this moment, with outer lr 1 and no momentum."""
    for parameter, *locals_ in zip(
        merged.parameters(), *(model.parameters() for model in models), strict=True
    ):
        parameter.copy_(torch.stack([local.double() for local in locals_]).mean(0))


def settings_of(arm: Arm, cell: Cell, model: nn.Module) -> reference.Settings:
    """Settings of the reference that correspond to mend's; the fragments are those of mend."""
    assert (arm.outer_lr, arm.momentum) == (1.0, 0.0), "the mean of the racks is not the merge"
    index = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    period = period_of(arm, cell.plan)
    return reference.Settings(
        fragments=[
            [index[slot.name] for slot in layout.slots]
            for layout in build_plan(model, arm.fragments)
        ],
        period=period,
        overlap=overlap_of(arm, period),
        apply_mode=arm.apply_mode,
    )


def page(cell: Cell, corpus: Corpus) -> dict[str, Any]:
    """Evaluates the mean of the racks after their update and before a capture or apply."""
    inner = [Inner(cell, [windows_of(cell, corpus, rack)]) for rack in range(cell.racks)]
    models = [each.model for each in inner]
    curve, (merged, _) = Curve(cell, corpus), fresh(cell)

    def train_of(rack: int) -> Callable[[int], int]:
        def train(step: int) -> int:
            before = inner[rack].tokens
            inner[rack].step(step - 1)
            if rack == cell.racks - 1 and curve.due(step):
                mean_into(merged, models)
                curve.look(step, merged)
            return inner[rack].tokens - before

        return train

    reference.lockstep(
        [
            reference.Rack(tuple(model.parameters()), train_of(rack))
            for rack, model in enumerate(models)
        ],
        settings_of(ARMS[cell.arm], cell, models[0]),
        cell.plan.steps,
    )
    return result_of(curve, sum(each.tokens for each in inner), merged)


def text_hash(corpus: Corpus) -> str:
    """sha256 over the lengths and bytes of every rack's text and the held-out text."""
    digest = hashlib.sha256()
    for part in (*corpus.racks, corpus.held_out):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
