"""A training that does not come to the same bits twice, and the command that says why; no racks.

    mend repro -- examples/find_difference.py
    mend repro --a-args "--microbatches 1" --b-args "--microbatches 2" -- \
        examples/find_difference.py --fault none

The first finds the sum in `Pool`, whose order comes from a clock, as that of atomic adds on a GPU
comes from threads. The second finds that gradients of microbatches are added in another order.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

ROWS, TOKENS, WIDTH = 8, 16, 32


class Pool(nn.Module):
    """The sum over the tokens of each row."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(TOKENS)
        if self.fault == "order":
            clock = torch.Generator().manual_seed(time.perf_counter_ns())
            order = torch.randperm(TOKENS, generator=clock)
        total = x.new_zeros(x.shape[0], WIDTH)
        for token in order.tolist():
            total = total + x[:, token]
        return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=["none", "order"], default="order")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--microbatches", type=int, default=1)
    options = parser.parse_args()

    torch.manual_seed(1)
    model = nn.Sequential(nn.LayerNorm(WIDTH), Pool(options.fault), nn.GELU())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(options.steps):
        chance = torch.Generator().manual_seed(step)
        batch = torch.randn(ROWS, TOKENS, WIDTH, generator=chance)
        optimizer.zero_grad()
        for part in batch.chunk(options.microbatches):
            model(part).square().sum().backward()
        optimizer.step()
    print(f"{float(next(model.parameters()).sum()):.9f}")


if __name__ == "__main__":
    main()
