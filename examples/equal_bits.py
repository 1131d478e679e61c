"""The same training cut in several ways, to the same bits; no racks, a CPU is enough.

    python examples/equal_bits.py
    python examples/equal_bits.py --microbatches 4
    torchrun --nproc-per-node 2 examples/equal_bits.py

All print the same digests. With --level run they print others.
"""

from __future__ import annotations

import argparse
import os
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mend.determinism import DeterministicTrainer, ddp_hook, enable, optimizer_digest, weight_digest

SEED, ROWS, TOKENS, WORDS = 7, 8, 16, 64


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--level", choices=["run", "shape"], default="shape")
    options = parser.parse_args()
    level: Literal["run", "shape"] = options.level

    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    group = None
    if ranks > 1:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    with enable(SEED, level):
        model: nn.Module = Model()
        if ranks > 1:
            model = DistributedDataParallel(model)
            if level == "shape":
                model.register_comm_hook(None, ddp_hook)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        trainer = DeterministicTrainer(
            model, optimizer, SEED, level=level, microbatches=options.microbatches, group=group
        )
        for step in range(options.steps):
            chance = torch.Generator().manual_seed(step)
            batch = torch.randint(0, WORDS, (ROWS, TOKENS + 1), generator=chance)
            # Rows of the global batch: microbatch by microbatch, and within one rank by rank.
            mine = batch.unflatten(0, (options.microbatches, ranks, -1))[:, rank].flatten(0, 1)
            loss = trainer.step(mine, loss_fn)
        weights, state = weight_digest(model), optimizer_digest(optimizer)
    if rank == 0:
        print(f"loss={float(loss):.6f} weights={weights[:16]} optimizer={state[:16]}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
