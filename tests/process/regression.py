"""A rack of a job that is judged by what it has learned: a small net learns a noisy linear function
of 16 inputs, every rack on rows of its own. Writes `error`, the mean squared distance to the
function on inputs that no rack trains on, and records it every few steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import mend

INPUTS, HIDDEN, ROWS, NOISE = 16, 64, 8, 0.5
LOOK_STEPS = 10


def target(x_BI: Tensor) -> Tensor:
    return x_BI @ torch.randn(INPUTS, 1, generator=torch.Generator().manual_seed(5))


def train_on(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rack: int,
    steps: int,
    look: Callable[[], None] | None = None,
) -> None:
    generator = torch.Generator().manual_seed(1000 + rack)
    for step in range(1, steps + 1):
        x_BI = torch.randn(ROWS, INPUTS, generator=generator)
        y_B1 = target(x_BI) + NOISE * torch.randn(ROWS, 1, generator=generator)
        optimizer.zero_grad()
        mse_loss(model(x_BI), y_B1).backward()
        optimizer.step()
        if look is not None and step % LOOK_STEPS == 0:
            look()


def error_of(model: nn.Module) -> float:
    x_BI = torch.randn(4096, INPUTS, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        return mse_loss(model(x_BI), target(x_BI)).item()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def learn_alone(rack: int, steps: int) -> float:
    """Return the error of a rack that exchanges nothing."""
    model, optimizer = build()
    train_on(model, optimizer, rack, steps)
    return error_of(model)


def main() -> None:
    torch.set_num_threads(1)
    options = json.loads(sys.argv[1])
    config = mend.MendConfig(**options["config"])
    model, optimizer = build()
    with mend.session(model, config, optimizer) as runtime:

        def look() -> None:
            runtime.record(held_out=error_of(model))
            if config.exchange:
                with runtime.anchor_weights():
                    runtime.record(held_out_merged=error_of(model))

        train_on(model, optimizer, config.rack_number, options["steps"], look)
    told = {"error": error_of(model), "outcome": runtime.status().outcome}
    Path(options["out"].format(rank=0)).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
