"""The quick start of tsugi-mend's README (0.1.5), changed in its two import lines only.

What the snippet leaves to the reader stands in front of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mend.compat import MendConfig, mend_init, mend_shutdown
from mend.compat.runtime import get_runtime
from tests.process import train

STEPS = 140


def train_one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    x, target = batch
    loss = nn.functional.mse_loss(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def batches(rack: int) -> Iterator[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(rack)
    for _ in range(STEPS):
        x = torch.randn(4, train.INPUTS, generator=rng)
        yield x, x[:, : train.OUTPUTS]


def make_fragment_provider(*_: object) -> Callable[[], Any]:
    def provider() -> Any:
        raise AssertionError("mend reads the fragments from the model itself")

    return provider


def apply_merged_delta(model: nn.Module, delta: Any) -> None:
    assert delta == [], "mend has applied it already"


def main() -> None:
    options = json.loads(sys.argv[1])
    model = train.build("plain", 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = batches(int(os.environ["MEND_RACK"]))
    os.chdir(Path(options["out"]).parent)

    # ---- from here on as it was written
    config = MendConfig(
        quorum_min_learners=4,
        grace_window_ms=2000,
        token_weighted_merge=True,
        sync_period_steps=128,
        # Orchestrator overlaps the cross-rack outer-step wait with inner-step
        # compute. Default True.
        concurrent_outer_step=True,
        diagnostics_dir="./results/mend_diag",
    )

    mend_init(model, config)
    runtime = get_runtime(model)

    for step, batch in enumerate(loader):
        runtime.step_begin(step)
        loss = train_one_step(model, optimizer, batch)  # noqa: F841

        sched = runtime.schedule_for(step)
        if sched.should_sync_params and not runtime.outer_step_in_flight():
            runtime.outer_step_begin(
                round_id=step,
                fragment_provider=make_fragment_provider(...),
            )

        result = runtime.outer_step_collect()
        if result is not None:
            apply_merged_delta(model, result.merged_delta)

        runtime.step_end(step)

    mend_shutdown(model)
    # ---- up to here

    told = {"status": train.seen(runtime.status()), "weights": train.weights(model)}
    Path(options["out"].format(rank=0)).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
