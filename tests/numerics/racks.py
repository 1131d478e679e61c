"""Tiny racks for the numerics tests: a two-layer model, its own data per rack, a plain
optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mend_lab.reference import Rack

FRAGMENTS = ((0, 1), (2,), (3,))
"""Parameter indices of the model below, in three fragments."""


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).to(dtype)


def trainer(
    model: nn.Module, data_seed: int, tokens: Callable[[int], int] = lambda step: 8
) -> Callable[[int], int]:
    """One SGD step with momentum on a batch that depends on the seed and the step alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    teacher = torch.randn(6, 3, generator=torch.Generator().manual_seed(1000 + data_seed))

    def train(step: int) -> int:
        rng = torch.Generator().manual_seed(100_000 * data_seed + step)
        dtype = next(model.parameters()).dtype
        x = torch.randn(tokens(step), 6, generator=rng)
        loss = ((model(x.to(dtype)) - (x @ teacher).to(dtype)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return tokens(step)

    return train


def rack(
    data_seed: int,
    tokens: Callable[[int], int] = lambda step: 8,
    dtype: torch.dtype = torch.float32,
) -> Rack:
    model = build(dtype)
    return Rack(tuple(model.parameters()), trainer(model, data_seed, tokens))


def flat(module_or_rack: nn.Module | Rack) -> Tensor:
    parameters = module_or_rack.parameters
    found = parameters() if callable(parameters) else parameters
    return torch.cat([p.detach().reshape(-1) for p in found])
