"""A rack that trains at its own pace, on a model with statistics in it; the settings come from the
environment. `python -m tests.process.uneven OUT PACE_MS STEPS`. Short rounds are a warning at
once."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import mend
from mend.engine.state import participation


def main() -> None:
    torch.manual_seed(0)
    participation.SHORT_NS = 0
    pace_s = float(sys.argv[2]) / 1000
    model = nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with mend.session(model, mend.MendConfig(), optimizer) as runtime:
        for _ in range(int(sys.argv[3])):
            begun_s = time.monotonic()
            x = torch.randn(4, 8)
            nn.functional.mse_loss(model(x), x[:, :4]).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(max(0.0, begun_s + pace_s - time.monotonic()))
    status = runtime.status()
    said = {"rounds_by_racks": status.rounds_by_racks, "rounds_recent": status.rounds_recent}
    Path(sys.argv[1]).write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    main()
