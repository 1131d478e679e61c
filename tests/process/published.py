"""The quick start as it is published, with a model and data in front of it.

`python -m tests.process.published OUT [ADDR PEERS]`: with no more than OUT the settings stand as
they are published; ADDR and PEERS (with commas) replace the two addresses.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mend
from mend import MendConfig, mend_init, mend_shutdown
from tests.process import injected

STEPS = 120
NETWORK = {
    "sideband_addr": "tcp://0.0.0.0:51900",
    "sideband_peers": ("tcp://peer1:51900", "tcp://peer2:51900"),
}


def main() -> None:
    injected.prepare()
    out = Path(sys.argv[1])
    network = dict(NETWORK)
    if len(sys.argv) > 2:
        network = {"sideband_addr": sys.argv[2], "sideband_peers": tuple(sys.argv[3].split(","))}
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = MendConfig(
        merge_min_racks=2,
        grace_window_ms=2000,
        token_weighted_merge=True,
        sync_period_steps=40,
        concurrent_outer_step=True,
        failslow_zscore_threshold=3.0,
        failslow_window_steps=50,
        rack_aware=True,
        sideband_heartbeat_ms=100,
        diagnostics_dir=out.with_suffix(".diag"),
        **network,  # two of the settings above
    )

    mend_init(model, config)
    rack = mend.get_runtime(model).status().rack
    rng = torch.Generator().manual_seed(rack)
    if dist.is_initialized() and dist.get_rank():
        out = out.with_suffix(f".{dist.get_rank()}.json")
    for _ in range(STEPS):
        x = torch.randn(4, 8, generator=rng)
        loss = nn.functional.mse_loss(model(x), x[:, :4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    status = mend_shutdown(model)

    assert status is not None
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    said = {
        "rack": rack, "racks": status.racks_configured, "rounds_committed": status.rounds_committed,
        "merged_share": status.tokens_merged_share, "weights": weights.numpy().tobytes().hex(),
    }  # fmt: skip
    out.write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    main()
