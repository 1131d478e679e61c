"""A GPU job page-locks its memory before the first round: locking takes up to a second per GB, and
training that launches kernels waits meanwhile. Counted here, in a real job without a GPU."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mend
from benchmarks._common import RackArgs, racks
from mend.engine.compute.buffers import POOLED_BYTES_MIN, Buffers
from mend.engine.live_rank import LiveRank
from mend.engine.rack_model import RackModel
from mend.engine.state.fragment_state import FragmentState

ROOT = Path(__file__).parents[2]
FRAGMENTS, GAP, PERIODS = 6, 3, 4
LEAST = POOLED_BYTES_MIN // 4
SIZES = [LEAST * 101 // 100] + [LEAST] * (FRAGMENTS - 1)
"""A tensor per fragment; no real model has fragments of exactly one size."""


class CountingPin:
    def __init__(self) -> None:
        self.locked = 0

    def lock(self, address: int, size: int) -> None:
        self.locked += 1

    def unlock(self, address: int) -> None:
        pass


class Pieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(nn.Parameter(torch.ones(size)) for size in SIZES)


def as_on_a_gpu(pin: CountingPin) -> list[Buffers]:
    """All memory of this process is locked by `pin`, and prepared where a GPU's would be. Returns
    where its pools will be."""
    init, fragments, pools = Buffers.__init__, LiveRank._fragment_states, list[Buffers]()

    def pinned(self: Buffers, idle_max: int, _: object = None) -> None:
        init(self, idle_max, pin)
        pools.append(self)

    def prepared(self: LiveRank, model: RackModel) -> list[FragmentState]:
        found = fragments(self, model)
        self._prepare(found)
        return found

    Buffers.__init__ = pinned
    LiveRank._fragment_states = prepared
    return pools


def vectors_of_round(settings: dict[str, Any], racks: int) -> int:
    """An offer of every rack, a version (two vectors with momentum), and a residual."""
    states = int(settings.get("outer_optimizer_momentum", 0) > 0)
    return racks + 1 + states + int(settings["codec"] == "int8")


def await_rest(pool: Buffers, vectors: int) -> None:
    """Wait for the vectors of the round that was applied: a step of this model is too short."""
    limit_s = time.monotonic() + 30
    while pool.idle_bytes < vectors * 4 * LEAST:
        if time.monotonic() > limit_s:
            raise TimeoutError(f"only {pool.idle_bytes} bytes came back of a round's")
        time.sleep(0.001)


def rack(args: RackArgs) -> None:
    torch.set_num_threads(1)
    pin, model = CountingPin(), Pieces()
    pools = as_on_a_gpu(pin)
    settings = {
        "fragments": FRAGMENTS, "sync_period_steps": GAP * FRAGMENTS, "overlap_steps": GAP - 1,
        "lockstep": True, **args.options.settings,
    }  # fmt: skip
    runtime = mend.mend_init(model, args.config(**settings))
    at_start = pin.locked
    for step in range(GAP * FRAGMENTS * PERIODS):
        for weights in model.parameters():
            weights.data.mul_(1 + 1e-4 * (args.rack + 1) * (step % 5))
        runtime.step(tokens=1)
        if step % GAP == GAP - 2:
            await_rest(pools[0], vectors_of_round(args.options.settings, len(args.ports)))
    args.pipe.send((at_start, pin.locked - at_start, runtime.status().rounds_committed))
    args.pipe.recv()
    mend.mend_shutdown(model)


@pytest.mark.parametrize(
    "settings",
    [
        {"codec": "float32"}, {"codec": "int8"}, {"codec": "topk", "apply_mode": "carry"},
        {"codec": "int8", "outer_optimizer_momentum": 0.5},
        {"codec": "float32", "outer_optimizer_momentum": 0.5},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)  # fmt: skip
def test_a_run_of_several_periods_locks_no_memory_after_it_joined(
    settings: dict[str, Any],
) -> None:
    command = [sys.executable, "-m", __name__, json.dumps(settings)]
    done = subprocess.run(command, check=False, text=True, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for at_start, later, rounds in json.loads(done.stdout):
        assert rounds >= FRAGMENTS * (PERIODS - 1)
        assert at_start >= 2 * FRAGMENTS, "it was prepared"
        assert later == 0


if __name__ == "__main__":
    with racks(rack, argparse.Namespace(settings=json.loads(sys.argv[1]))) as pipes:
        print([list(pipe.recv()) for pipe in pipes])
        for pipe in pipes:
            pipe.send("leave")
