"""The same training cut in several ways, to the same bits; no racks, a CPU is enough.

    python examples/equal_bits.py
    python examples/equal_bits.py --microbatches 4
    torchrun --nproc-per-node 2 examples/equal_bits.py
    mend repro --certify --steps 20 examples/equal_bits.py

Each of the first three trains in its cut, and then uncut in one process (the first: in 4
microbatches), prints the digests of both, and says whether they are equal: exit status 0, or 1. At
level shape they are. With --level run they differ. The last makes a certificate of all cuts.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mend.determinism import DeterministicTrainer, ddp_hook, enable, optimizer_digest, weight_digest

SEED, ROWS, TOKENS, WORDS = 7, 8, 16, 64

Level = Literal["run", "shape"]


class Model(nn.Module):
    """Knows nothing of mend."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.norm, self.out = nn.RMSNorm(32), nn.Linear(32, 32)
        self.query_key_value = nn.Linear(32, 96)
        self.hidden = nn.Sequential(
            nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Dropout(0.1)
        )
        self.head = nn.Linear(32, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        both = self.query_key_value(self.norm(x)).unflatten(-1, (3, 4, 8))
        query, key, value = (part.transpose(1, 2) for part in both.unbind(2))
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        output: Tensor = self.head(x + self.hidden(x))
        return output


def loss_fn(model: nn.Module, words: Tensor) -> Tensor:
    logits = model(words[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def train(
    level: Level, steps: int, microbatches: int, group: dist.ProcessGroup | None
) -> tuple[float, str, str]:
    """Returns the last loss, and the digests of weights and optimizer. Without a group this process
    trains the whole batch alone."""
    ranks = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    with enable(SEED, level):
        model: nn.Module = Model()
        if group is not None:
            model = DistributedDataParallel(model)
            if level == "shape":
                model.register_comm_hook(None, ddp_hook)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        trainer = DeterministicTrainer(
            model, optimizer, SEED, level=level, microbatches=microbatches, group=group
        )
        for step in range(steps):
            chance = torch.Generator().manual_seed(step)
            batch = torch.randint(0, WORDS, (ROWS, TOKENS + 1), generator=chance)
            # Rows of the global batch: microbatch by microbatch, and within one rank by rank.
            mine = batch.unflatten(0, (microbatches, ranks, -1))[:, rank].flatten(0, 1)
            loss = trainer.step(mine, loss_fn)
        return float(loss), weight_digest(model), optimizer_digest(optimizer)


def name_of(ranks: int, microbatches: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}, {microbatches} microbatch{'es' * (microbatches > 1)}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--level", choices=["run", "shape"], default="shape")
    options = parser.parse_args()

    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        dist.init_process_group("gloo")
    group = dist.group.WORLD if ranks > 1 else None
    cut = train(options.level, options.steps, options.microbatches, group)
    if ranks > 1:
        dist.destroy_process_group()
    if rank:
        return
    other = 1 if ranks > 1 or options.microbatches > 1 else 4
    made = {
        name_of(ranks, options.microbatches): cut,
        name_of(1, other): train(options.level, options.steps, other, None),
    }
    for name, (loss, weights, state) in made.items():
        print(f"{name:<24}loss={loss:.6f} weights={weights[:16]} optimizer={state[:16]}")
    is_equal = len({(weights, state) for _, weights, state in made.values()}) == 1
    sign, verdict = ("=", "equal") if is_equal else ("!=", "different")
    print(f"{verdict}: {f' {sign} '.join(made)}")
    sys.exit(not is_equal)


if __name__ == "__main__":
    main()
