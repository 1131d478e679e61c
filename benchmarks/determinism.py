"""benchmarks.determinism: the cost of a level in a training step. Prints one JSON object.

    python -m benchmarks.determinism --width 64 --rows 8 --tokens 32
    python -m benchmarks.determinism --width 256 --layers 4 --rows 8 --tokens 128 --blocks 12
    python -m benchmarks.determinism --model mlp --level run

One process trains a model (fp32, AdamW, clipping) on one thread, in blocks of `steps`: a plain loop
of torch, and DeterministicTrainer at the level, strict. The two take turns, so that a busy machine
slows both. An MLP takes rows x tokens rows.

`measured` is the median over pairs of blocks of level / plain, in CPU time of the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._common import Goal, limit, ratios, read_options, report, spreads
from benchmarks._determinism_models import Gpt
from benchmarks._determinism_models import loss_of as loss_of_gpt
from mend.determinism import DeterministicTrainer, enable
from tests.unit.determinism.llama import WORDS, Llama, loss_of

GOAL = Goal("<= 3 times a plain step", 3.0, "times", digits=2)
SEED = 18
CLIP = 1.0
OPTIONS = {
    "model": (("llama", "gpt", "mlp"), "what is trained"),
    "level": (("shape", "run", "everywhere"), "of determinism"),
    "width": (64, "of the model"),
    "layers": (2, "of the model"),
    "rows": (8, "of a batch"),
    "tokens": (32, "of a row"),
    "threads": (1, "of torch"),
    "steps": (5, "steps of a block"),
    "blocks": (30, "pairs of blocks; one more warms up"),
    "own_loop": (0, "1: the level in the plain loop, whose optimizer is watched"),
}


def main() -> None:
    options = read_options("determinism", __doc__, OPTIONS)
    torch.set_num_threads(options.threads)
    took: dict[str, list[float]] = {"plain": [], "level": []}
    makes = {"plain": _plain, "level": _level}
    for block in range(options.blocks + 1):
        for name in ("plain", "level") if block % 2 else ("level", "plain"):
            taken_ms = makes[name](options)
            if block:
                took[name].append(taken_ms)
    times = ratios(took["level"], took["plain"])
    plain = limit("the same step of plain torch", "ms", took["plain"], 2)
    more = {"step_ms": spreads(took, 2)}
    report("determinism", GOAL, times, options, plain, more)


def _plain(options: Any) -> float:
    return _timed_loop_ms(options, *_training(options))


def _timed_loop_ms(
    options: Any, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor
) -> float:
    loss = LOSSES[options.model]

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(model, batch).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return _timed_ms(step, options.steps)


def _level(options: Any) -> float:
    model, optimizer, batch = _training(options)
    with enable(SEED, options.level):
        if options.own_loop:
            return _timed_loop_ms(options, model, optimizer, batch)
        trainer = DeterministicTrainer(
            model, optimizer, SEED, level=options.level, grad_norm_max=CLIP
        )
        return _timed_ms(lambda: trainer.step(batch, LOSSES[options.model]), options.steps)


def _training(options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """Model, optimizer and batch: (rows, tokens + 1) words, or (rows x tokens, width) numbers."""
    torch.manual_seed(SEED)
    width, layers, tokens = options.width, options.layers, options.tokens
    model: nn.Module
    if options.model == "mlp":
        blocks = (
            (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        model = nn.Sequential(*chain.from_iterable(blocks))
        batch = torch.randn(options.rows * tokens, width)
    else:
        if options.model == "gpt":
            model = Gpt(WORDS, width, layers, heads=8, tokens=tokens)
        else:
            model = Llama(width, groups=2, hidden=3 * width, layers=layers)
        batch = torch.randint(0, WORDS, (options.rows, tokens + 1))
    return model, torch.optim.AdamW(model.parameters()), batch


def _loss_of_numbers(model: nn.Module, x: Tensor) -> Tensor:
    """Of an autoencoder."""
    return F.mse_loss(model(x), x)


LOSSES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "llama": loss_of, "gpt": loss_of_gpt, "mlp": _loss_of_numbers
}  # fmt: skip


def _timed_ms(step: Callable[[], object], steps: int) -> float:
    """CPU time of a step, after one that makes the optimizer's state."""
    step()
    started_ns = time.process_time_ns()
    for _ in range(steps):
        step()
    return (time.process_time_ns() - started_ns) / 1e6 / steps


if __name__ == "__main__":
    main()
