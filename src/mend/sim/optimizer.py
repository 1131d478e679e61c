"""An inner optimizer for simulated ranks, whose moments racks average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

BETAS = (0.5, 0.75)


class Adam:
    """Its moments, of what the simulation adds to the weights in place of gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "betas": BETAS}]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, updates: Sequence[Tensor]) -> None:
        for parameter, update in zip(self.param_groups[0]["params"], updates, strict=True):
            usual = {"exp_avg": torch.zeros_like(update), "exp_avg_sq": torch.zeros_like(update)}
            state = self.state.setdefault(parameter, usual)
            for order, (moment, beta) in enumerate(zip(state.values(), BETAS, strict=True), 1):
                # A script that repairs its weights repairs these, too.
                moment.nan_to_num_(0.0).mul_(beta).add_(update**order, alpha=1 - beta)
