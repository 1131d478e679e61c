"""Optimizers of simulated ranks: one whose moments racks average, and one whose state depends on
the steps that it has made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

BETAS = (0.5, 0.75)
_MODULUS = 2**31 - 1


class Adam:
    """Adam's moments of the updates that the simulation adds to the weights in place of
    gradients."""

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


class Moments:
    """An optimizer state of one number per rank, which every step changes in a known way."""

    def __init__(self, parameters: Sequence[nn.Parameter], rank: int) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters)}]
        self._rank = rank
        self.trail = torch.tensor([self._expected(0)])

    def step(self, number: int) -> None:
        self.trail = (self.trail * 3 + number) % _MODULUS

    def begin_fresh(self, steps: int) -> None:
        """Begin with no step of its own, in a job that has made so many."""
        self.trail = torch.tensor([self._expected(steps)])

    def fits(self, steps: int) -> bool:
        """Whether the state is that of a rank after so many steps, its own or copied ones."""
        return int(self.trail) == self._expected(steps)

    def _expected(self, steps: int) -> int:
        value = self._rank
        for number in range(1, steps + 1):
            value = (value * 3 + number) % _MODULUS
        return value

    def state_dict(self) -> dict[str, Any]:
        groups = [{"params": list(range(len(group["params"])))} for group in self.param_groups]
        return {"state": {0: {"trail": self.trail}}, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trail = state["state"][0]["trail"]
