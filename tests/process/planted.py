"""A training script that knows nothing of mend, with a fault that can be planted.

python -m tests.process.planted --fault atomic
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROWS, TOKENS, WIDTH = 8, 16, 32
FAULTS = ("none", "atomic", "atomic backward", "batch", "data", "clock", "seed")


@torch.library.custom_op("planted::atomic_sum", mutates_args=())
def atomic_sum(x: Tensor) -> Tensor:
    """Over the tokens of each row, in an order that only a clock knows, as atomics add."""
    chance = torch.Generator().manual_seed(time.perf_counter_ns())
    total = x.new_zeros(x.shape[0], x.shape[2])
    for token in torch.randperm(x.shape[1], generator=chance).tolist():
        total += x[:, token]
    return total


@torch.library.custom_op("planted::batch_sum", mutates_args=())
def batch_sum(x: Tensor) -> Tensor:
    """The same in as many parts as there are rows, as a kernel that splits what is long."""
    parts = [part.sum(1) for part in x.chunk(x.shape[0], 1)]
    return torch.stack(parts).sum(0)


def _spread(context: object, gradient: Tensor) -> Tensor:
    return gradient[:, None].expand(-1, TOKENS, -1).contiguous()


atomic_sum.register_autograd(_spread)
batch_sum.register_autograd(_spread)


class TokenSum(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "atomic":
            return atomic_sum(x)
        if self.fault == "batch":
            return batch_sum(x)
        if self.fault == "atomic backward":
            return Scaled.apply(x).sum(1)
        # An order of its own for every row, so that nothing depends on the batch.
        return torch.stack([sum(row.unbind(0)) for row in x.unbind(0)])


class Scaled(torch.autograd.Function):
    """x, whose gradient an atomic add makes."""

    @staticmethod
    def forward(context: object, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        noisy = gradient + torch.randn(gradient.shape[1:], generator=torch.Generator())
        return gradient + 0 * noisy + 1e-6 * atomic_sum(noisy * 1e3)[:, None]


class Scale(nn.Module):
    """Element by element, so that its own kernels keep a row's bits in any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Model(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.first, self.tokens, self.last = Scale(), TokenSum(fault), Scale()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.tokens(self.first(x)).relu())
        return out


def batch(step: int, fault: str, first_step: int) -> Tensor:
    chance = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=chance)
    if fault == "clock" and step >= first_step:
        x[3] += time.perf_counter_ns()
    if fault == "data" and step >= first_step:
        x.numpy()[3] += time.perf_counter_ns() % 1000 + 1
    return x


def train(
    fault: str,
    *,
    steps: int = 3,
    microbatches: int = 1,
    fault_step: int = 2,
    by_keyword: bool = False,
) -> None:
    """The fault begins at step `fault_step`, counted from 1. The group of the ranks ends with their
    processes: destroying it beside a model of DDP once waited for ever."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(time.perf_counter_ns() if fault == "seed" else 1)
    inner = Model("none")
    model: nn.Module = DistributedDataParallel(inner) if ranks > 1 else inner
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, steps + 1):
        inner.tokens.fault = fault if step >= fault_step else "none"
        optimizer.zero_grad()
        mine = batch(step, fault, fault_step).chunk(ranks)[rank]
        for part in mine.chunk(microbatches):
            out = model(x=part) if by_keyword else model(part)
            loss = out.square().sum()
            loss.backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--fault-step", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    how = {"microbatches": options.microbatches, "fault_step": options.fault_step}
    train(options.fault, steps=options.steps, **how)


if __name__ == "__main__":
    main()
