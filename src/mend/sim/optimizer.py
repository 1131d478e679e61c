"""An inner optimizer for simulated ranks, whose moments racks average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mend.fragment.moments import (
    FIRST,
    SECOND,
    MomentsView,
    Optimizer,
    build_moment_plan,
    moments_of,
)

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
            state["exp_avg"].mul_(BETAS[0]).add_(update, alpha=1 - BETAS[0])
            state["exp_avg_sq"].mul_(BETAS[1]).add_(update.square(), alpha=1 - BETAS[1])


def moment_views(
    named: Sequence[tuple[str, nn.Parameter]],
    optimizers: Sequence[Optimizer],
    count: int,
    fragments: int,
) -> list[MomentsView]:
    """As `LiveRank` makes them: of first moments, and with a `count` of 2 of second ones."""
    views: list[MomentsView] = []
    for order in (FIRST, SECOND)[:count]:
        found = moments_of(named, optimizers, order)
        made = build_moment_plan(found, fragments, fragments + len(views))
        views += [MomentsView(layout, moments) for layout, moments in made]
    return views
