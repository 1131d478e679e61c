"""benchmarks.determinism: what level shape costs a training step. Prints one JSON object.

    python -m benchmarks.determinism --width 64 --rows 8 --tokens 32
    python -m benchmarks.determinism --width 256 --layers 4 --rows 8 --tokens 128 --blocks 12

One process trains a Llama-shaped model (fp32, AdamW, clipping) on one thread, in blocks of `steps`:
a plain loop of torch, and DeterministicTrainer at level shape, strict. The two take turns, so that
a busy machine slows both.

`measured` is the median over pairs of blocks of shape / plain, in CPU time of the process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._common import arguments, limit, report, spread
from mend.determinism import DeterministicTrainer, enable
from tests.unit.determinism.llama import WORDS, Llama, loss_of

GOAL = 3.0
SEED = 18
CLIP = 1.0


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    took: dict[str, list[float]] = {"plain": [], "shape": []}
    makes = {"plain": _plain, "shape": _shape}
    for block in range(options.blocks + 1):
        for name in ("plain", "shape") if block % 2 else ("shape", "plain"):
            taken_ms = makes[name](options)
            if block:
                took[name].append(taken_ms)
    ratios = [shape / plain for plain, shape in zip(took["plain"], took["shape"], strict=True)]
    report(
        "determinism",
        goal=f"<= {GOAL:g} times a plain step",
        values=ratios,
        passed=statistics.median(ratios) <= GOAL,
        options=options,
        unit="times",
        beside=limit("the same step of plain torch", "ms", took["plain"], 2),
        more={"step_ms": {name: spread(values, 2) for name, values in took.items()}},
        digits=2,
    )


def _options() -> argparse.Namespace:
    parser = arguments("determinism", __doc__)
    parser.add_argument("--width", type=int, default=64, help="of the model (default 64)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default 2)")
    parser.add_argument("--rows", type=int, default=8, help="of a batch (default 8)")
    parser.add_argument("--tokens", type=int, default=32, help="of a row (default 32)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument("--steps", type=int, default=5, help="steps of a block (default 5)")
    parser.add_argument(
        "--blocks", type=int, default=30, help="pairs of blocks; one more warms up (default 30)"
    )
    return parser.parse_args()


def _plain(options: Any) -> float:
    model, optimizer, words_BT = _training(options)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, words_BT).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return _timed_ms(step, options.steps)


def _shape(options: Any) -> float:
    model, optimizer, words_BT = _training(options)
    with enable(SEED, "shape"):
        trainer = DeterministicTrainer(model, optimizer, SEED, level="shape", grad_norm_max=CLIP)
        return _timed_ms(lambda: trainer.step(words_BT, loss_of), options.steps)


def _training(options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(SEED)
    width = options.width
    model = Llama(width, groups=2, hidden=3 * width, layers=options.layers)
    words_BT = torch.randint(0, WORDS, (options.rows, options.tokens + 1))
    return model, torch.optim.AdamW(model.parameters()), words_BT


def _timed_ms(step: Callable[[], object], steps: int) -> float:
    """CPU time of a step, behind one that makes the optimizer's state."""
    step()
    started_ns = time.process_time_ns()
    for _ in range(steps):
        step()
    return (time.process_time_ns() - started_ns) / 1e6 / steps


if __name__ == "__main__":
    main()
