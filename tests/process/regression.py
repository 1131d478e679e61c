"""A rack of a job that is judged by what it has learned: a small net learns a noisy linear function
of 16 inputs, every rack on rows of its own. Writes `error`, the mean squared distance to the
function on inputs that no rack trains on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import mend

INPUTS, HIDDEN, ROWS, NOISE = 16, 64, 8, 0.5


def target(x_BI: Tensor) -> Tensor:
    return x_BI @ torch.randn(INPUTS, 1, generator=torch.Generator().manual_seed(5))


def train_on(model: nn.Module, optimizer: torch.optim.Optimizer, rack: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(1000 + rack)
    for _ in range(steps):
        x_BI = torch.randn(ROWS, INPUTS, generator=generator)
        y_B1 = target(x_BI) + NOISE * torch.randn(ROWS, 1, generator=generator)
        optimizer.zero_grad()
        mse_loss(model(x_BI), y_B1).backward()
        optimizer.step()


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
        train_on(model, optimizer, config.rack_number, options["steps"])
    told = {"error": error_of(model), "outcome": runtime.status().outcome}
    Path(options["out"].format(rank=0)).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
