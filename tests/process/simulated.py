"""The script of a simulated rack, as a real process: the same model, updates and tokens.

`python -m tests.process.simulated '{"out": "...", "scenario": {...}, "config": {...}}'`; `scenario`
has fields of `mend_lab.sim.scenario.calm`. Rack, racks and addresses come from the environment.
`bugs`: edits (tests/planting.py) of the code that runs.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import nn

from mend.types import SECOND
from mend_lab.sim import Scenario, World
from mend_lab.sim.scenario import calm
from tests.planting import Edit, planted
from tests.process.train import told


def config_of(scenario: Scenario, stall_ns: int, seat_timeout_ns: int) -> dict[str, Any]:
    """The settings of a scenario in lockstep, as a user gives them."""
    return {
        "lockstep": scenario.lockstep, "fragments": scenario.fragments,
        "sync_period_steps": scenario.period_steps, "overlap_steps": scenario.overlap_steps,
        "merge_min_racks": scenario.k, "staleness_max_rounds": scenario.staleness_max_rounds,
        "apply_mode": scenario.apply_mode, "codec": scenario.payload,
        "outer_lr": 0.7 if scenario.momentum else 1.0,
        "outer_optimizer_momentum": scenario.momentum, "outer_ramp_rounds": scenario.ramp,
        "stall_max_s": stall_ns / SECOND, "seat_timeout_s": seat_timeout_ns / SECOND,
    }  # fmt: skip


def train(scenario: Scenario, config: dict[str, Any]) -> None:
    import mend

    rack, world = int(os.environ["MEND_RACK"]), World(scenario)
    parameters, _ = world._model(rack, 0)
    updates = world._updates(rack)
    model = nn.ParameterList(parameters)
    optimizer = torch.optim.SGD(parameters, lr=1.0)  # which adds the update as it is
    with mend.session(model, mend.MendConfig(**config), optimizer=optimizer) as runtime:
        for step in range(1, scenario.steps[rack] + 1):
            changes = world._update(rack, step, updates)
            for parameter, change in zip(parameters, changes, strict=True):
                parameter.grad = -change
            runtime.count_tokens(world.tokens(rack, step))
            optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    options = json.loads(sys.argv[1])
    bugs = [Edit(*edit) for edit in options.get("bugs", ())]
    with told(options["out"]), planted(bugs):
        train(calm(**options["scenario"]), options["config"])


if __name__ == "__main__":
    main()
