"""The calls of tsugi-mend's examples/torchrun_two_rank.py (0.1.5), in its order, with its imports
changed: two ranks of one torchrun, each a learner, around one DistributedDataParallel."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from mend.compat import MendConfig, mend_init, mend_shutdown
from mend.compat.reducer import LearnerFragment
from mend.compat.runtime import get_runtime


def wait_for_sideband_peer(runtime: Any, expected_rank_id: str, timeout_s: float = 5.0) -> None:
    if runtime.sideband is None:
        raise RuntimeError("sideband was not started")
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if expected_rank_id in runtime.sideband.peer_snapshot():
            return
        time.sleep(0.05)
    raise TimeoutError(f"sideband did not observe peer {expected_rank_id!r}")


def collect_outer_step(runtime: Any, timeout_s: float = 30.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        result = runtime.outer_step_collect()
        if result is not None:
            return result
        time.sleep(0.005)
    raise TimeoutError("outer-step reducer did not complete")


def tell(*words: str) -> None:
    """A line in one write: print makes several, between which the other rank's come."""
    os.write(sys.stdout.fileno(), f"{' '.join(words)}\n".encode())


def main() -> None:
    port, spread = int(os.environ["MEND_SIDEBAND_PORT_BASE"]), "ddp" in sys.argv
    dist.init_process_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(20240527)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model = DDP(model) if spread else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = MendConfig(
        quorum_min_learners=world_size, grace_window_ms=20, sync_period_steps=4,
        momentum_sync_period_steps=8, async_tp_enabled=False, concurrent_outer_step=True,
        sideband_addr=f"tcp://127.0.0.1:{port + rank}",
        sideband_peers=(f"tcp://127.0.0.1:{port + 1 - rank}",), sideband_heartbeat_ms=50,
        sideband_connect_timeout_s=0.1, diagnostics_dir=f"{os.environ['OUT']}/rank{rank}",
    )  # fmt: skip
    mend_init(model, config, rank_id=f"local-node/rank-{rank}")
    runtime = get_runtime(model)
    dist.barrier()
    wait_for_sideband_peer(runtime, f"local-node/rank-{1 - rank}")
    for step in range(1, 9):
        runtime.step_begin(step)
        torch.manual_seed(1000 + step + rank)
        target = torch.full((4, 4), fill_value=float(rank))
        (model(torch.randn(4, 8)) - target).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        runtime.step_end(step)
        if runtime.schedule_for(step).should_sync_params:
            fragments = [LearnerFragment(f"local-node/rank-{rank}", step, [], 32)]
            runtime.outer_step_begin(round_id=step, fragment_provider=fragments.copy)
            result = collect_outer_step(runtime)
            assert (result.round_id, result.merged_delta) == (step, [])
            tell("merged", *result.learners_merged)
    dist.barrier()
    mend_shutdown(model)
    tell("weights", sum(p.double().sum().item() for p in model.parameters()).hex())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
