from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from mend.config import MendConfig
from mend.config.wiring import policy_of, settings_of
from mend.consensus.records import MomentFragments, Policy
from mend.fragment.model_plan import ModelPlan
from mend.types import SECOND

FOUND_LATER = {"ranks", "moments"}
OF_SETTINGS: dict[str, tuple[dict[str, Any], object]] = {
    "racks": ({"racks": 5}, 5),
    "fragments": ({"fragments": 7}, 7),
    "quorum_min_learners": ({"quorum_min_learners": 2}, 2),
    "grace_ns": ({"grace_window_ms": 1.5}, 1_500_000),
    "lockstep": ({"lockstep": True}, True),
    "max_age": ({"max_age": 3}, 3),
    "period_steps": ({"sync_period_steps": 64}, 64),
    "overlap_steps": ({"overlap_steps": 5}, 5),
    "overlap_ramp": ({"outer_start": "warm"}, 5),
    "stall_max_ns": ({"stall_max_s": 3}, 3 * SECOND),
    "evict_ns": ({"evict_s": 0}, 0),
    "restart_attests": ({"restart_attests_death": False}, False),
    "token_weighted": ({"token_weighted_merge": False}, False),
    "expected": ({"expected_learner_ids": ("rack-1", "rack-0")}, (0, 1)),
    "acts": ({"failslow_action": "act"}, True),
    "evicts": ({"failslow_action": "evict"}, True),
    "sharded": ({"exchange_plan": "sharded", "racks": 3}, True),
}


@pytest.mark.parametrize("name", sorted({*Policy.__struct_fields__} - FOUND_LATER))
def test_a_setting_is_in_the_policy(name: str) -> None:
    changes, value = OF_SETTINGS[name]
    with warnings.catch_warnings(action="ignore"):
        one, other = MendConfig(rack=0), MendConfig(rack=0, **changes)
    assert getattr(policy_of(one, one.racks), name) != value
    assert getattr(settings_of(other, None).policy, name) == value


def test_a_rank_adds_what_it_finds() -> None:
    model = nn.Linear(2, 3)
    optimizers, periods = [torch.optim.AdamW(model.parameters())], {1: 384, 2: 768}
    plan = ModelPlan(model, 4, optimizers=optimizers, moment_periods=periods)
    before = settings_of(MendConfig(rack=0), None)
    policy = before.completed(2, plan).policy
    groups = (MomentFragments(2, 384), MomentFragments(2, 768))
    assert (policy.ranks, policy.fragments, policy.moments) == (2, 6, groups)
    assert policy.of_weights == 2  # the model has no more tensors
    for name in set(Policy.__struct_fields__) - FOUND_LATER - {"fragments"}:
        assert getattr(policy, name) == getattr(before.policy, name)
