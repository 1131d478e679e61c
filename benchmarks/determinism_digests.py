"""Digests of four fixed trainings at level shape, to compare two GPUs.

    python -m benchmarks.determinism_digests --out h100.json                     # on one
    python -m benchmarks.determinism_digests --out h200.json --like h100.json    # on the other

Each training is made whole and in two microbatches, which must agree. Weights and data come from
torch's CPU generator, so that they are the same everywhere. The digest is that of weights and
optimizer after three steps of AdamW. Exit status 1: two digests differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts

import torch
from torch import nn

from benchmarks._determinism_models import Gpt, Llama, loss_in_bf16, loss_of
from mend.determinism import DeterministicTrainer, enable

SEED, STEPS, LEAF_ROWS = 7, 3, 2


@dataclass(frozen=True, slots=True)
class Training:
    """`make(words)`: the model. GPT has fp32 weights and autocast; Llama has bf16 weights."""

    make: Callable[[int], nn.Module]
    words: int
    rows: int
    tokens: int

    @property
    def is_gpt(self) -> bool:
        return getattr(self.make, "func", self.make) is Gpt


TRAININGS = {
    "GPT, width 256": Training(partial(Gpt, width=256, layers=3, heads=4), 1024, 8, 128),
    "Llama, width 256": Training(
        partial(Llama, width=256, layers=3, heads=4, groups=2, hidden=512), 1024, 8, 128
    ),
    "GPT-2 124M": Training(Gpt, 50304, 8, 1024),
    "Llama 1.1B": Training(Llama, 32768, 4, 2048),
}


def digest_of(training: Training, device: str, microbatches: int) -> str:
    dtype, loss = (torch.float32, loss_in_bf16) if training.is_gpt else (torch.bfloat16, loss_of)
    with enable(SEED, level="shape", leaf_rows=LEAF_ROWS):
        torch.manual_seed(SEED)
        model = training.make(training.words).to(device, dtype)
        shape = (STEPS, training.rows, training.tokens + 1)
        batches = torch.randint(0, training.words, shape).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device != "cpu")
        trainer = DeterministicTrainer(
            model, optimizer, SEED, level="shape", microbatches=microbatches
        )
        for batch in batches:
            trainer.step(batch, loss)
        return trainer.digest()


def digests(
    names: Sequence[str], device: str, trainings: Mapping[str, Training] = TRAININGS
) -> tuple[dict[str, str], bool]:
    """The digest of each training, and whether both cuts agree in all."""
    found, agree = {}, True
    for name in names:
        whole, cut = (digest_of(trainings[name], device, parts) for parts in (1, 2))
        gc.collect()
        found[name] = whole
        agree &= whole == cut
        print(f"{whole[:24]}  {name}{'' if whole == cut else f': in two microbatches {cut[:24]}'}")
    return found, agree


def differences(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of the trainings that both made, with different digests."""
    ours, theirs = mine["digests"], other["digests"]
    return [name for name in ours if name in theirs and ours[name] != theirs[name]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=TRAININGS, default=[*TRAININGS])
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--like", type=Path, metavar="FILE", help="digests of another GPU")
    chosen = parser.parse_args()
    found, agree = digests(chosen.only, "cuda")
    on = torch.cuda.get_device_name()
    result = {"device": on, "torch": torch.__version__, "digests": found}
    print(f"on {on}, torch {torch.__version__}")
    if chosen.out:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    if chosen.like:
        other = json.loads(chosen.like.read_text())
        differ = differences(result, other)
        shared = len(found.keys() & other["digests"].keys())
        said = f"different: {', '.join(differ)}" if differ else f"{shared} equal"
        print(f"{said}; {other['device']}, torch {other['torch']}")
        agree &= bool(shared) and not differ
    if not agree:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
