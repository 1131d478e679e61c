"""A run's events, given to the reference: an independent program must arrive at the same bits."""

from __future__ import annotations

from typing import Any

import torch

from mend.config.pair_warnings import default_momentum
from mend.fragment import build_plan
from mend_lab.reference import (
    Applied,
    Captured,
    Commit,
    Facts,
    Outcome,
    Rack,
    Settings,
    lockstep,
    replay,
)
from tests.process import train
from tests.process.racks import Result
from tests.reference_commits import commit_of

RAMPS = {"scratch": 10, "warm": 5}
"""Rounds of the momentum's ramp where no setting gives them."""


def settings_of(model: str, config: dict[str, Any], racks: int = 2) -> Settings:
    """The reference's names for mend's settings."""
    made = train.build(model, 0)
    index = {name: i for i, (name, _) in enumerate(made.named_parameters())}
    plan = build_plan(made, config.get("fragments", 4))
    period = config["sync_period_steps"]
    ramp = config.get("outer_ramp_rounds", RAMPS[config.get("outer_start", "scratch")])
    return Settings(
        fragments=[[index[slot.name] for slot in layout.slots] for layout in plan],
        period=period,
        overlap=config["overlap_steps"],
        apply_mode=config.get("apply_mode", "carry"),
        alpha=config.get("blend_alpha", 0.5),
        outer_lr=config.get("outer_lr", 1.0),
        momentum=config.get("outer_optimizer_momentum", default_momentum(period, racks)),
        ramp=ramp,
        overlap_ramp=ramp,
        payload=config.get("codec", "float32"),
        radial=[i for name, i in index.items() if name not in config.get("merge_mean_names", ())]
        if config.get("merge") == "rda"
        else (),
    )


def rack_of(model: str, rack: int) -> Rack:
    """The same training as train.py's, from rack 0's version 0."""
    made = train.build(model, 0)
    optimizer = train.optimizer_of(made)

    def step(number: int) -> int:
        loss = train.loss_of(made, rack, 0, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return train.tokens_of(rack, number)

    return Rack(tuple(made.parameters()), step)


def facts_of(result: Result) -> Facts:
    events: list[Captured | Applied] = []
    for event in result.kinds("captured", "applied"):
        step, fragment = event["step"], event["fragment"]
        if event["kind"] == "captured":
            closing = event.get("closing", False)
            events.append(Captured(step, fragment, event["seq"], closing))
        else:
            events.append(Applied(step, fragment, event["version"]))
    return Facts(result.status["step"], events)


def commits_of(result: Result) -> list[Commit]:
    return [commit_of(event) for event in result.commits]


def replayed(results: list[Result], model: str, config: dict[str, Any]) -> Outcome:
    """The run again, from what its racks recorded."""
    racks = [rack_of(model, rack) for rack in range(len(results))]
    facts = [facts_of(result) for result in results]
    return replay(racks, settings_of(model, config, len(racks)), facts, commits_of(results[0]))


def in_lockstep(racks: int, model: str, config: dict[str, Any], steps: int) -> Outcome:
    """The run as it must have been, from the configuration alone (without the closing captures)."""
    made = [rack_of(model, rack) for rack in range(racks)]
    return lockstep(made, settings_of(model, config, racks), steps)


def anchor_bits(outcome: Outcome) -> list[list[int]]:
    """Per fragment, the newest anchor."""
    return [train.bits(versions[-1].values) for versions in outcome.anchors]


def model_bits(result: Result, model: str, config: dict[str, Any]) -> list[list[int]]:
    """Per fragment, the weights that a rack ended with, as fp32."""
    names = [name for name, _ in train.build(model, 0).named_parameters()]
    fragments = settings_of(model, config).fragments
    return [
        [
            bits
            for i in fragment
            for bits in widened(result.weights[names[i]], dict_of_types(model)[names[i]])
        ]
        for fragment in fragments
    ]


def dict_of_types(model: str) -> dict[str, torch.dtype]:
    return {name: p.dtype for name, p in train.build(model, 0).named_parameters()}


def widened(integers: list[int], dtype: torch.dtype) -> list[int]:
    """The bits of the fp32 numbers that are equal to these."""
    if dtype == torch.float32:
        return integers
    return train.bits(torch.tensor(integers, dtype=torch.int16).view(dtype).float())
