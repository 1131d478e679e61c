"""benchmarks.determinism: the cost of level shape in a training step. Prints one JSON object.

    python -m benchmarks.determinism --width 64 --rows 8 --tokens 32
    python -m benchmarks.determinism --width 256 --layers 4 --rows 8 --tokens 128 --blocks 12

One process trains a Llama-shaped model (fp32, AdamW, clipping) on one thread, in blocks of `steps`:
a plain loop of torch, and DeterministicTrainer at level shape (or everywhere), strict. The two take
turns, so that a busy machine slows both.

`measured` is the median over pairs of blocks of shape / plain, in CPU time of the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._common import Goal, limit, ratios, read_options, report, spreads
from mend.determinism import DeterministicTrainer, enable
from tests.unit.determinism.llama import WORDS, Llama, loss_of

GOAL = Goal("<= 3 times a plain step", 3.0, "times", digits=2)
SEED = 18
CLIP = 1.0
OPTIONS = {
    "width": (64, "of the model"),
    "layers": (2, "of the model"),
    "rows": (8, "of a batch"),
    "tokens": (32, "of a row"),
    "threads": (1, "of torch"),
    "steps": (5, "steps of a block"),
    "blocks": (30, "pairs of blocks; one more warms up"),
    "everywhere": (0, "1: level everywhere in place of shape"),
    "own_loop": (0, "1: level shape in the plain loop, whose optimizer is watched"),
}


def main() -> None:
    options = read_options("determinism", __doc__, OPTIONS)
    torch.set_num_threads(options.threads)
    took: dict[str, list[float]] = {"plain": [], "shape": []}
    makes = {"plain": _plain, "shape": _shape}
    for block in range(options.blocks + 1):
        for name in ("plain", "shape") if block % 2 else ("shape", "plain"):
            taken_ms = makes[name](options)
            if block:
                took[name].append(taken_ms)
    times = ratios(took["shape"], took["plain"])
    plain = limit("the same step of plain torch", "ms", took["plain"], 2)
    more = {"step_ms": spreads(took, 2)}
    report("determinism", GOAL, times, options, plain, more)


def _plain(options: Any) -> float:
    return _timed_loop_ms(options, *_training(options))


def _timed_loop_ms(
    options: Any, model: nn.Module, optimizer: torch.optim.Optimizer, words_BT: Tensor
) -> float:

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, words_BT).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return _timed_ms(step, options.steps)


def _shape(options: Any) -> float:
    model, optimizer, words_BT = _training(options)
    level: Any = "everywhere" if options.everywhere else "shape"
    with enable(SEED, level):
        if options.own_loop:
            return _timed_loop_ms(options, model, optimizer, words_BT)
        trainer = DeterministicTrainer(model, optimizer, SEED, level=level, grad_norm_max=CLIP)
        return _timed_ms(lambda: trainer.step(words_BT, loss_of), options.steps)


def _training(options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(SEED)
    width = options.width
    model = Llama(width, groups=2, hidden=3 * width, layers=options.layers)
    words_BT = torch.randint(0, WORDS, (options.rows, options.tokens + 1))
    return model, torch.optim.AdamW(model.parameters()), words_BT


def _timed_ms(step: Callable[[], object], steps: int) -> float:
    """CPU time of a step, after one that makes the optimizer's state."""
    step()
    started_ns = time.process_time_ns()
    for _ in range(steps):
        step()
    return (time.process_time_ns() - started_ns) / 1e6 / steps


if __name__ == "__main__":
    main()
